"""A `penstock.KVStore` on disk: files that are there whole or not at all, checkpoints, and what is torn."""

import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import programs
import pytest
import torch
from job_processes import run_well

import penstock as ps
from penstock import whole_files
from penstock.kvstore import disk
from penstock.whole_files import LOCK_NAME, MANIFEST, CheckpointKey, CheckpointPart, add_part, newest

SHAPES = {"w": (70, 300), 7: (5,), "7": (), "empty": (3, 0), "half": (4,)}


def add_checkpoint(path, number, fill, keep, writer=0):
    """One that is one file."""
    add_part(path, CheckpointPart(CheckpointKey(number, writer)), fill, keep)


def names_in(place):
    return {one.name for one in place.iterdir()} - {LOCK_NAME}


def begin(kv):
    for key, shape in SHAPES.items():
        kv.init(key, torch.zeros(shape) if key == "half" else np.zeros(shape))


def stepped(kv, steps):
    for step in steps:
        for key, shape in SHAPES.items():
            kv.push(key, np.full(shape, 1.0 + step, np.float32 if key == "half" else np.float64))
    kv.wait()


def equal(one, other):
    assert {name: value for name, value in one.items() if name not in {"values", "states"}} == {
        name: value for name, value in other.items() if name not in {"values", "states"}
    }
    for key, value in one["values"].items():
        np.testing.assert_array_equal(value, other["values"][key])
        assert type(value) is type(other["values"][key])
        for field, state in one.get("states", {}).get(key, {}).items():
            np.testing.assert_array_equal(state, other["states"][key][field])


def saved(rank, size, place):
    for kind, optimizer in [("sync", None), ("sync", "AdamW"), ("async", None), ("async", "SGD")]:
        kv = ps.KVStore(kind)
        begin(kv)
        if optimizer is not None:
            kv.set_optimizer(optimizer, lr=0.01, weight_decay=0.1, rescale=0.5)
        stepped(kv, range(3))
        state = kv.state_dict()
        name = place / f"{kind}-{optimizer}.safetensors"
        kv.save(name)
        other = ps.KVStore(kind)
        begin(other)
        other.load(name)
        equal(other.state_dict(), state)
        stepped(other, range(3, 5))
        stepped(kv, range(3, 5))
        if (kind, optimizer) != ("async", "SGD"):  # whose numbers depend on who is first
            equal(other.state_dict(), kv.state_dict())


def loaded(rank, size, place):
    kv = ps.KVStore("sync")
    begin(kv)
    kv.load(place / "sync-AdamW.safetensors")
    assert kv.state_dict()["updates"]["w"] == 3
    stepped(kv, range(3, 4))
    assert kv.state_dict()["updates"]["w"] == 4
    with pytest.raises(ps.ConfigError, match=r"load: .*nothing.safetensors cannot be read"):
        kv.load(place / "nothing.safetensors")
    kv.init("more", np.zeros(3))
    with pytest.raises(ps.ConfigError, match=r"the state has the keys 'w', 7, '7', .*the store .*'more'"):
        kv.load(place / "sync-AdamW.safetensors")
    stepped(kv, range(4, 5))


@pytest.mark.parametrize("size", [1, 2])
def test_a_file_has_all_of_a_store_for_any_number_of_ranks(size, tmp_path):
    for name in ("first", "then"):
        (tmp_path / name).mkdir()
    run_well(size, saved, tmp_path / "first", tmp_path)
    run_well(3 - size, loaded, tmp_path / "then", tmp_path)


