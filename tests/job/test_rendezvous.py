"""The exchange: the same job id, secret and table everywhere, and the right error everywhere when something differs."""

import hashlib
import os
import socket
import threading
import time

import meeting
import pytest
from meeting import LIMIT_S, assert_met, free_port, meet

import penstock as ps
from penstock import addresses, rendezvous
from penstock.boards import FileBoard
from penstock.sealing import seal

SECRET, OTHER = "correct horse battery staple", "incorrect horse battery staple"


@pytest.fixture(params=["file", "tcp"])
def place(request, tmp_path):
    """A meeting point of each kind; the torch store is hosted by rank 0's thread."""
    return f"file://{tmp_path / 'meet'}" if request.param == "file" else f"tcp://127.0.0.1:{free_port()}"


@pytest.mark.parametrize("size", [2, 3, 8])
def test_all_ranks_agree(place, size):
    agreement = assert_met(meet(size, rendezvous=place))
    assert agreement.single_host
    assert agreement.lanes == 2  # rank 0's choice


def test_a_given_secret_is_used_and_never_written(tmp_path):
    directory = tmp_path / "meet"
    written = []

    def listen(agreement):
        written.extend(path.read_bytes() for path in directory.iterdir())
        return "127.0.0.1", 1000

    agreement = assert_met(meet(2, rendezvous=f"file://{directory}", secret=SECRET, listens={0: listen}))
    assert agreement.secret == hashlib.sha256(SECRET.encode()).digest()
    assert written
    assert not any(SECRET.encode() in data or agreement.secret.hex().encode() in data for data in written)


def test_every_start_has_another_id_and_secret(place):
    one, other = (assert_met(meet(2, rendezvous=place)) for _ in range(2))
    assert one.job_id != other.job_id and one.secret != other.secret


def test_a_launchers_store_is_shared_and_left_clean():
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environ = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "run",
    }
    before = store.num_keys()
    one = assert_met(meet(3, environ=environ))
    again = assert_met(meet(3, environ={**environ, "TORCHELASTIC_RESTART_COUNT": "1"}))
    assert one.job_id != again.job_id
    assert store.num_keys() == before  # the secret above all


def test_one_key_per_rank_and_stage(tmp_path, monkeypatch):
    keys = set()
    original = FileBoard.set
    monkeypatch.setattr(FileBoard, "set", lambda self, key, value: (keys.add(key), original(self, key, value))[1])
    assert_met(meet(8, rendezvous=f"file://{tmp_path / 'meet'}"))
    assert len(keys) == 3 * 7 + 3


def test_ranks_on_several_machines_know_it(place, monkeypatch):
    names = iter(["a", "b", "a"])
    monkeypatch.setattr(rendezvous, "host_identity", lambda: next(names, "a"))
    assert not assert_met(meet(3, rendezvous=place, secret=SECRET)).single_host
    assert addresses.host_identity()


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_a_wrong_secret_is_told_to_every_rank_at_once_where_no_stranger_can_write(tmp_path, wrong):
    point = f"file://{tmp_path / 'meet'}"
    begin = time.monotonic()
    outcomes = meet(3, rendezvous=point, secret=SECRET, each={wrong: {"secret": OTHER}})
    assert time.monotonic() - begin < LIMIT_S
    for outcome in outcomes:
        assert isinstance(outcome.error, ps.AuthenticationError), outcome
        assert "secret" in str(outcome.error) and "PENSTOCK_SECRET" in str(outcome.error)
        assert outcome.error.rank in ({wrong} if wrong else {1, 2})


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_a_wrong_secret_is_told_to_its_rank_at_once_and_to_the_others_at_the_limit(wrong, caplog):
    """It may be a stranger's elsewhere, whom the others must not believe; the log says it meanwhile."""
    point, limit_s = f"tcp://127.0.0.1:{free_port()}", 4.0
    begin = time.monotonic()
    outcomes = meet(3, rendezvous=point, secret=SECRET, each={wrong: {"secret": OTHER}}, rendezvous_timeout_s=limit_s)
    mistaken = {wrong} if wrong else {1, 2}
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome.error, ps.AuthenticationError), outcome
        assert "secret" in str(outcome.error) and "PENSTOCK_SECRET" in str(outcome.error)
        assert outcome.error.rank in mistaken
        if rank in mistaken:
            assert outcome.ended_at - begin < limit_s / 2
    assert any("proves nothing" in record.getMessage() for record in caplog.records)


