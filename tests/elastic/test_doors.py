"""What a door makes of what comes: only who holds the secret is heard, and is answered by its own number."""

import dataclasses
import os
import random
import socket
import time
from types import SimpleNamespace

import pytest
from job_processes import CONTEXT

import penstock as ps
from penstock import doorway, key_server
from penstock.config import Options
from penstock.coordinator import Rates
from penstock.doorway import Doorway, Entrance
from penstock.job import _after_fork_in_child, _process
from penstock.key_server import GET, SET, KeyClient
from penstock.rendezvous import Agreement
from penstock.sealing import peek, seal, unseal

SECRET = b"s" * 32
PATIENCE_S = 20.0


class Job:
    """An engine, as far as a door needs one."""

    def __init__(self, error=None):
        self.knocks, self.error = [], error

    def knock(self, number):
        self.knocks.append(number)

    def announced(self):
        return [(number, 7 + place, None) for place, number in enumerate(self.knocks)]

    def check(self):
        if self.error is not None:
            raise self.error

    def members(self):
        return [0, 1]

    def job_state(self):
        return b"how it stands"

    def after_fork_in_child(self):
        pass


@pytest.fixture
def job():
    return Job()


@pytest.fixture
def door(job):
    opened = opened_at(job)
    yield opened
    opened.close()


def opened_at(job, secret=SECRET, version="1.0", job_id=b"j" * 16):
    options = Options(rank=1, world_size=3, secret=secret, elastic=True, check_every=9)
    agreement = Agreement(job_id, secret or SECRET, True, 2, False, options, hosts=(0, 0, 0))
    return Doorway(job, "127.0.0.1", agreement, Rates(bytes_per_s=5.0), version)


def visit(*doors, version="1.0", **options):
    sources = {field.name: "default" for field in dataclasses.fields(Options)}
    sources |= dict.fromkeys([*options, "join"], "argument")
    join = ",".join(door if isinstance(door, str) else door.address for door in doors)
    return Entrance(Options(join=join, **{"secret": SECRET, **options}), sources, version)


def ask(door, request, key, value=b""):
    host, _, port = door.address.rpartition(":")
    client = KeyClient(host, int(port))
    try:
        return client.ask(request, key, value, time.monotonic() + PATIENCE_S)
    finally:
        client.close()


def test_a_newcomer_gets_a_rank_and_what_the_job_agreed_on(job, door):
    newcomer = visit(door)
    agreement, rates = newcomer.enter()
    assert job.knocks == [newcomer._number]
    assert (agreement.job_id, agreement.secret, agreement.lanes, agreement.hosts) == (b"j" * 16, SECRET, 2, (0, 0, 0))
    options = agreement.options
    assert (options.rank, options.world_size, options.elastic, options.check_every) == (7, 3, True, 9)
    assert rates.bytes_per_s == 5.0
    assert newcomer.state() == b"how it stands"
    newcomer.close()


def test_who_does_not_hold_the_secret_is_not_heard(job, door):
    name = peek(ask(door, GET, "door")).body["door"]
    for secret, key in ((None, f"{name}/knock/5"), (b"t" * 32, f"{name}/knock/5"), (SECRET, f"{name}/knock/6")):
        ask(door, SET, f"{name}/knock/5", seal("1.0", secret, True, key, {"number": 5}))
    ask(door, SET, f"{name}/knock/5", seal("2.0", SECRET, True, f"{name}/knock/5", {"number": 5}))
    assert job.knocks == []
    assert ask(door, GET, f"{name}/answer/5") is None


def test_a_knock_is_heard_once_and_at_one_door_only(job, door):
    name = peek(ask(door, GET, "door")).body["door"]
    key = f"{name}/knock/5"
    said = seal("1.0", SECRET, True, key, {"number": 5})
    for _ in range(3):
        ask(door, SET, key, said)
    assert job.knocks == [5]
    other_job = Job()
    other = opened_at(other_job)
    try:
        there = peek(ask(other, GET, "door")).body["door"]
        ask(other, SET, f"{there}/knock/5", said)
        assert other_job.knocks == []
    finally:
        other.close()


def test_an_answer_is_for_one_number(job, door):
    newcomer = visit(door)
    newcomer.enter()
    name = newcomer._doors[0].said["door"]
    answer = ask(door, GET, f"{name}/answer/{newcomer._number}")
    assert unseal(answer, SECRET, f"{name}/answer/{newcomer._number}").proven
    assert not unseal(answer, SECRET, f"{name}/answer/5").proven
    assert ask(door, GET, f"{name}/answer/5") is None
    newcomer.close()


