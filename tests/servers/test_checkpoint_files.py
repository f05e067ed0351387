"""Parts of checkpoints, without a job: what is dealt to whom, what is in a file, which are whole, and which go."""

import contextlib
import ctypes
import fcntl
import json
import random
import re
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from job_processes import CONTEXT, PATIENCE_S

import penstock as ps
from penstock import whole_files
from penstock.server_parts import ServedState, ServerParts
from penstock.tensor_file import TensorFileWriter, ordered, read_tensor_file, read_tensor_header
from penstock.torch.checkpoint_shares import Assembly, PartDraft, checksum, deal, flat
from penstock.whole_files import (
    LOCK_NAME,
    MANIFEST,
    CheckpointKey,
    CheckpointPart,
    WriterLock,
    add_part,
    checkpoints_in,
    held,
    newest,
)

LENGTHS = st.dictionaries(
    st.text("abc", min_size=1, max_size=3), st.tuples(st.integers(0, 90), st.sampled_from([1, 2, 4, 8]))
)


@given(LENGTHS, st.integers(1, 7), st.integers(0, 3000))
def test_every_element_is_dealt_once_and_by_bytes(lengths, count, beside_bytes):
    shares = [deal(lengths, place, count, beside_bytes) for place in range(count)]
    dealt = sorted(
        (piece.name, index) for share in shares for piece in share for index in range(piece.begin, piece.end)
    )
    assert dealt == sorted((name, index) for name, (elements, _) in lengths.items() for index in range(elements))
    nbytes = [sum((piece.end - piece.begin) * lengths[piece.name][1] for piece in share) for share in shares]
    total = sum(elements * width for elements, width in lengths.values())
    widest = max((width for _, width in lengths.values()), default=0)
    even = (total + beside_bytes) / count
    if beside_bytes <= even:
        assert abs(nbytes[0] + beside_bytes - even) <= widest + 1
        assert all(abs(one - even) <= widest + 2 for one in nbytes[1:])
    elif count > 1:
        assert nbytes[0] <= widest, "it has enough to write"


TENSORS = {
    "plain": torch.arange(60, dtype=torch.float32).reshape(6, 10),
    "channels last": torch.arange(2 * 3 * 4 * 5, dtype=torch.float64)
    .reshape(2, 3, 4, 5)
    .contiguous(memory_format=torch.channels_last),
    "transposed": torch.arange(12, dtype=torch.int16).reshape(3, 4).t(),
    "strided": torch.arange(20, dtype=torch.float32)[::2],
    "expanded": torch.ones(1, dtype=torch.float32).expand(5),
    "scalar": torch.tensor(3.5, dtype=torch.bfloat16),
    "empty": torch.empty((0, 3), dtype=torch.float32),
    "complex": torch.arange(3) * torch.tensor(1j),
    "bool": torch.tensor([True, False, True]),
}


def part_of(path, place, count, beside):
    """What one of several writers writes of `TENSORS`."""
    whole = {name: flat("test", name, tensor) for name, tensor in TENSORS.items()}
    lengths = {
        name: (one.memory.numel(), one.memory.element_size()) for name, one in whole.items() if name not in beside
    }
    nbytes = sum(whole[name].nbytes for name in beside)
    draft = PartDraft(None)
    for piece in deal(lengths, place, count, nbytes):
        source = whole[piece.name].memory[piece.begin : piece.end]
        draft.add(piece, source.dtype, source)
    for name in beside if place == 0 else ():
        draft.add_whole(name, whole[name].memory)
    memory = draft.take_memory(lambda size: torch.empty(size, dtype=torch.uint8))
    draft.copy()
    data = memory.numpy()[: draft.nbytes]
    said = {"forms": {name: one.form for name, one in whole.items()}} if place == 0 else {}
    writer = draft.writer(memoryview(data), said)
    writer.fill(str(path))
    assert writer.crc == zlib.crc32(path.read_bytes())


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_tensors_of_any_kind_are_put_together_from_any_number_of_parts(count, tmp_path):
    for place in range(count):
        part_of(tmp_path / str(place), place, count, ["scalar", "bool", "empty"])
    heads = [read_tensor_header(tmp_path / str(place)) for place in range(count)]
    whole = Assembly(json.loads(heads[0][0])["forms"])
    for place, (metadata, places) in enumerate(heads):
        read = read_tensor_file(tmp_path / str(place))
        assert (read.metadata, read.places) == (metadata, places)
        if read.data:
            whole.take(json.loads(metadata)["pieces"], places, torch.frombuffer(read.data, dtype=torch.uint8))
    found = whole.tensors()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    assert found["channels last"].stride() == TENSORS["channels last"].stride()