def test_a_missing_secret_is_told_apart_from_a_wrong_one(place):
    for outcome in meet(2, rendezvous=place, each={1: {"secret": SECRET}}):
        assert isinstance(outcome.error, ps.AuthenticationError)
        assert "rank 1 was given a secret, rank 0 was not" in str(outcome.error)


def test_another_version_is_named_on_every_rank(place):
    for outcome in meet(3, rendezvous=place, versions={2: "1.1"}):
        assert isinstance(outcome.error, ps.ProtocolError)
        text = str(outcome.error)
        assert "rank 2" in text and "penstock 1.1" in text and "rank 0" in text and "penstock 1.0" in text


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("slice_bytes", 4096, "4096"),
        ("broadcast_buffers", True, "True"),
        ("lanes", 4, "4"),
        ("check_every", 10, "10"),
        ("lateness", False, "False"),
        ("policy", "paper", "paper"),
        ("collective_schemes", True, "True"),
    ],
)
def test_options_that_must_be_equal(place, name, value, shown):
    for outcome in meet(2, rendezvous=place, each={1: {name: value}}):
        assert isinstance(outcome.error, ps.ConfigError)
        assert f"option {name}: rank 1 has {shown}, rank 0 has" in str(outcome.error)
        assert outcome.error.rank == 1


def test_a_rank_that_never_comes_is_named_within_the_limit(place):
    begin = time.monotonic()
    outcomes = meet(4, rendezvous=place, ranks=[0, 1], rendezvous_timeout_s=3)
    assert time.monotonic() - begin < LIMIT_S
    for outcome in outcomes:
        assert isinstance(outcome.error, ps.Timeout)
        assert "ranks 2, 3 of 4 did not arrive within 3 s" in str(outcome.error)


def test_rank_0_that_never_comes_is_named_within_the_limit(place):
    begin = time.monotonic()
    (outcome,) = meet(2, rendezvous=place, ranks=[1], rendezvous_timeout_s=1)
    assert time.monotonic() - begin < LIMIT_S
    assert isinstance(outcome.error, ps.Timeout)
    assert outcome.error.rank == 0 and "rank 0" in str(outcome.error)


@pytest.mark.parametrize("failing", [0, 2])
def test_a_rank_that_fails_between_is_named_with_its_reason(place, failing):
    def listen(agreement):
        raise ps.ConfigError("no local address matches interface='eth9'", rank=failing)

    outcomes = meet(3, rendezvous=place, listens={failing: listen})
    for outcome in outcomes:
        assert isinstance(outcome.error, ps.ConfigError)
        assert "eth9" in str(outcome.error) and outcome.error.rank == failing


def test_a_rank_that_is_killed_between_is_named_also_by_those_who_wait_for_rank_0(place, monkeypatch):
    """Rank 1's time is up before rank 0's, and all that it sees is that rank 0 has not answered."""

    class Killed(BaseException):
        pass

    def die(agreement):
        raise Killed

    publish = rendezvous._Follower.publish_failure
    monkeypatch.setattr(
        rendezvous._Follower,
        "publish_failure",
        lambda self, error: None if isinstance(error, Killed) else publish(self, error),  # the dead say nothing
    )
    limits = {0: {"rendezvous_timeout_s": 4.0}, 1: {"rendezvous_timeout_s": 3.5}}
    outcomes = meet(3, rendezvous=place, listens={2: die}, each=limits)
    for outcome in outcomes[:2]:
        assert isinstance(outcome.error, ps.Timeout), outcome
        assert outcome.error.rank == 2
        assert "rank 2" in str(outcome.error)