def test_any_keys_and_values_leave_it_as_it_was(job, door):
    seed = random.SystemRandom().randrange(2**32)
    draw = random.Random(seed)
    name = peek(ask(door, GET, "door")).body["door"]
    for _ in range(300):
        stage = draw.choice(["knock", "answer", "door", ""])
        number = draw.choice(["0", "-1", "05", "9" * 20, "9" * 30, "x", "\u0661", ""])
        key = draw.choice([f"{name}/{stage}/{number}", f"{stage}/{number}", stage, f"{name}/{stage}/5/5"])
        half = b'{"penstock": "\\ud800", "given": true, "body": "{}", "proof": ""}'  # of a character
        value = draw.choice([b"", draw.randbytes(40), b'{"penstock": 1}', b"[" * 5000, half])
        ask(door, draw.choice([GET, SET]), key, value)
    assert job.knocks == [], f"seed {seed}"
    newcomer = visit(door)
    assert newcomer.enter()[0].options.rank == 7, f"seed {seed}"
    newcomer.close()


def test_what_has_ended_the_job_is_told(job, door):
    newcomer = visit(door)
    newcomer.enter()
    job.error = ps.PeerLost("too few members are left")
    with pytest.raises(ps.PeerLost, match=r"the job at 127\.0\.0\.1:\d+: too few members are left"):
        newcomer.state()
    newcomer.close()


def test_what_does_not_fit_is_refused_at_the_door(door):
    cases = [
        ({"secret": b"t" * 32}, ps.AuthenticationError, "the secret of this process differs"),
        ({"secret": None}, ps.AuthenticationError, "was given a secret, and this process was not"),
        ({"version": "2.0"}, ps.ProtocolError, r"runs penstock 1\.0, this process runs penstock 2\.0"),
        ({"check_every": 4}, ps.ConfigError, r"option check_every: this process has 4 \(argument\), the job .* has 9"),
    ]
    for options, kind, words in cases:
        newcomer = visit(door, **options)
        with pytest.raises(kind, match=words):
            newcomer.enter()
        newcomer.close()


def test_a_job_that_made_its_secret_shares_it_with_its_user_on_its_host():
    job = Job()
    door = opened_at(job, secret=None)
    try:
        newcomer = visit(door, secret=None)
        assert newcomer.enter()[0].secret == SECRET
        newcomer.close()
        stranger = visit(door, secret=b"t" * 32)
        with pytest.raises(ps.AuthenticationError, match="was not given a secret, and this process was"):
            stranger.enter()
        stranger.close()
    finally:
        door.close()