def tear(path, how):
    data = bytearray(path.read_bytes())
    if how == "short":
        data = data[: len(data) // 2]
    elif how == "other bytes":
        data[len(data) // 2] ^= 1
    path.unlink()
    if how != "missing":
        path.write_bytes(data)


def checkpoints(rank, size, place):
    kv = ps.KVStore("sync")
    begin(kv)
    kv.set_optimizer("SGD", lr=0.1, momentum=0.9)
    written = []
    for step in range(7):
        stepped(kv, [step])
        written += filter(None, [kv.checkpoint(place, every=2, keep=2)])
    assert kv.finish_checkpoint() == written[-1]
    assert [Path(name).name for name in written] == [f"kvstore-{n:010d}.safetensors" for n in (2, 4, 6)]
    names = [Path(name).name for name in written[1:]]
    assert names_in(place) == {*names, *(name + MANIFEST for name in names)}
    for bad in ({"every": 0}, {"keep": 0}, {"every": "often"}):
        with pytest.raises(ps.ConfigError, match=r"must be 1 at least"):
            kv.checkpoint(place, **bad)
    for how in ("short", "other bytes", "missing"):
        whole = Path(written[2]).read_bytes() if rank == 0 else b""
        ps.barrier()
        if rank == 0:
            tear(Path(written[2]), how)
        other = ps.KVStore("sync")
        begin(other)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert other.load(place) == 4
        if rank == 0:
            assert f"checkpoint {written[2]} is torn (" in str(said[0].message)
            assert f"{written[1]} is used" in str(said[0].message)
            Path(written[2]).write_bytes(whole)
        ps.barrier()
        assert other.state_dict()["updates"]["w"] == 4
        # It goes on counting from there.
        stepped(other, range(4, 6))
        assert other.checkpoint(place / "again", every=6) is None
        assert other.checkpoint(place / "again", every=6) == other.finish_checkpoint() is not None
        stepped(other, range(6, 7))
        equal(other.state_dict(), kv.state_dict())
    ps.barrier()
    if rank == 0:
        for name in written[1:]:
            tear(Path(name + MANIFEST), "short")
    with pytest.raises(ps.ConfigError, match=r"no whole checkpoint in .*6\.safetensors is torn \(its manifest"):
        kv.load(place)
    with pytest.raises(ps.ConfigError, match=r"no whole checkpoint in .*: there is no file \*\.manifest"):
        kv.load(place.parent)
    with pytest.raises(ps.ConfigError, match=r"checkpoint: .*directory|checkpoint: .*exists"):
        kv.checkpoint(written[2])


def test_checkpoints(tmp_path):
    (tmp_path / "job").mkdir()
    run_well(2, checkpoints, tmp_path / "job", tmp_path / "kept")


def written_in_the_background(rank, size, place):
    kv = ps.KVStore("sync")
    kv.init("w", np.zeros(5000))
    kv.set_optimizer("SGD", lr=1.0)
    held, go_on, put, sync = threading.Event(), threading.Event(), whole_files.put, whole_files._sync

    def wait(path, fill, crc=None):
        held.set()
        assert go_on.wait(60)
        return put(path, fill, crc)

    def refuse(path):
        raise OSError(28, "No space left on device")

    whole_files.put = wait
    kv.push("w", np.ones(5000))
    name = kv.checkpoint(place)
    for _ in range(2):
        kv.push("w", np.ones(5000))  # while it is being written
    value = np.empty(5000)
    kv.pull("w", out=value).wait()
    assert value[0] == -3.0 * size
    if rank == 0:
        assert held.wait(60)
        assert not list(place.glob("kvstore-*"))
    go_on.set()
    assert kv.finish_checkpoint() == name == kv.finish_checkpoint()
    whole_files.put, whole_files._sync = put, refuse
    broken = kv.checkpoint(place)
    with pytest.raises(ps.ConfigError, match=rf"checkpoint: {broken} was not written: .*No space left") as error:
        kv.checkpoint(place)
    assert error.value.rank == 0
    whole_files._sync = sync
    other = ps.KVStore("sync")
    other.init("w", np.zeros(5000))
    assert other.load(place) == 1
    assert other.state_dict()["values"]["w"][0] == -1.0 * size  # of when it was asked for
    return kv.checkpoint(place)  # finished by the end of the job


def test_a_checkpoint_is_written_while_the_program_goes_on(tmp_path):
    (tmp_path / "job").mkdir()
    place = tmp_path / "kept"
    last = run_well(2, written_in_the_background, tmp_path / "job", place)
    assert (newest("load", place)[0], newest("load", place)[1]) == (Path(last[0]), 4)


def two_at_one_place(rank, size, place):
    one, other = ps.KVStore("sync"), ps.KVStore("sync")
    for kv in (one, other):
        kv.init("w", np.full(3, 1.0 if kv is one else 2.0))
    refused = rf"another one of this process writes its checkpoints to {place}.*of its own"
    one.checkpoint(place)
    for _ in range(2):  # while it is being written, and afterwards
        with pytest.raises(ps.ConfigError, match=refused):
            other.checkpoint(place)
        one.finish_checkpoint()
    assert other.checkpoint(place / "other") == other.finish_checkpoint()
    # In place of the first one; which goes on itself if nobody did so.
    assert other.load(place) == 1
    assert one.checkpoint(place) == one.finish_checkpoint()
    assert other.load(place) == 2
    assert other.state_dict()["values"]["w"][0] == 1.0
    assert other.checkpoint(place) == other.finish_checkpoint()
    with pytest.raises(ps.ConfigError, match=refused):
        one.checkpoint(place)
    del one, other, kv
    another = ps.KVStore("sync")
    another.init("w", np.zeros(3))
    for _ in range(4):
        last = another.checkpoint(place, every=4)
    assert another.finish_checkpoint() == last is not None


def test_two_stores_do_not_write_to_one_directory(tmp_path):
    (tmp_path / "job").mkdir()
    run_well(2, two_at_one_place, tmp_path / "job", tmp_path / "kept")


STATE = {"values": {"w": np.arange(6.0), 3: np.ones((2, 2), np.int32)}, "updates": {"w": 4, 3: 4}}


@pytest.mark.parametrize("moment", ["_sync", "_crc"])
def test_a_writer_that_stops_in_the_middle_leaves_what_was_there(moment, tmp_path, monkeypatch):
    first = tmp_path / "first"
    fill = disk.filled_with("checkpoint", STATE)
    add_checkpoint(first, 1, fill, 2)
    kept = getattr(whole_files, moment)
    for after in range(1, 4):  # of the file, its directory, the manifest
        count = iter(range(10))

        def stop(path, count=count, after=after):
            if next(count) == after - 1:
                raise OSError(28, "No space left on device")
            return kept(path)

        with monkeypatch.context() as patched:
            patched.setattr(whole_files, moment, stop)
            try:
                add_checkpoint(tmp_path / "second", 2, fill, 2)
            except OSError as error:
                assert "No space left" in str(error)
        path, number = newest("load", tmp_path)
        assert number in {1, 2} and (number == 2 or path == first)
        np.testing.assert_array_equal(disk.read(path)["values"]["w"], STATE["values"]["w"])
        assert not [one for one in tmp_path.iterdir() if one.name.endswith(".tmp")]


WRITES = """
import itertools, os, pathlib, signal, sys
import numpy as np
import penstock as ps

place, moment = sys.argv[1:]
ps.init(rank=0, world_size=1)
kv = ps.KVStore()
kv.init("w", np.zeros(3))
kv.set_optimizer("SGD", lr=1.0, momentum=0.5)
before = kv.load(place) if os.path.exists(place) else 0
value = np.empty(3)
kv.pull("w", out=value).wait()
print("from", before, value[0], flush=True)
kv.pushpull("w", np.ones(3), out=value).wait()
kv.checkpoint(place, every=1)
kv.finish_checkpoint()
if moment != "none":
    replace, count = pathlib.Path.replace, itertools.count()

    def killed(path, target):
        if next(count) == int(moment):
            os.kill(os.getpid(), signal.SIGKILL)
        return replace(path, target)

    pathlib.Path.replace = killed
    kv.pushpull("w", np.ones(3), out=value).wait()
    kv.checkpoint(place, every=1)
ps.shutdown()
"""


@pytest.mark.parametrize("moment", [0, 1], ids=["the state's", "the manifest's"])
def test_what_a_writer_leaves_that_is_killed_before_a_file_has_its_name_is_never_read(moment, tmp_path):
    (tmp_path / "writes.py").write_text(WRITES)
    place = tmp_path / "kept"

    def written(when):
        return programs.run(tmp_path / "writes.py", place, when, timeout=120)

    done = written(moment)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "from 0 0.0\n"), done.stderr
    (left,) = (one for one in place.iterdir() if one.name.endswith(".tmp"))
    of = f"kvstore-{2:010d}.safetensors{MANIFEST if moment else ''}"
    assert left.name.startswith(f".{of}.") and left.stat().st_size > 0
    for turn, value in ((1, -1.0), (2, -2.5)):  # by momentum: 1, 1.5, 1.75
        done = written("none")
        assert (done.returncode, done.stdout) == (0, f"from {turn} {value}\n"), done.stderr
    assert newest("load", place)[1] == 3
    assert not left.exists(), "of a checkpoint that is older than the newest"
    names = {f"kvstore-{number:010d}.safetensors{of}" for number in (2, 3) for of in ("", MANIFEST)}
    assert names_in(place) == names


def test_a_checkpoint_is_not_written_behind_a_later_one_of_another_training(tmp_path):
    def write(number, keep=1):
        add_checkpoint(tmp_path / f"{number}.safetensors", number, lambda to: Path(to).write_bytes(b"state"), keep)

    write(200, keep=2)
    write(300, keep=2)
    with pytest.raises(ps.ConfigError, match=r"later checkpoint 300\.safetensors: load it first, or write to another"):
        write(100)
    assert newest("load", tmp_path)[1] == 300
    (tmp_path / "300.safetensors").write_bytes(b"torn")
    write(210)
    assert newest("load", tmp_path)[1] == 210, "what a training writes that went on from 200 counts"
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == ["210.safetensors"]


@pytest.mark.parametrize("moment", [0, 1], ids=["the state's", "the manifest's"])
def test_who_is_given_up_and_writes_on_takes_no_checkpoint_back(moment, tmp_path, monkeypatch):
    """Rank 0 is stopped before a file has its name, and goes on when rank 1 has written later ones."""

    def write(number, rank):
        path = tmp_path / f"{number}-by-{rank}"
        add_checkpoint(path, number, lambda to: Path(to).write_text(path.name, encoding="utf-8"), 2)

    write(1, 0)
    write(2, 0)
    replace, count = Path.replace, iter(range(100))

    def stopped(path, target):
        if next(count) == moment:
            for number in (3, 4, 5):
                write(number, 1)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", stopped)
    write(3, 0)
    assert newest("load", tmp_path) == (tmp_path / "5-by-1", 5)
    (tmp_path / "5-by-1").write_bytes(b"torn")
    with pytest.warns(UserWarning, match="5-by-1 is torn"):
        assert newest("load", tmp_path) == (tmp_path / "4-by-1", 4)


@pytest.mark.parametrize("ranks", [(0, 1), (1, 0)])
def test_of_two_checkpoints_of_one_number_that_of_who_goes_on_counts(ranks, tmp_path):
    for rank in ranks:
        path = tmp_path / f"3-by-{rank}"
        add_checkpoint(path, 3, lambda to, path=path: Path(to).write_text(path.name, encoding="utf-8"), 1, rank)
    assert newest("load", tmp_path) == (tmp_path / "3-by-1", 3)


WITHOUT_TORCH = """
import sys
import numpy as np
import penstock as ps

ps.init(rank=0, world_size=1)
kv = ps.KVStore()
kv.init("w", np.arange(3.0))
kv.set_optimizer("Adam")
kv.pushpull("w", np.ones(3), out=np.empty(3)).wait()
kv.save("state.safetensors")
other = ps.KVStore()
other.init("w", np.zeros(3))
other.load("state.safetensors")
assert all(np.array_equal(a, b) for a, b in zip(kv.state_dict()["values"]["w"], other.state_dict()["values"]["w"]))
assert "torch" not in sys.modules
sys.modules["safetensors"] = None
try:
    kv.save("again.safetensors")
except ps.ConfigError as error:
    assert "safetensors is missing; install penstock[checkpoint]" in str(error), error
else:
    raise AssertionError
"""


def test_a_program_without_torch_saves_too(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_a_disk_that_is_full_is_an_error_on_all_ranks_whatever_the_library_raises(tmp_path, monkeypatch):
    def full(name):
        raise RuntimeError(f"{name}: no space is left")

    ps.init()
    try:
        store = ps.KVStore()
        store.init("w", np.zeros(3, np.float32))
        monkeypatch.setattr("penstock.kvstore.disk.filled_with", lambda caller, state: full)
        with pytest.raises(ps.ConfigError, match=r"penstock.KVStore.save: .*no space is left"):
            store.save(tmp_path / "store.safetensors")
        monkeypatch.undo()
        store.save(tmp_path / "store.safetensors")
    finally:
        ps.shutdown()