@pytest.mark.parametrize("ends", ["it hears that a rank is lost", "it is interrupted"])
def test_rank_0_is_connected_while_it_waits_for_the_last_and_tells_it_what_ends_the_job(place, ends, monkeypatch):
    """Rank 1 goes on with the table that rank 2 has not read."""
    error = ps.PeerLost("rank 1 was lost", rank=1) if "lost" in ends else KeyboardInterrupt("at the keyboard")
    gone_on, ended, take = threading.Event(), threading.Event(), rendezvous._Meeting._take

    class Leading(meeting.SilentDoor):
        def connect(self, table):
            assert not gone_on.is_set()
            super().connect(table)

        def check(self):
            if gone_on.is_set():
                ended.set()
                raise error

    class GoingOn(meeting.SilentDoor):
        def connect(self, table):
            super().connect(table)
            gone_on.set()

    def take_late(self, stage, *, rank=None):
        late = stage == "table" and self.rank == 2 and not ended.is_set()
        return None if late else take(self, stage, rank=rank)

    monkeypatch.setattr(rendezvous._Meeting, "_take", take_late)
    doors = {0: Leading(meeting.listen_nowhere(0)), 1: GoingOn(meeting.listen_nowhere(1))}
    outcomes = meet(3, rendezvous=place, doors=doors)
    assert doors[0].table == doors[1].table and doors[0].table is not None
    assert outcomes[1].error is None and outcomes[0].error is error
    if outcomes[2].error is not None:  # else it was just in time
        assert isinstance(outcomes[2].error, ps.PeerLost)
        assert outcomes[2].error.rank == (1 if "lost" in ends else 0)


def test_an_unexpected_failure_reaches_the_others_as_peer_lost(place):
    def listen(agreement):
        raise KeyboardInterrupt

    outcomes = meet(3, rendezvous=place, listens={1: listen})
    assert isinstance(outcomes[1].error, KeyboardInterrupt)
    for outcome in (outcomes[0], outcomes[2]):
        assert isinstance(outcome.error, ps.PeerLost)
        assert outcome.error.rank == 1 and "KeyboardInterrupt" in str(outcome.error)


def test_two_processes_of_one_rank_are_told_to_everybody_at_once(place):
    """The later one writes over the earlier one's arrival, and rank 0 may have read it: it waits for rank 2."""
    begin = time.monotonic()
    outcomes = meet(3, rendezvous=place, ranks=[0, 1, 1], rendezvous_timeout_s=LIMIT_S / 2)
    assert time.monotonic() - begin < LIMIT_S / 4
    for outcome in outcomes:
        assert isinstance(outcome.error, ps.ConfigError), outcome
        assert outcome.error.rank == 1 and "two processes call themselves rank 1" in str(outcome.error)


def test_two_processes_of_one_rank_are_noticed_when_the_earlier_one_is_admitted(tmp_path, monkeypatch):
    """The later one writes over an arrival that rank 0 has read, and the job starts without it."""
    point = f"file://{tmp_path / 'meet'}"
    original = rendezvous._Follower._answered
    seen = threading.Event()
    late = []

    def answered(self):
        result = original(self)
        if self.displaced:
            seen.set()
        return result

    def listen(agreement):
        late.append(threading.Thread(target=lambda: outcomes.extend(meet(2, rendezvous=point, ranks=[1])), daemon=True))
        late[0].start()
        assert seen.wait(30)
        return "127.0.0.1", 1000

    outcomes = []
    monkeypatch.setattr(rendezvous._Follower, "_answered", answered)
    assert_met(meet(2, rendezvous=point, listens={0: listen}))
    late[0].join(30)
    assert isinstance(outcomes[0].error, ps.ConfigError)
    assert "two processes call themselves rank 1" in str(outcomes[0].error)


def test_two_rank_zeros_are_told_to_everybody_at_once(place):
    """In a directory the later one replaces the earlier one's job; a port the earlier one keeps."""
    begin = time.monotonic()
    outcomes = meet(3, rendezvous=place, ranks=[0, 0, 1], rendezvous_timeout_s=6)
    assert time.monotonic() - begin < LIMIT_S
    refused = [outcome for outcome in outcomes[:2] if isinstance(outcome.error, ps.ConfigError)]
    if place.startswith("file"):
        assert len(refused) == 2
        for outcome in outcomes:
            assert "two processes call themselves rank 0" in str(outcome.error)
    else:
        (later,) = refused
        assert "rank 0 of another job" in str(later.error) and later.ended_at - begin < 3
        for outcome in outcomes:
            assert outcome is later or "rank 2 of 3 did not arrive" in str(outcome.error)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("early", [True, False])
