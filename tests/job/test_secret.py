"""Where the secret comes from: on one host privately by itself, between hosts only from the user."""

import os
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import pytest
from meeting import SilentDoor, assert_met, free_port, meet

import penstock as ps
from penstock import boards, config, rendezvous, sharing
from penstock.config import Options
from penstock.launchers import at_store
from penstock.rendezvous import exchange

SECRET = "correct horse battery staple"


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """Where rank 0 leaves what it shares."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


@pytest.fixture(params=["launcher", "tcp"])
def way(request):
    """What `meet` is given for ranks that meet in a launcher's store, or at rank 0's port."""
    if request.param == "tcp":
        yield {"rendezvous": f"tcp://127.0.0.1:{free_port()}"}
        return
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield {
        "environ": {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": "run",
        }
    }
    del store


def on_hosts(monkeypatch, *names):
    """Each process that asks where it is gets the next name; a rank asks more than once, so they are by thread."""
    import threading

    given, seen = iter(names), {}
    lock = threading.Lock()

    def identity():
        with lock:
            name = threading.get_ident()
            if name not in seen:
                seen[name] = next(given, names[-1])
            return seen[name]

    monkeypatch.setattr(rendezvous, "host_identity", identity)
    monkeypatch.setattr(sharing, "host_identity", identity)


def test_no_other_reader_of_the_launchers_store_finds_the_secret(monkeypatch):
    """Every key that is ever set there is read back by another client, as a stranger would."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stranger = TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    found = {}
    original = boards.TorchBoard.set

    def set_and_read(self, key, value):
        original(self, key, value)
        name = f"penstock/run/0/{key}"
        stranger.wait([name], timedelta(seconds=60))  # a store does not answer those who set
        found.setdefault(key, []).append(bytes(stranger.get(name)))

    monkeypatch.setattr(boards.TorchBoard, "set", set_and_read)
    # Who has read a key deletes it, perhaps before the stranger comes, who would wait for it.
    monkeypatch.setattr(boards.TorchBoard, "delete", lambda self, key: None)
    environ = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "run",
    }
    agreement = assert_met(meet(3, environ=environ))
    assert len(found) == 3 * 2 + 3 and agreement.single_host
    for values in found.values():
        for value in values:
            assert agreement.secret not in value and agreement.secret.hex().encode() not in value


def test_ranks_on_one_host_share_it_privately_and_leave_nothing(way, temporary, monkeypatch):
    seen = []

    def listen(agreement):
        for place in temporary.iterdir():
            files = list(place.iterdir())
            seen.append((place.stat().st_mode & 0o777, [path.stat().st_mode & 0o777 for path in files]))
            assert agreement.secret.hex().encode() in [path.read_bytes() for path in files]
        return "127.0.0.1", 1000

    assert_met(meet(3, listens={0: listen}, **way))
    assert seen == [(0o700, [0o600])]
    assert not list(temporary.iterdir())


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failed_start_leaves_nothing(way, temporary, failing):
    def listen(agreement):
        raise ps.ConfigError("no such interface", rank=failing)

    for outcome in meet(2, listens={failing: listen}, **way):
        assert isinstance(outcome.error, ps.ConfigError)
    assert not list(temporary.iterdir())


def test_several_hosts_without_one_are_refused_on_every_rank(way, monkeypatch):
    on_hosts(monkeypatch, "a", "a", "b")
    for outcome in meet(3, **way):
        assert isinstance(outcome.error, ps.ConfigError), outcome
        text = str(outcome.error)
        assert "different hosts" in text and config.MAKE_A_SECRET in text and "insecure=True" in text


@pytest.mark.parametrize("options", [{"secret": SECRET}, {"insecure": True}])
def test_several_hosts_start_with_a_secret_or_where_everybody_is_trusted(way, monkeypatch, options):
    on_hosts(monkeypatch, "a", "a", "b")
    variables = {f"PENSTOCK_{name.upper()}": str(value) for name, value in options.items()}
    given = {"environ": {**way["environ"], **variables}} if "environ" in way else {**way, **options}
    assert not assert_met(meet(3, **given)).single_host


def test_only_some_ranks_trust_everybody(way):
    each = {0: {"insecure": True}}
    if "environ" in way:
        pytest.skip("a launcher gives all ranks the same variables")
    outcomes = meet(2, each=each, **way)
    assert all(isinstance(outcome.error, ps.PenstockError) for outcome in outcomes)
    assert "rank 0 was started with insecure=True, rank 1 was not" in str(outcomes[1].error)