def test_a_part_that_is_missing_is_missed(tmp_path):
    for place in range(2):
        part_of(tmp_path / str(place), place, 2, [])
    read = read_tensor_file(tmp_path / "0")
    said = json.loads(read.metadata)
    for times in (1, 2):
        whole = Assembly(said["forms"])
        for _ in range(times):
            whole.take(said["pieces"], read.places, torch.frombuffer(read.data, dtype=torch.uint8))
        with pytest.raises(ValueError, match=r"its parts lack some of .*, or have it twice"):
            whole.tensors()


def test_a_state_has_the_layout_of_its_parameter_on_all_ranks():
    plain = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).reshape(2, 3, 4, 5)
    last = plain.contiguous(memory_format=torch.channels_last)
    one, other = flat("test", "a", plain, last), flat("test", "a", last, last)
    assert one.form == other.form == flat("test", "a", last).form != flat("test", "a", plain).form
    assert torch.equal(one.memory, other.memory)
    assert flat("test", "a", torch.tensor(3.0), last).form == ("float32", [], [])
    # As a tensor of 1 x 1 is contiguous in every order, it may have either's strides.
    pointwise = torch.ones(4, 3, 1, 1)
    strange = pointwise.as_strided((4, 3, 1, 1), (3, 1, 3, 3))
    assert flat("test", "a", pointwise).form == flat("test", "a", strange).form


def test_sparse_tensors_are_refused():
    with pytest.raises(ps.ConfigError, match=r"table is a tensor of layout torch\.sparse_coo"):
        flat("test", "table", torch.eye(3).to_sparse())


def test_what_ranks_must_have_alike_is_in_the_checksum():
    forms = {"a": flat("test", "a", TENSORS["plain"]).form, "b": flat("test", "b", TENSORS["bool"]).form}
    others = [
        ({"a": forms["a"]}, 7),
        (forms, 8),
        ({"a": forms["a"], "c": forms["b"]}, 7),
        ({**forms, "a": flat("test", "a", TENSORS["plain"].t()).form}, 7),
        ({**forms, "a": flat("test", "a", TENSORS["plain"].double()).form}, 7),
    ]
    assert len({checksum(forms, 7), *(checksum(*other) for other in others)}) == 6


# Files of safetensors


def test_the_library_reads_what_is_written(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    values = {
        "w": torch.arange(6, dtype=torch.float32),
        "half": torch.arange(3, dtype=torch.bfloat16),
        "flags": torch.tensor([True, False]),
        "none": torch.empty(0, dtype=torch.int64),
    }
    order = ordered({name: one.element_size() for name, one in values.items()})
    data = b"".join(values[name].view(torch.uint8).numpy().tobytes() for name in order)
    tensors = {
        name: (str(values[name].dtype).removeprefix("torch."), values[name].numel(), values[name].nbytes)
        for name in order
    }
    TensorFileWriter(tensors, '{"text": "ä"}', memoryview(data)).fill(str(tmp_path / "file"))
    found = safetensors.load_file(tmp_path / "file")
    assert found.keys() == values.keys()
    assert all(torch.equal(found[name], one) and found[name].dtype == one.dtype for name, one in values.items())


@pytest.mark.parametrize("seed", range(20))
def test_a_file_that_is_no_whole_one_is_told_from_one(seed, tmp_path):
    chance = random.Random(seed)
    path = tmp_path / "file"
    part_of(path, 0, 1, [])
    whole = path.read_bytes()
    right = read_tensor_file(path).crc
    cut = chance.randrange(len(whole))
    path.write_bytes(whole[:cut])
    with pytest.raises(ValueError, match=r"ends too early|tells of"):
        read_tensor_file(path)
    at = chance.randrange(len(whole))
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << chance.randrange(8)]) + whole[at + 1 :])
    with contextlib.suppress(ValueError):
        assert read_tensor_file(path).crc != right, (seed, at)