def test_files_of_an_older_job_are_never_read(tmp_path, monkeypatch, whole, early):
    """A job that died between admission and table leaves everything that a careless reader would take for its own.

    Rank 1 is there before rank 0, and reads how the older job was opened, or comes later. The opening may lack a part.
    """
    directory = tmp_path / "meet"
    directory.mkdir(mode=0o700)
    stale = "ab" * 16

    opening = {"id": stale, "scope": "job", "secret": {"open": "00" * 32}}
    if whole:
        agreed = ps.Options(rank=0, world_size=2)
        opening["options"] = {name: getattr(agreed, name) for name in rendezvous.AGREED}
    for key, body in {
        "job": opening,
        f"{stale}/arrival/1": {"nonce": "old"},
        f"{stale}/admission": {"nonces": [None, "old"], "single_host": True, "lanes": 7, "all_lanes": False},
        f"{stale}/table": {"addresses": []},
    }.items():
        (directory / f"penstock.{key.replace('/', '.')}").write_bytes(seal("1.0", bytes(32), False, key, body))
    (directory / "mine.txt").write_text("not ours to touch")
    has_read, taken_by_rank_0 = threading.Event(), rendezvous.exchange

    if early:
        read = rendezvous._Follower._find_job

        def find_job(self):
            try:
                return read(self)
            finally:
                has_read.set()

        def exchange(launch, *arguments, **options):
            if launch.options.rank == 0:
                assert has_read.wait(30)
            return taken_by_rank_0(launch, *arguments, **options)

        monkeypatch.setattr(rendezvous._Follower, "_find_job", find_job)
        monkeypatch.setattr(meeting, "exchange", exchange)
    agreement = assert_met(meet(2, rendezvous=f"file://{directory}"))
    assert agreement.job_id.hex() != stale and agreement.lanes == 2
    assert [path.name for path in directory.iterdir()] == ["mine.txt"]


def test_garbage_at_the_meeting_point_is_a_protocol_error(tmp_path, monkeypatch):
    original = FileBoard.set

    def corrupted(self, key, value):
        original(self, key, b"\xff\x00garbage" if "arrival" in key else value)

    monkeypatch.setattr(FileBoard, "set", corrupted)
    outcomes = meet(2, rendezvous=f"file://{tmp_path / 'meet'}", rendezvous_timeout_s=2)
    assert isinstance(outcomes[0].error, ps.ProtocolError)
    assert outcomes[0].error.rank == 1
    assert isinstance(outcomes[1].error, ps.PenstockError)


def test_the_directory_must_be_private(tmp_path):
    directory = tmp_path / "meet"
    directory.mkdir(mode=0o755)
    directory.chmod(0o755)
    with pytest.raises(ps.ConfigError, match="must be private"):
        FileBoard(str(directory), clean=True)
    for outcome in meet(2, rendezvous=f"file://{directory}"):
        assert isinstance(outcome.error, ps.ConfigError)


def test_the_directory_must_belong_to_this_user(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ps.ConfigError, match="must be private"):
        FileBoard(str(tmp_path / "meet"), clean=True)


def test_the_directory_may_not_be_a_link_and_needs_a_parent(tmp_path):
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for path in (tmp_path / "link", tmp_path / "missing" / "meet"):
        with pytest.raises(ps.ConfigError, match="rendezvous=file://"):
            FileBoard(str(path), clean=True)


def test_a_new_directory_is_private_and_files_are_whole(tmp_path):
    board = FileBoard(str(tmp_path / "meet"), clean=True)
    assert (tmp_path / "meet").stat().st_mode & 0o777 == 0o700
    assert board.get("a/b") is None
    board.set("a/b", b"one")
    board.set("a/b", b"two")
    assert board.get("a/b") == b"two"
    assert (tmp_path / "meet" / "penstock.a.b").stat().st_mode & 0o077 == 0
    board.delete("a/b")
    board.delete("a/b")
    assert board.get("a/b") is None
    board.close()
    board.close()


def test_a_taken_port_and_a_foreign_address_are_config_errors():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        point = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        (outcome,) = meet(2, rendezvous=point, ranks=[0], rendezvous_timeout_s=2)
    assert isinstance(outcome.error, ps.ConfigError)
    assert "Another program uses the port" in str(outcome.error)
    (outcome,) = meet(2, rendezvous="tcp://203.0.113.7:5000", ranks=[0], secret=SECRET, rendezvous_timeout_s=2)
    assert isinstance(outcome.error, ps.ConfigError)
    assert "cannot listen at tcp://203.0.113.7:5000" in str(outcome.error)