def test_the_store_of_a_program_follows_the_same_rule(monkeypatch):
    """That of `init_process_group("penstock")`."""
    import threading

    from torch.distributed import HashStore

    store = HashStore()
    on_hosts(monkeypatch, "a", "b")
    errors = []

    def run(rank):
        board = boards.TorchBoard(store, "the program's store", "job")
        try:
            exchange(at_store(rank, 2), SilentDoor(lambda _: ("127.0.0.1", 1)), version="1.0", lanes=1, board=board)
        except ps.ConfigError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(errors) == 2 and all("different hosts" in error for error in errors)


def test_a_directory_that_a_stranger_names_is_not_believed(temporary, monkeypatch):
    """Only a private one of this user counts, and it is neither made nor changed."""
    mine = sharing.SharedSecret(Options(), confidential=False)
    assert sharing.take(mine.announcement, Options(rank=1), confidential=False) == mine.secret
    place = Path(str(mine.announcement["directory"]))
    place.chmod(0o755)
    with pytest.raises(ps.ConfigError, match="must be private"):
        sharing.take(mine.announcement, Options(rank=1), confidential=False)
    place.chmod(0o700)
    missing = {**mine.announcement, "directory": str(temporary / "missing")}
    with pytest.raises(ps.ConfigError, match="cannot read the secret"):
        sharing.take(missing, Options(rank=1), confidential=False)
    assert not (temporary / "missing").exists()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(ps.ConfigError, match="must be private"):
            sharing.take(mine.announcement, Options(rank=1), confidential=False)
    mine.close()
    assert not place.exists()


def test_a_secret_for_everybody_to_read_is_taken_only_where_the_user_says_so():
    public = {"open": "ab" * 32}
    with pytest.raises(ps.ConfigError, match="insecure"):
        sharing.take(public, Options(rank=1), confidential=False)
    assert sharing.take(public, Options(rank=1, insecure=True), confidential=False) == b"\xab" * 32
    assert sharing.take(public, Options(rank=1), confidential=True) == b"\xab" * 32


LEAVES = """
import os, signal
from penstock import sharing
from penstock.config import Options
sharing.SharedSecret(Options(), confidential=False)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_has_left_is_removed_by_the_next_one(temporary):
    subprocess.run([sys.executable, "-c", LEAVES], env={**os.environ, "TMPDIR": str(temporary)}, check=False)
    [left] = temporary.iterdir()
    assert list(left.iterdir())
    mine = sharing.SharedSecret(Options(), confidential=False)
    assert [str(path) for path in temporary.iterdir()] == [mine.announcement["directory"]]
    # Who lives has it locked, in this process, too.
    other = sharing.SharedSecret(Options(), confidential=False)
    assert sharing.take(mine.announcement, Options(rank=1), confidential=False) == mine.secret
    mine.close()
    other.close()
    assert not list(temporary.iterdir())


def test_nothing_of_anybody_else_is_removed(temporary, monkeypatch):
    names = ["penstock-secret-open", "penstock-secret-of-another", "elsewhere"]
    of_all, of_another, elsewhere = [temporary / name for name in names]
    for place, mode in ((of_all, 0o755), (of_another, 0o700), (elsewhere, 0o700)):
        place.mkdir(mode)
        place.chmod(mode)
        (place / "penstock.secret").write_text("")
    (temporary / "penstock-secret-link").symlink_to(elsewhere, target_is_directory=True)
    (temporary / "penstock-secret-file").write_text("")
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        sharing._remove_what_was_left()
    assert all((place / "penstock.secret").exists() for place in (of_all, of_another, elsewhere))
    sharing._remove_what_was_left()
    assert sorted(path.name for path in temporary.iterdir()) == [
        "elsewhere",
        "penstock-secret-file",
        "penstock-secret-link",
        "penstock-secret-open",
    ]
    assert (elsewhere / "penstock.secret").exists() and (of_all / "penstock.secret").exists()


def test_a_directory_that_is_removed_before_it_is_locked_is_made_anew(temporary, monkeypatch):
    made, original = [], tempfile.mkdtemp

    def make(prefix):
        made.append(original(prefix=prefix))
        if len(made) < 3:
            sharing._remove_what_was_left()  # by another process, at that very moment
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", make)
    mine = sharing.SharedSecret(Options(), confidential=False)
    assert len(made) == 3 and mine.announcement["directory"] == made[-1]
    assert sharing.take(mine.announcement, Options(rank=1), confidential=False) == mine.secret
    mine.close()
    assert not list(temporary.iterdir())