def unused():
    """Where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def test_doors_are_tried_in_turn_and_all_are_given_one_number(job, door):
    other_job = Job()
    other = opened_at(other_job)
    newcomer = visit(unused(), other, door)
    try:
        assert newcomer.enter()[0].options.rank == 7
        assert (len(other_job.knocks), job.knocks) == (1, [])
        other.close()  # its member is lost while the newcomer waits
        assert newcomer.state() == b"how it stands"
        assert job.knocks == other_job.knocks
    finally:
        other.close()
        newcomer.close()


def test_a_member_that_the_others_have_given_up_sends_nobody_away(job, door):
    """Its process, and so its door, may be there for a while."""
    given_up = Job(ps.PeerLost("the others go on without this rank"))
    other = opened_at(given_up)
    newcomer = visit(other, door)
    try:
        assert newcomer.enter()[0].options.rank == 7
        assert len(job.knocks) == 1
    finally:
        other.close()
        newcomer.close()


def test_a_newcomer_that_would_get_another_rank_says_so(job, door):
    other = opened_at(Job())
    newcomer = visit(other, door)
    try:
        newcomer.enter()
        job.knocks.append(5)  # members have given that rank to somebody else
        other.close()
        with pytest.raises(ps.PeerLost, match="goes on without rank 7, a newcomer, and would count it anew as rank 8"):
            newcomer.state()
    finally:
        other.close()
        newcomer.close()


def test_doors_of_two_jobs_are_told_apart(job, door):
    other_job = Job()
    other = opened_at(other_job, job_id=b"k" * 16)
    newcomer = visit(door, other)
    try:
        newcomer.enter()
        door.close()
        with pytest.raises(ps.ProtocolError, match=rf"at {other.address} is a door of another job .*; no member answ"):
            newcomer.state()
        assert other_job.knocks == []
    finally:
        other.close()
        newcomer.close()


def test_each_door_and_why_it_is_none_is_named(door):
    nobody = [unused(), unused()]
    newcomer = visit(*nobody, rendezvous_timeout_s=0.3)
    with pytest.raises(ps.Timeout) as caught:
        newcomer.enter()
    assert all(f"{one} ([Errno 111] Connection refused)" in str(caught.value) for one in nobody), caught.value
    newcomer = visit(nobody[0], door, version="2.0")
    with pytest.raises(ps.ProtocolError) as caught:
        newcomer.enter()
    assert f"the job at {door.address} runs penstock 1.0" in str(caught.value)
    assert f"no member answered at {nobody[0]} ([Errno 111] Connection refused)" in str(caught.value)


HALF = (
    b'{"penstock": "1.0", "given": true, "body": "{\\"secret\\": {\\"given\\": true}, \\"\\ud800\\": 1}", "proof": ""}'
)
"""Half a character, as JSON can spell it and nothing else."""


@pytest.mark.parametrize("said", [b"{}", HALF])
def test_what_is_no_door_is_named(said):
    server = key_server.KeyServer(
        socket.create_server(("127.0.0.1", 0)), 4, lambda key: said, lambda key, value: None, "no-door"
    )
    sources = {"join": "argument"}
    try:
        options = Options(join=f"127.0.0.1:{server.port}", secret=SECRET)
        with pytest.raises(ps.ProtocolError, match="is no door of a job"):
            Entrance(options, sources, "1.0").enter()
    finally:
        server.close()


def test_a_request_that_is_not_answered_by_a_fault_is_the_last_of_nobody(caplog):
    def get(key):
        return {"known": b"value"}[key]

    server = key_server.KeyServer(socket.create_server(("127.0.0.1", 0)), 4, get, lambda key, value: None, "forgetful")
    client, stays = (KeyClient("127.0.0.1", server.port) for _ in range(2))
    try:
        assert stays.ask(GET, "known", b"", time.monotonic() + PATIENCE_S) == b"value"
        with pytest.raises(ConnectionError):
            client.ask(GET, "unknown", b"", time.monotonic() + PATIENCE_S)
        assert stays.ask(GET, "known", b"", time.monotonic() + PATIENCE_S) == b"value"
        assert client.ask(GET, "known", b"", time.monotonic() + PATIENCE_S) == b"value"
    finally:
        client.close()
        stays.close()
        server.close()
    assert [record.message for record in caplog.records] == ["forgetful: a request was not answered"]


def test_a_door_that_is_silent_is_left_at_the_limit():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        sources = {"join": "argument"}
        options = Options(join=f"127.0.0.1:{silent.getsockname()[1]}", secret=SECRET, rendezvous_timeout_s=0.3)
        begin = time.monotonic()
        with pytest.raises(ps.Timeout, match=r"no member answered at .* within 0\.3 s"):
            Entrance(options, sources, "1.0").enter()
        assert time.monotonic() - begin < 5 + doorway.ANSWER_S


def parent_of_one_that_stays(pipe):
    """A member with a door, at which somebody stands, forks a child and closes the door, as when it ends."""
    door = opened_at(Job())
    _process.job = SimpleNamespace(rank=1, engine=Job(), trace=None, metrics=None)
    os.register_at_fork(after_in_child=_after_fork_in_child)
    host, _, port = door.address.rpartition(":")
    client = KeyClient(host, int(port))
    client.ask(GET, "door", b"", time.monotonic() + PATIENCE_S)
    forked, stays = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(forked[1], b".")
        os.close(stays[1])
        os.read(stays[0], 1)  # until the parent has seen enough
        os._exit(0)
    try:
        os.read(forked[0], 1)
        door.close()
        client._connection.settimeout(PATIENCE_S)
        found = [client._connection.recv(1)]
        try:
            socket.create_connection((host, int(port)), PATIENCE_S).close()
        except ConnectionRefusedError:
            found.append("refused")
        pipe.send(found)
    finally:
        os.close(stays[1])
        os.waitpid(child, 0)


def test_a_forked_child_keeps_neither_the_door_nor_who_stands_there():
    """A loader's worker may outlive the member: newcomers would wait for an answer of nobody."""
    here, there = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=parent_of_one_that_stays, args=(there,))
    process.start()
    there.close()
    try:
        assert here.poll(3 * PATIENCE_S)
        assert here.recv() == [b"", "refused"]
    finally:
        process.join(PATIENCE_S)
        process.kill()