# What servers write


class KeptByServers:
    """As much of an engine as a server needs: two servers own slices of 4 elements of two tensors in turn."""

    def __init__(self, rank, updates):
        self._rank, self._updates = rank, updates
        self.values = {
            (tensor, state): torch.arange(20, dtype=torch.float32) + 100 * tensor + 1000 * state
            for tensor in range(2)
            for state in range(2)
        }

    def placement(self, book):
        assert book == 5
        return [[(16 * number, 16, 3 + number % 2, 0) for number in range(5)] for _ in range(2)]

    def save(self, book, tensor, state, address, nbytes):
        assert nbytes == 80
        if not self._updates:
            return None
        for offset, length, owner, _ in self.placement(book)[tensor]:
            if owner == self._rank:
                ctypes.memmove(address + offset, self.values[tensor, state].data_ptr() + offset, length)
        return self._updates


@pytest.mark.parametrize("updates", [0, 7])
def test_servers_write_what_they_own(updates, tmp_path):
    states = [
        # A parameter of 40 elements is two tensors of the book, as of a model on an accelerator.
        ServedState(5, tensor, 80, state, f"state/{state}", 20 * tensor, "float32", 4)
        for state in range(2)
        for tensor in range(2)
    ]
    key = CheckpointKey(9, 0, "job.1")
    forms = {f"state/{state}": ("float32", [40], [1]) for state in range(2)}
    whole = Assembly(forms)
    for number in range(2):
        parts = ServerParts()
        parts.serve(3 + number, number)
        engine = KeptByServers(3 + number, updates)
        for _ in range(2):  # its memory is used again
            parts.begin(engine, f"{tmp_path}/model-9", CheckpointPart(key, 1, 3, 11), 2, (), states, {"own": None})
            assert parts.outcome(60.0).keys() == {"layout", "waited_s"}
        path = tmp_path / f"model-9-{1 + number}of3.safetensors"
        read = read_tensor_file(path)
        said = json.loads(read.metadata)
        assert said["own"] is None and set(said["updates"].values()) == {updates}
        whole.take(said["pieces"], read.places, torch.frombuffer(read.data, dtype=torch.uint8))
        ((one,), _) = checkpoints_in(tmp_path)
        assert one.parts[1 + number].part == CheckpointPart(key, 1 + number, 3, 11)
    values = KeptByServers(0, 1).values
    for state in range(2):
        wanted = torch.cat([values[0, state], values[1, state]])
        assert torch.equal(whole.tensors()[f"state/{state}"], wanted if updates else torch.zeros(40))


