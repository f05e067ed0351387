"""Calls on tensors of the late device, ranks as threads. Run by test_on_late_device.py."""

from __future__ import annotations

import itertools
import random
import sys
import threading
import time
import zlib

import late_device  # noqa: F401  first: torch takes in what devices there are with the first backward
import pytest
import ranks
import torch
from host_bits import has_the_bits_of_the_host, same_on_all
from late_device import LateDevice, installed

from penstock._native import ALGORITHMS
from penstock.collectives import Group
from penstock.errors import ConfigError, PeerLost, PenstockError, Timeout
from penstock.torch.calls import cutting, device_calls
from penstock.torch.runtime import accelerator

ARENA_BYTES = 2048
LOST_S = 30.0
LONG = pytest.mark.long
DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Pieces so small that every tensor has several, and an arena of a few of them."""
    monkeypatch.setattr(ranks, "arm", "native")
    monkeypatch.setattr(cutting, "PIECE_BYTES", 512)
    plain = device_calls.DeviceCalls.__init__
    monkeypatch.setattr(
        device_calls.DeviceCalls,
        "__init__",
        lambda self, engine, pinned_bytes, timeout_s: plain(self, engine, ARENA_BYTES, timeout_s),
    )
    monkeypatch.setattr(accelerator, "pinned_memory", pinned_memory)


def pinned_memory(nbytes):
    with torch.inference_mode(False):
        return torch.full((nbytes,), 171, dtype=torch.uint8, device="cpu")


def run(main, size, **options):
    """Call ``main(rank, group)`` as each rank, each in a stream of its own."""

    def of_rank(rank, engine):
        with torch.Stream("late"):
            return main(rank, Group(engine, 0, range(size), rank))

    return ranks.run(of_rank, size, **options)


def numbers(*seed, elems=300, dtype=torch.float32):
    generator = torch.Generator().manual_seed(zlib.crc32(repr(seed).encode()))
    return (torch.randn(elems, generator=generator, dtype=torch.float64) * 20).to(dtype)


class Program:
    """Every collective, with tensors where it is asked to have them; what has come of it, on the host."""

    def __init__(self, device, async_):
        self.device, self.async_ = device, async_
        self.futures, self.results = [], []

    def call(self, method, *arguments, into, **options):
        self.futures.append(method(*arguments, **options, async_=self.async_))
        self.results.append(into)

    def on_device(self, tensor):
        return tensor.to(self.device, non_blocking=True)

    def of_rank(self, rank, group, elems, dtype):
        size, root = group.size, group.size - 1
        made = lambda *seed, count=1: self.on_device(numbers(rank, *seed, elems=count * elems, dtype=dtype))  # noqa: E731
        empty = lambda count: self.on_device(torch.zeros(count * elems, dtype=dtype))  # noqa: E731
        ops = ("sum", "average", "min", "max") if dtype.is_floating_point else ("sum", "min", "max")
        for op in ops:
            for algorithm in ("store", None):
                tensor = made(op)
                self.call(group.allreduce, tensor, op, algorithm=algorithm, into=[tensor])
        tensor = made("reduced")
        self.call(group.reduce, tensor, root, into=[tensor])
        tensor = made("broadcast")
        self.call(group.broadcast, tensor, root, into=[tensor])
        block = empty(1)
        self.call(group.reduce_scatter, made("scattered", count=size), block, into=[block])
        everything = empty(size)
        self.call(group.all_gather, made("gathered"), everything, into=[everything])
        rows = [empty(1) for _ in range(size)]
        rows[rank] = made("own")
        self.call(group.all_gather, rows[rank], rows, into=rows)
        rows = [empty(1) for _ in range(size)] if rank == root else None
        self.call(group.gather, made("to the root"), rows, root, into=rows or [])
        block, given = empty(1), made("from the root", count=size) if rank == root else None
        self.call(group.scatter, block, given, root, into=[block])
        given = [made("exchanged", to)[: elems // (1 + rank + to)] for to in range(size)]
        wanted = [empty(1)[: elems // (1 + rank + other)] for other in range(size)]
        self.call(group.all_to_all, given, wanted, into=wanted)
        if size > 1:
            message, got = made("sent", count=2), empty(2)
            self.call(group.send, message, (rank + 1) % size, 7, into=[])
            self.call(group.recv, got, (rank - 1) % size, 7, into=[got])

    def end(self, order):
        for number in order(range(len(self.futures))):
            if self.futures[number] is not None:
                self.futures[number].wait()
        return [tensor.to("cpu", copy=True) for results in self.results for tensor in results]


def collect(device, size, elems, dtype, seed, *, async_=True):
    def main(rank, group):
        program = Program(device, async_)
        program.of_rank(rank, group, elems, dtype)
        chance = random.Random(seed + rank)
        return program.end(lambda numbers: chance.sample(numbers, len(numbers)))

    return run(main, size)


SHORT = {(torch.float32, 300, 3), (torch.bfloat16, 301, 2), (torch.uint8, 1, 2), (torch.float64, 0, 2)}


@pytest.mark.parametrize(
    ("dtype", "elems", "size"),
    [
        pytest.param(*case, marks=[] if case in SHORT else LONG)
        for case in itertools.product(DTYPES, (0, 1, 300, 301, 5000), (1, 2, 3))
    ],
)
def test_every_collective_has_the_bits_of_the_host(dtype, elems, size):
    with installed(elems + size):
        expected = collect("cpu", size, elems, dtype, 0)
        found = collect("late", size, elems, dtype, 0)
    assert same_on_all(found, expected)


def test_calls_that_block_have_the_bits_of_the_host():
    def main(rank, group, device):
        program = Program(device, async_=False)
        group.send = group.recv = lambda *_, **__: None  # two ranks that send first would wait for each other
        program.of_rank(rank, group, 300, torch.float32)
        return program.end(iter)

    has_the_bits_of_the_host(4, lambda device: run(lambda rank, group: main(rank, group, device), 2))


@pytest.mark.parametrize("vectors", [pytest.param(1, marks=LONG), 2])
@pytest.mark.parametrize("algorithm", [None, *ALGORITHMS])
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=LONG), pytest.param(5, marks=LONG)])
def test_cuts_do_not_show_in_the_bits_of_any_algorithm(monkeypatch, algorithm, vectors, size):
    """Where it is the place in the tensor that decides who adds to what, too."""
    monkeypatch.setattr(cutting, "PIECE_BYTES", 600_000)
    monkeypatch.setattr(sys.modules[__name__], "ARENA_BYTES", 1_200_000)
    pieces = []
    plain = device_calls.DeviceCalls._submit
    monkeypatch.setattr(
        device_calls.DeviceCalls, "_submit", lambda self, line, piece: pieces.append(piece) or plain(self, line, piece)
    )

    def main(rank, group, device):
        rows = [numbers(rank, one, elems=700_003).to(device, non_blocking=True) for one in range(vectors)]
        group.allreduce(rows, algorithm=algorithm)
        return [row.cpu() for row in rows]

    has_the_bits_of_the_host(0, lambda device: run(lambda rank, group: main(rank, group, device), size))
    assert len(pieces) >= (3 * size if size < 5 else size)


# Waits


class Passed:
    """An event that nobody need wait for."""

    def query(self):
        return True


def without(patches, wait):
    calls = device_calls.DeviceCalls
    if wait in ("outward", "backward"):
        plain = device_calls._Streams.__init__

        def init(self, device):
            plain(self, device)
            getattr(self, wait).wait_event = lambda event: None

        patches.setattr(device_calls._Streams, "__init__", init)
    elif wait in ("copied before it is sent", "copied back before its room is free"):
        plain_marks, outward_too = calls._marks, wait == "copied before it is sent"

        def marks(self, piece, parts, *, outward):
            events = plain_marks(self, piece, parts, outward=outward)
            return [Passed() for _ in events] if outward == outward_too else events

        patches.setattr(calls, "_marks", marks)
    elif wait == "copied back before it is read":
        patches.setattr(accelerator.Accelerator, "go_on_after", lambda self, event: None)


@pytest.mark.parametrize(
    "wait",
    [
        pytest.param(None, marks=LONG),
        *("outward", "backward", "copied before it is sent", "copied back before its room is free"),
        "copied back before it is read",
    ],
)
def test_each_wait_is_needed(monkeypatch, wait):
    def main(rank, group, device):
        results = []
        for turn in range(3):
            tensor = numbers(rank, turn, elems=700).to(device, non_blocking=True)
            for factor in (2.0, 0.5) * 10:
                tensor *= factor
            own = tensor.clone()
            future = group.broadcast(tensor, turn % 2, async_=True)  # one rank gives nothing and must not be early
            gathered = torch.empty(1400).to(device, non_blocking=True)
            group.all_gather(own, gathered)
            results.append(gathered * 3)
            future.wait()
            results.append(tensor * 3)
        return [result.cpu() for result in results]

    expected = run(lambda rank, group: main(rank, group, "cpu"), 2)

    def right(seed):
        with monkeypatch.context() as patches:
            without(patches, wait)
            try:
                with installed(seed):
                    found = run(lambda rank, group: main(rank, group, "late"), 2)
            except (AssertionError, PenstockError, RuntimeError):  # the device has seen its memory change
                return False
        return same_on_all(found, expected)

    outcomes = (right(seed) for seed in range(5 if wait is None else 40))
    assert all(outcomes) if wait is None else not all(outcomes)


def test_nobody_waits_for_the_device():
    both = threading.Barrier(2, timeout=30.0)
    with installed(3) as late:

        def main(rank, group):
            tensor, block = torch.ones(2000, device="late"), torch.ones(5, device="late")
            future = group.allreduce(tensor, async_=True)
            group.allreduce(block)
            future.wait()
            both.wait()
            waits = [*late.waits]
            both.wait()
            # By the thread whose stream waits for them.
            return waits, tensor.cpu(), block.cpu()

        for waits, *sums in run(main, 2):
            assert not waits
            assert all((one == 2).all() for one in sums)


def test_memory_is_bounded_whatever_the_size(monkeypatch):
    """The arena, and no more than a piece for each group that finds it full."""
    taken = []
    monkeypatch.setattr(accelerator, "pinned_memory", lambda nbytes: taken.append(nbytes) or pinned_memory(nbytes))

    def main(rank, group):
        tensors = [torch.full((20_000,), float(rank), device="late") for _ in range(4)]
        futures = []
        for number, tensor in enumerate(tensors, 1):
            group._engine.form_group(number, [0, 1])
            other = Group(group._engine, number, [0, 1], rank)
            futures.append(other.allreduce(tensor, algorithm="store", async_=True))
        for future in futures:
            future.wait()
        return [tensor.cpu() for tensor in tensors]

    with installed(14):
        assert all((tensor == 1).all() for row in run(main, 2) for tensor in row)
    assert taken.count(ARENA_BYTES) == 2 and set(taken) <= {ARENA_BYTES, 512}


# Order


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=LONG), pytest.param(2, marks=LONG)])
def test_calls_on_main_memory_wait_in_line(seed):
    """The engine counts the calls of a group, and both ranks must count alike."""

    def main(rank, group):
        there, here, told, futures = [], [], [], []
        for turn in range(6):
            there.append(torch.full((700,), float(turn + rank), device="late"))
            here.append(torch.full((700,), float(10 * turn + rank)))
            futures.append(group.allreduce(there[-1], algorithm="store", async_=True))
            futures.append(group.allreduce(here[-1], async_=True))
            told.append(torch.full((700,), float(rank)))
            futures.append(group.broadcast(told[-1], turn % 2, async_=True))
            if turn == 3:
                group.barrier()
        for future in reversed(futures):
            future.wait()
        return [tensor.cpu() for tensor in there], here, told

    with installed(seed):
        for there, here, told in run(main, 2):
            assert all((tensor == turn % 2).all() for turn, tensor in enumerate(told))
            assert all((tensor == 2 * turn + 1).all() for turn, tensor in enumerate(there))
            assert all((tensor == 20 * turn + 1).all() for turn, tensor in enumerate(here))


def test_groups_and_messages_do_not_wait_for_each_others_memory():
    """Each rank fills the arena with what the other comes to last."""

    def main(rank, group):
        group._engine.form_group(1, [0, 1])
        group._engine.form_group(2, [0, 1])
        groups = [Group(group._engine, number, [0, 1], rank) for number in (1, 2)]
        late = torch.empty(3000, device="late")
        came = group.recv(late, 1 - rank, 5, async_=True)
        tensors = [torch.full((4000,), float(rank), device="late") for _ in groups]
        order = [0, 1] if rank == 0 else [1, 0]
        futures = [groups[at].allreduce(tensors[at], algorithm="store", async_=True) for at in order]
        futures[1].wait()
        futures[0].wait()
        group.send(torch.full((3000,), float(rank), device="late"), 1 - rank, 5)
        came.wait()
        return [tensor.cpu() for tensor in (late, *tensors)]

    with installed(6):
        for rank, (late, *tensors) in enumerate(run(main, 2, operation_timeout_s=15.0)):
            assert (late == 1 - rank).all() and all((tensor == 1).all() for tensor in tensors)


def test_a_receive_from_anybody_takes_all_of_one_message():
    def main(rank, group):
        if rank:
            group.send(torch.full((1000,), float(rank), device="late"), 0, 3)
            return None
        named = torch.empty(1000, device="late")
        anybody = [torch.empty(1000, device="late") for _ in range(2)]
        first = group.recv(named, 2, 3, async_=True)
        sources = [group.recv(one, None, 3) for one in anybody]
        first.wait()
        return [tensor.cpu() for tensor in (named, *anybody)], sources

    with installed(8):
        (named, *anybody), sources = run(main, 4)[0]
    assert (named == 2).all() and sorted(sources) == [1, 3]
    assert all((tensor == source).all() for tensor, source in zip(anybody, sources, strict=True))


def test_main_memory_and_devices_may_meet_in_one_call():
    def main(rank, group):
        here, there = torch.full((900,), 1.0), torch.full((900,), 2.0, device="late")
        group.allreduce([here, there])
        rows = [torch.zeros(900), torch.zeros(900, device="late")]
        group.all_gather(there if rank else here, rows)
        both = [torch.full((900,), float(rank)), torch.zeros(900, device="late")]
        group.broadcast(both, 1)
        return [here, there.cpu(), *(one.cpu() for one in rows), *(one.cpu() for one in both)]

    with installed(9):
        for found in run(main, 2):
            assert [set(tensor.tolist()) for tensor in found] == [{6.0}] * 4 + [{1.0}, {1.0}]


def test_a_tensor_may_be_let_go_of_and_its_future_too():
    def main(rank, group):
        for _ in range(20):
            group.allreduce(torch.ones(600, device="late"), async_=True)
            torch.empty(1, device="late")  # the allocator looks what is free
        last = torch.ones(600, device="late")
        group.allreduce(last)
        return last.cpu()

    with installed(10):
        assert all((tensor == 2).all() for tensor in run(main, 2))


def test_whatever_the_program_has_switched_on(monkeypatch):
    # This thread, in its modes, lets the device get on with nearly every call.
    monkeypatch.setattr(LateDevice.advance_by_chance, "__defaults__", (0.9,))

    def main(rank, group):
        with torch.inference_mode(), torch.device("late"):
            made = torch.ones(600)
            rows = [made[:100], made[100:400]] if rank else [made[:100], made[100:300]]
            wanted = [torch.empty(100), torch.empty(100)] if rank == 0 else [torch.empty(200), torch.empty(300)]
            group.allreduce(made, async_=True).wait()
            wanted[rank] = torch.empty_like(rows[rank])
            group.all_to_all(rows, wanted)
        param = torch.nn.Parameter(torch.ones(600, device="late"))
        squared = (param * param).sum()  # keeps the parameter for backward
        group.broadcast(param, 0)
        with torch.autograd.set_multithreading_enabled(False):  # in this thread's stream
            squared.backward()
        return made.cpu(), wanted[1 - rank].cpu(), param.grad.cpu()

    with installed(12):
        assert all((one == 2).all() for row in run(main, 2) for one in row)


def test_dtypes_that_are_moved_and_not_summed():
    def main(rank, group):
        made = [
            torch.tensor([True, False, True]),
            torch.tensor([1 + 2j, 3 - 1j]),
            torch.ones(5, dtype=torch.float8_e4m3fn),
        ]
        there = [one.to("late") for one in made]
        for one in there:
            if rank:
                one.zero_()
            group.broadcast(one, 0)
        return all(
            torch.equal(one.cpu().view(torch.uint8), ours.view(torch.uint8))
            for one, ours in zip(there, made, strict=True)
        )

    with installed(13):
        assert all(run(main, 2))


# When it ends


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=LONG) for seed in range(2, 12))])
def test_a_lost_rank_releases_whatever_waits(seed):
    told, last = [], random.Random(seed).randrange(1, 9)

    class Gone(Exception):
        pass

    def main(rank, group):
        tensors = [torch.ones(1500, device="late") for _ in range(3)]
        try:
            for turn in range(10):
                futures = [group.allreduce(tensor, "max", algorithm="store", async_=True) for tensor in tensors]
                if rank == 1 and turn == last:
                    raise Gone
                for future in futures:
                    future.wait()
        except PeerLost as error:
            told.append(error)
            with pytest.raises(PeerLost):
                group.allreduce(tensors[0])
            del tensors, futures
            torch.empty(1, device="late")  # the allocator looks what is free
            raise

    with installed(seed) as late:
        begin = time.monotonic()
        with pytest.raises(Gone):
            run(main, 2)
        assert time.monotonic() - begin < LOST_S
        late.synchronize()
    assert [error.rank for error in told] == [1]


def test_a_rank_that_does_not_come_is_named_in_time():
    ended = threading.Event()

    def main(rank, group):
        if rank == 1:
            assert ended.wait(LOST_S)
            return
        try:
            group.allreduce(torch.ones(1500, device="late"), algorithm="store", async_=True).wait(0.5)
        except Timeout as error:
            assert "rank 1" in str(error), error
            raise
        finally:
            ended.set()

    with installed(0), pytest.raises(Timeout):
        run(main, 2)


def test_a_device_that_does_not_get_on_is_named_in_time(monkeypatch):
    def main(rank, group):
        future = group.allreduce(torch.ones(1500, device="late"), async_=True)
        with pytest.raises(Timeout, match=r"by late:0 within 0.3 s"):
            future.wait(0.3)
        monkeypatch.undo()

    with installed(0) as late:
        monkeypatch.setattr(late, "advance_by_chance", lambda probability=0.0: None)
        run(main, 1)


def test_a_copy_that_fails_ends_the_job_at_once(monkeypatch):
    copied, plain = itertools.count(), device_calls.DeviceCalls._copy

    def fails(self, piece, into, given, *, outward):
        if next(copied) == 9:
            raise ValueError("no copy")
        plain(self, piece, into, given, outward=outward)

    monkeypatch.setattr(device_calls.DeviceCalls, "_copy", fails)
    with installed(1), pytest.raises((ValueError, PenstockError), match="no copy"):
        run(lambda rank, group: group.allreduce(torch.ones(1500, device="late"), algorithm="store"), 2)


# Refused


def test_says_what_is_refused():
    def main(rank, group):
        def refused(words, call):
            with pytest.raises(ConfigError, match=words):
                call()

        there = torch.ones(8, 8, device="late")
        refused("call .contiguous", lambda: group.allreduce(there.t()))
        refused("on meta", lambda: group.allreduce(torch.ones(2, device="meta")))
        refused("cannot be summed", lambda: group.allreduce(there > 0))
        refused("share memory", lambda: group.allreduce([there, there]))
        refused("different dtypes", lambda: group.allreduce([there, torch.ones(128, dtype=torch.int16)]))
        refused("cannot be cut into 2 equal blocks", lambda: group.all_to_all(torch.ones(3, device="late"), there))
        stream = torch.accelerator.current_stream()
        stream.is_capturing = lambda: True
        refused("captured into a graph", lambda: group.allreduce(there))
        del stream.is_capturing
        group.allreduce(there)  # nothing of these has harmed the group
        return there.cpu()

    with installed(0):
        assert all((tensor == 2).all() for tensor in run(main, 2))


def test_ranks_with_tensors_that_do_not_fit_are_told():
    """Long tensors go by pieces, which a rank with main memory does not make."""

    def main(rank, group):
        group.allreduce(torch.ones(700, device="late" if rank else "cpu"))

    with installed(0), pytest.raises(PenstockError, match="allreduce"):
        run(main, 2)