def test_what_a_server_cannot_write_it_says_when_it_is_asked(tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    parts = ServerParts()
    parts.serve(3, 0)
    arguments = (f"{tmp_path}/model-9", part(9, 1, 2), 2, (), [], {})
    monkeypatch.setattr(whole_files, "_sync", full)
    parts.begin(KeptByServers(3, 1), *arguments)
    assert "No space left on device" in parts.outcome(60.0)["error"]
    monkeypatch.undo()
    parts.begin(None, f"{tmp_path}/model-9", part(9, 1, 2), 2, (), [ServedState(0, 0, 4, 0, "", 0, "float32", 4)], {})
    assert "placement" in parts.outcome(60.0)["error"]
    parts.begin(KeptByServers(3, 1), *arguments)
    assert parts.outcome(60.0)["layout"] == 0
    assert not [one for one in tmp_path.iterdir() if one.name.endswith(".tmp")]


# Which are whole, and which go


def part(number, place=0, count=2, writing="job.1", lead=0, layout=0):
    return CheckpointPart(CheckpointKey(number, lead, writing), place, count, layout)


def write(directory, one, keep=2, known=()):
    key = one.key
    path = directory / f"model-{key.number:010d}-{key.writing}-{one.place}of{one.total}.safetensors"
    add_part(path, one, lambda to: Path(to).write_text(path.name, encoding="utf-8"), keep, known)
    return path


def names(directory):
    """Numbers and places of the parts that are there, with or without their manifests."""
    named = (
        re.fullmatch(r"model-(\d{10})-.*-(\d)of\d\.safetensors(\.manifest)?", one.name) for one in directory.iterdir()
    )
    return {(int(one[1]), int(one[2])) for one in named if one is not None}


def test_a_checkpoint_is_whole_once_all_parts_are_there_in_whatever_order(tmp_path):
    write(tmp_path, part(1))
    write(tmp_path, part(1, 1))
    write(tmp_path, part(2, 1))
    with pytest.warns(UserWarning, match=r"model-0{9}2\S* is torn \(part 0 of 2 was not written\)"):
        assert newest("load", tmp_path)[1] == 1
    write(tmp_path, part(2))
    assert newest("load", tmp_path)[1] == 2


def test_parts_of_two_attempts_make_no_whole(tmp_path):
    write(tmp_path, part(1))
    write(tmp_path, part(1, 1))
    write(tmp_path, part(2, 0, writing="job.2"))
    write(tmp_path, part(2, 1, writing="other.2"))
    write(tmp_path, part(3, 0, layout=5, writing="job.3"))
    write(tmp_path, part(3, 1, layout=6, writing="job.3"))
    with pytest.warns(UserWarning, match="its parts do not belong together"):
        assert newest("load", tmp_path)[1] == 1


def test_all_but_the_newest_whole_ones_go_and_the_rest_of_those_that_are_not(tmp_path):
    for number in (1, 2, 3):
        for place in (0, 1):
            write(tmp_path, part(number, place))
    assert names(tmp_path) == {(number, place) for number in (2, 3) for place in (0, 1)}
    write(tmp_path, part(4))  # whose other writer is lost
    unfinished = tmp_path / f".model-{4:010d}-job.1-1of2.safetensors.77.tmp"
    nameless = tmp_path / f"model-{4:010d}-job.1-1of2.safetensors"
    others = [tmp_path / name for name in ("notes.txt", f"mine-{1:010d}.txt", ".hidden.tmp")]
    for one in (unfinished, nameless, *others):
        one.write_text("here")
    write(tmp_path, part(5))
    assert names(tmp_path) >= {(2, 0), (3, 0), (4, 0), (5, 0)}, "5 is not whole yet, and 4 might become so"
    write(tmp_path, part(5, 1))
    assert all(one.exists() for one in others), "what is no checkpoint stays"
    for one in others:
        one.unlink()
    assert names(tmp_path) == {(number, place) for number in (3, 5) for place in (0, 1)}
    assert not unfinished.exists() and not nameless.exists()


def test_those_that_are_known_to_be_whole_elsewhere_count(tmp_path):
    known = []
    for number in range(1, 6):
        write(tmp_path, part(number), known=known)
        known.append(part(number).key)
    assert names(tmp_path) == {(number, 0) for number in (3, 4, 5)}, "whether 5 is whole one hears later"


def test_a_checkpoint_that_somebody_reads_stays(tmp_path):
    files = [write(tmp_path, part(1, place)) for place in (0, 1)]
    with held(files[1:]):
        for number in (2, 3, 4):
            for place in (0, 1):
                write(tmp_path, part(number, place))
        assert names(tmp_path) == {(number, place) for number in (1, 3, 4) for place in (0, 1)}
    write(tmp_path, part(5))
    write(tmp_path, part(5, 1))
    assert names(tmp_path) == {(number, place) for number in (4, 5) for place in (0, 1)}
    with pytest.raises(FileNotFoundError), held(files):
        pass


def test_without_locks_everything_goes_on(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(fcntl, "lockf", refuse)
    lock = WriterLock(tmp_path, "job")
    lock.take()
    files = [write(tmp_path, part(1, place)) for place in (0, 1)]
    with held(files):
        for number in (2, 3):
            write(tmp_path, part(number))
            write(tmp_path, part(number, 1))
    assert names(tmp_path) == {(number, place) for number in (2, 3) for place in (0, 1)}
    lock.release()


def test_a_full_disk_leaves_what_was_there_and_nothing_else(tmp_path, monkeypatch):
    """At whatever call the room ends, of a file, of its manifest, of the directory."""
    write(tmp_path, part(1, 0, 1))
    before = names(tmp_path)

    def full(_):
        raise OSError(28, "No space left on device")

    moments = 0
    sync = whole_files._sync
    for after in range(10):
        left = [after]

        def sometimes(path, left=left):
            left[0] -= 1
            return full(path) if left[0] == -1 else sync(path)

        with monkeypatch.context() as patched:
            patched.setattr(whole_files, "_sync", sometimes)
            try:
                path = write(tmp_path, part(2, 0, 1))
            except OSError as error:
                moments += 1
                assert error.errno == 28
                path = tmp_path / f"model-{2:010d}-job.1-0of1.safetensors"
            else:
                break
        assert not [one for one in tmp_path.iterdir() if one.name.endswith(".tmp")], after
        assert newest("load", tmp_path)[1] in ((1,) if after < 3 else (1, 2)), after
        whole_files.discard_part(path)
        assert names(tmp_path) == before, after
    assert moments == 4, "the file, its name, its manifest, the manifest's name"


def holds(directory, job, taken, go_on):
    lock = WriterLock(directory, job)
    lock.take()
    lock.take()
    taken.set()
    go_on.wait(PATIENCE_S)


def test_one_job_writes_to_a_directory_and_a_killed_one_no_more(tmp_path):
    taken, go_on = CONTEXT.Event(), CONTEXT.Event()
    process = CONTEXT.Process(target=holds, args=(tmp_path, "one", taken, go_on))
    process.start()
    try:
        assert taken.wait(PATIENCE_S)
        with pytest.raises(ps.ConfigError, match=rf"another job writes .* \(process {process.pid} on .*, since \d"):
            WriterLock(tmp_path, "two").take()
        same = WriterLock(tmp_path, "one")  # its first rank is given up, and lives
        same.take()
        same.release()
    finally:
        process.kill()
        process.join(PATIENCE_S)
    lock = WriterLock(tmp_path, "two")
    lock.take()
    assert (tmp_path / LOCK_NAME).read_text().startswith("two process ")
    lock.release()


def test_manifests_that_say_something_else_are_no_checkpoints(tmp_path):
    path = write(tmp_path, part(1, 0, 1))
    manifest = path.with_name(path.name + MANIFEST)
    said = json.loads(manifest.read_text())
    for wrong in ({**said, "format": "penstock checkpoint 1"}, {**said, "place": "first"}, [], {"number": 1}, 7):
        manifest.write_text(json.dumps(wrong))
        assert checkpoints_in(tmp_path) == ([], [path]), wrong
        with pytest.raises(ps.ConfigError, match="its manifest cannot be read"):
            newest("load", tmp_path)
    manifest.write_bytes(b"\xff")
    assert checkpoints_in(tmp_path) == ([], [path])
