"""The native engine, and what synchronisation costs.

Private: its users are `penstock.job`, `penstock.coordinator` and `penstock.torch`.

Every call may be made from any thread. Calls that may block release the GIL and let signal handlers run every 100 ms.
Failures are the classes of `penstock.errors`; after the first failure of the job every call that needs the other ranks
raises it. In a forked child every call raises `ConfigError`.
"""

from collections.abc import Sequence
from typing import Literal, TypedDict, final, type_check_only

from penstock.coordinator import Cluster, Rates
from penstock.description import LayerKind

__all__ = [
    "ALGORITHMS",
    "COLLECTIVES",
    "LAYER_KINDS",
    "POINTS",
    "RECORD",
    "VECTORS_MAX",
    "WAYS",
    "Call",
    "Engine",
    "MomentsKept",
    "Optimizer",
    "Roles",
    "Way",
    "allreduce_cost",
    "best_algorithm",
    "best_groups",
    "best_scheme",
    "checksum",
    "digests",
    "fixed_terms",
    "local_rounds",
    "local_times",
    "step_times",
    "summing_rate",
]

_Op = Literal["average", "sum", "copy", "min", "max"]
_Route = Literal["store", "central", "tree", "ring", "butterfly", "gather"]
_Algorithm = Literal["store", "central", "tree", "ring", "butterfly"]

ALGORITHMS: tuple[_Algorithm, ...]
"""Of an exact allreduce; all that there are, the store first."""

VECTORS_MAX: int
"""How many vectors of one rank an allreduce sums, and a broadcast fills, at most."""

COLLECTIVES: tuple[_Algorithm, ...]
"""Those of them that are not the store."""

LAYER_KINDS: tuple[LayerKind, ...]
"""By what gradients are made of; all that there are, the last for whatever is none of the others."""

@final
class Way:
    """A way in which a layer can travel, which users call a scheme; see crates/core/src/way.rs."""

    @property
    def name(self) -> str:
        """The scheme's name."""

    @property
    def kind(self) -> LayerKind | None:
        """The kind of layer that it is for; none: every kind."""

    @property
    def route(self) -> str:
        """An algorithm, ``gather`` or ``owner``."""

    @property
    def wire(self) -> str | None:
        """The dtype to which fp32 gradients are rounded on the wire, if they are."""

    @property
    def is_whole(self) -> bool:
        """Whether all of the gradient travels, as the book says."""

    @property
    def sends_rows(self) -> bool:
        """Whether rows of activations travel, from which every gradient is rebuilt exactly."""

    @property
    def shortens(self) -> bool:
        """Whether a rank leaves out a part of its gradient, which it keeps for later."""

    @property
    def is_lossy(self) -> bool:
        """Whether results differ from the exact ones by more than rounding."""

    @property
    def may_be_chosen(self) -> bool:
        """Whether the coordinator may choose it while training."""

WAYS: dict[str, Way]
"""All that there are by name, in the order in which ties are decided."""

POINTS: tuple[str, ...]
"""Where a slice can be on its journey, in its order; see crates/core/src/observe.rs."""

RECORD: list[tuple[str, str]]
"""The fields of a record, 32 bytes in all, and their types: ``numpy.dtype(RECORD)``; see `Engine.observations`."""

_Tensor = (
    tuple[str, int, str, int]
    | tuple[str, int, str, int, _Route]
    | tuple[str, int, str, int, Literal["store"], str]
    | tuple[str, int, str, int, Literal["store"], str | None, int]
)
_Phase = Literal["backward", "forward", "other"]

@type_check_only
class LayerReport(TypedDict):
    """Counts of one layer; bytes are payload. `lossy`: the type to which gradients are rounded on the wire, if any."""

    name: str
    lossy: Literal["bf16", "fp16"] | None
    bytes_sent: int
    bytes_received: int
    stall_s: float

@type_check_only
class BookReport(TypedDict):
    """Counts of one book."""

    name: str
    layers: list[LayerReport]

@type_check_only
class PeerReport(TypedDict):
    """Counts of another rank: of layers, messages and collectives; bytes are payload.

    What is queued waits now. `retransmitted_segments`: what TCP has sent again, none through shared memory.
    """

    rank: int
    bytes_sent: int
    bytes_received: int
    queued_frames: int
    queued_bytes: int
    retransmitted_segments: int

@type_check_only
class Report(TypedDict):
    """What an engine counted since it was made; bytes are payload.

    `tensors_in_flight` were submitted, and their results are not in memory now. `peers` are the ranks that anything
    went to or came from.
    """

    rank: int
    size: int
    lanes: int
    slices: int
    preemptions: int
    frames_sent: int
    frames_received: int
    bytes_sent: int
    bytes_received: int
    call_bytes_sent: int
    call_bytes_received: int
    tensors_in_flight: int
    busy_backward_s: float
    busy_forward_s: float
    busy_stalled_s: float
    busy_other_s: float
    stall_s: float
    pool_bytes: int
    line_bytes_per_s: float | None
    through_memory: list[int]
    owned_bytes: list[int]
    peers: list[PeerReport]
    books: list[BookReport]

@type_check_only
class Estimate(TypedDict):
    """What one scheme costs for one layer; see crates/core/src/scheme/facts.rs."""

    scheme: str
    steps: int
    direction_bytes: int
    node_bytes: int
    total_bytes: int
    inside_bytes: int
    busy_s: float
    wire_s: float
    rebuild_s: float

@type_check_only
class Decision(TypedDict):
    """A layer's scheme and why; `code` is one word, `estimates` are of all schemes that fit the layer.

    `may_change`: a later measurement may lead to another. `schemes`: what the layer can change between while training,
    if all ranks are told to, that of the whole gradient first.
    """

    scheme: str
    code: str
    reason: str
    given: bool
    may_change: bool
    schemes: tuple[str, ...]
    lossy: bool
    estimates: list[Estimate]

@type_check_only
class Allreduce(TypedDict):
    """What an allreduce costs; bytes by rank."""

    steps: int
    sent: list[int]
    received: list[int]
    seconds: float

@type_check_only
class StepTimes(TypedDict):
    """How fast a step can be; see crates/core/src/cost/overlap.rs."""

    ideal_s: float
    wfbp_s: float
    serial_s: float
    compute_s: float

def best_scheme(
    policy: str,
    cluster: Cluster,
    rates: Rates,
    *,
    kind: LayerKind,
    shape: tuple[int, int],
    elems: int,
    elem_bytes: int,
    rows: list[int],
    allowed: list[str] | None = None,
    current: str | None = None,
    adopted: bool = False,
    given: str | None = None,
    what: str = "",
    short_bytes: int = 0,
    collective: str | None = None,
    sparse: bool = False,
    owners_update: bool = False,
    why_whole: str | None = None,
    whole_on: int | None = None,
) -> Decision:
    """The best scheme for a layer by policy ``paper`` or ``measured``.

    ``shape`` is (outputs, inputs) of a linear layer, (vocabulary, width) of an embedding, ignored for others. ``elems``
    counts all of the layer's tensors. ``rows`` are K by worker, or empty.

    Of ``allowed`` one may be chosen besides the store; without, whatever may be chosen while training. ``current`` is
    in use, and stays for now if it is ``adopted`` from ranks that went on.

    ``given`` is not chosen: asked for, the default, or the only one possible. ``what`` says why, unless the user has
    asked for it. If it sends less than the gradient, ``what`` is what it leaves out, and ``short_bytes`` what a rank
    sends to each other. ``collective`` takes the store's place in the book. ``sparse``: its gradients are sparse, and
    can be sent so. ``owners_update``: its owners update it. ``why_whole`` is why the gradient must travel whole, if it
    must for another reason; ``whole_on`` the rank that would send it whole at present.
    """

@type_check_only
class FixedTerms(TypedDict):
    """What is fixed of a layer's scheme before training.

    `scheme`: what is not chosen, if anything is. `whole`: by which its whole gradient travels, whenever it does; the
    engine's book is opened so. `why_whole`: why that must always be, if its terms say so. `may_choose_collective`:
    whether one may be chosen in the store's place.
    """

    scheme: str | None
    whole: str
    why_whole: str | None
    may_choose_collective: bool

def fixed_terms(given: str | None, collective: str | None, sparse: bool, owners_update: bool) -> FixedTerms:
    """What follows from a layer's terms, which are those of `best_scheme`, whatever the facts."""

def best_groups(cluster: Cluster, rates: Rates) -> tuple[list[list[int]], str]:
    """Which workers shall sum among themselves before the store does, if any, and why.

    Groups of the cluster are left aside.
    """

def allreduce_cost(algorithm: str, elems: int, elem_bytes: int, workers: int, slices: int, rates: Rates) -> Allreduce:
    """What ``store``, ``central``, ``tree``, ``ring`` or ``butterfly`` costs for a message in so many slices."""

def best_algorithm(
    elems: int, elem_bytes: int, workers: int, slices: int, rates: Rates, allowed: list[str]
) -> tuple[str, float]:
    """The fastest of ``allowed`` for one message, and its seconds."""

def step_times(layers: list[tuple[float, float, float]]) -> StepTimes:
    """The limits of a step; ``layers`` are (forward, backward, wire) in seconds, in forward order."""

def local_rounds(
    workers: int, fragments: list[tuple[int, float, int, tuple[int, bool] | None]]
) -> list[tuple[int, float]]:
    """What a round of each fragment of local updates moves: bytes on the busiest direction, seconds that this is busy.

    A fragment is given as bytes and seconds by the store, its own bytes, and, if it is encoded, the bytes of that and
    whether they go to all others; then the store's are those with the workers as owners.
    """

def local_times(compute_s: float, wire_s: list[float], sync_every: int, delay: int) -> tuple[float, float]:
    """Seconds of a step of local updates, in the mean and at most; ``wire_s`` are those of each fragment's round."""

def summing_rate() -> float:
    """Bytes of fp32 that one thread of this process adds to a sum per second; measured, in about a millisecond."""

def digests(ranges: list[tuple[int, int]]) -> list[int]:
    """64 bits of XXH3, as a signed number, of each range of memory, given as address and length in bytes."""

def checksum(data: bytes, /) -> int:
    """64 bits of XXH3, as a signed number, of these bytes."""

@final
class MomentsKept:
    """What the program comes to, until it is taken: at most 262,144 moments."""

    def __init__(self) -> None: ...
    def note(self, what: int, /) -> None:
        """The program comes to this now; of more than are kept, one is dropped, and counted."""

    def take(self) -> tuple[bytes, int]:
        """What was noted since the last call, in the order of time, and how much was dropped.

        Of each there are two numbers of 64 bits, little end first: the time, on the clock of `time.monotonic_ns`, and
        what it is.
        """

@final
class Optimizer:
    """An optimizer as the owners of values apply it; options are torch's. See crates/core/src/optimizer.rs."""

    @staticmethod
    def sgd(
        *, lr: float, weight_decay: float, maximize: bool, momentum: float, dampening: float, nesterov: bool
    ) -> Optimizer:
        """As torch.optim.SGD."""

    @staticmethod
    def adam(
        *,
        lr: float,
        weight_decay: float,
        maximize: bool,
        betas: tuple[float, float],
        eps: float,
        amsgrad: bool,
        decoupled: bool,
    ) -> Optimizer:
        """As torch.optim.Adam, or AdamW if ``decoupled``."""

    @staticmethod
    def adagrad(
        *, lr: float, weight_decay: float, maximize: bool, lr_decay: float, eps: float, initial: float
    ) -> Optimizer:
        """As torch.optim.Adagrad; ``initial`` is its initial_accumulator_value."""

    @staticmethod
    def rmsprop(
        *,
        lr: float,
        weight_decay: float,
        maximize: bool,
        alpha: float,
        eps: float,
        momentum: float,
        centered: bool,
    ) -> Optimizer:
        """As torch.optim.RMSprop."""

    @staticmethod
    def elastic(*, alpha: float) -> Optimizer:
        """Elastic averaging: what comes is another value, towards which this one goes by the share ``alpha``."""

    @property
    def states(self) -> list[str]:
        """What is kept beside each value, by torch's names."""

    @property
    def initial(self) -> float:
        """What that begins with: zero, but for Adagrad."""

    def update(self, dtype: str, step: int, value: int, gradient: int, states: list[int], nbytes: int) -> None:
        """Make update number ``step``, from 1, of the values at this address; all are of so many bytes."""

@final
class Roles:
    """Who does what in a book; see crates/core/src/roles.rs."""

    def __new__(
        cls,
        members: list[int],
        owners: list[int],
        must_be_in: list[int] | None = None,
        fold: Literal["fresh", "kept", "updated"] = "fresh",
        answered: Literal["all", "before", "who-asks"] = "all",
        staleness: tuple[list[int], int] | None = None,
        stragglers: tuple[int, float] | None = None,
        groups: list[list[int]] = ...,
    ) -> Roles:
        """``members`` have to do with the book, slices are dealt to ``owners`` by bytes.

        A round ends when these ``must_be_in``: all members that have not left (None), some, or nobody (an empty list),
        which makes each contribution a round of its own. Who need not be in can ask (`Engine.submit_absent`).

        Contributions are the result, or with the fold ``kept`` are combined with a value that the owner keeps. With
        ``updated`` they are the gradient of such a value, to which an optimizer is applied (`Engine.proceed`,
        `Engine.order`). The result goes to all who take part, or to ``who-asks``; with ``before`` to all, but those who
        contribute get the value as it was before.

        Where nobody must be in, ``staleness`` are ranks, and by how many contributions one who asks may be ahead of the
        slowest of them. ``stragglers`` are how many are enough for a round, and how many seconds these wait for the
        others.

        Contributors in ``groups`` sum among themselves first; the first of each, its head, talks to owners for it.
        """

@final
class Engine:
    """One process's end of a job. Made, it listens; `connect` starts its threads; `shutdown` ends them."""

    def __new__(
        cls,
        *,
        rank: int,
        size: int,
        bind_host: str,
        port: int,
        secret: bytes,
        job_id: bytes,
        slice_bytes: int,
        lanes: int,
        window_bytes: int,
        priority: bool,
        operation_timeout_s: float,
        peer_timeout_s: float,
        handshake_timeout_s: float,
        congestion_control: str = ...,
        shared_memory: bool = ...,
        all_lanes: bool = ...,
        observations: int = ...,
        servers: int = ...,
        elastic: bool = ...,
        encrypt: bool = ...,
    ) -> Engine:
        """Bind the listener; ``port=0`` takes any port, ``window_bytes=0`` leaves the window to the engine.

        ``slice_bytes=0`` leaves the size of slices to the line rate; see `slicing`. Without ``all_lanes`` slices use no
        more lanes than the line rate needs.

        ``congestion_control`` is a name that the kernel allows, ``"system"``, or ``"auto"``, which only avoids BBR.

        With ``shared_memory`` bytes to and from ranks of this host go through memory that both map, where both can.
        With ``encrypt`` what goes to other hosts is encrypted.

        ``observations`` are kept per lane, and as many of the program: 32 bytes each; none with 0.

        The last ``servers`` ranks take no part in what workers do: `all_gather`, `leave`, group 0.

        With ``elastic`` members may be lost, from `go_on_after_losses` on: all tensors travel by the store.
        """

    @property
    def port(self) -> int:
        """The port that is listened on."""

    def connect(self, addresses: list[tuple[str, int]]) -> None:
        """Start the threads; ``addresses`` is every rank's host and port. Connections come about when needed."""

    @property
    def council_port(self) -> int | None:
        """Where this rank's part in agreements on the members is to be reached; none where they may not be lost."""

    def go_on_after_losses(
        self, addresses: list[tuple[str, int]], enough: int | None = None, most: int | None = None
    ) -> None:
        """From now on the others go on when members are lost.

        Args:
            addresses: By rank, host and `council_port`.
            enough: So many must agree on the next members; more than half of the last ones if it is not given.
            most: With so many members newcomers wait until one is lost; they do not if it is not given.
        """

    @property
    def epoch(self) -> int:
        """How often members were lost, or came, and the others went on."""

    def members(self) -> list[int]:
        """Who takes part in the present epoch."""

    def membership_log(self) -> list[tuple[list[int], int, list[tuple[int, int]]]]:
        """Of each epoch so far, the present one included, what is known of it.

        Its members, the first step of the program, from 1, that counts with them, and by book how many rounds were
        over before.
        """

    def epochs(self) -> list[tuple[list[int], list[tuple[int, list[tuple[int, int]]]]]]:
        """Of each epoch so far, the present one included, over whom its rounds are, and how many were over before.

        That is by book in runs of slices: how many slices, and how many rounds of each.
        """

    def cut_as(self, store_bytes: int, collective_bytes: int, lanes: int) -> None:
        """Cut tensors of books that are opened from now on so, whatever the line's rate is; see `slicing`."""

    def withhold(self, rounds: list[tuple[int, list[tuple[int, int]]]]) -> None:
        """This rank is in so many rounds of each slice (see `epochs`), and in no later one. Once, at the start."""

    def has_come_to(self, rounds: list[tuple[int, list[tuple[int, int]]]]) -> bool:
        """Whether this rank has the results of so many rounds of each slice, as `epochs` has them."""

    def knock(self, number: int) -> None:
        """A newcomer asks to take part, by a number that it has drawn: members agree on its rank (`announced`)."""

    def announced(self) -> list[tuple[int, int, int | None]]:
        """Newcomers that have a rank, and are no members yet: their numbers, ranks, and from which step on they count.

        That is None until all members hear them.
        """

    def job_state(self) -> bytes:
        """What a newcomer must know of the job, for `come`."""

    def come(self, state: bytes, host: str, enough: int | None, limit_s: float) -> bool:
        """As a newcomer whose rank is announced, reached by others at ``host``: whether it is a member in time."""

    def await_newcomers(self, step: int) -> None:
        """With nothing under way, about to begin this step: wait for newcomers that count from it.

        Returns once they have come, or it is agreed that they do not.
        """

    def begin_step(self, step: int) -> None:
        """Say that the program begins this step, from 1, or deals samples for it: who is chosen later counts later.

        Waits while members agree.
        """

    def all_gather(self, what: str, blob: bytes) -> list[bytes]:
        """Every worker's blob, by rank. All workers call it in the same order; ``what`` is for messages."""

    def open_book(self, name: str, layers: list[str], tensors: Sequence[_Tensor], roles: Roles | None = None) -> int:
        """Open a book and return its number; every rank must open the same books in the same order.

        ``tensors`` are (name, index into ``layers``, dtype, elements) or, with a scheme, (name, index, dtype, elements,
        scheme). A dtype is f32, f64, f16, bf16, i64, i32, i16, i8, u8 or bytes. Without a scheme it is "store";
        docs/summation.md says how the others add. With "gather" every rank's bytes, at most so many, go to every other
        rank (`submit_gather`); its dtype is bytes.

        A sixth entry is the wire type: f32 in the store may travel as f16 or bf16, and is summed in f32 all the same.
        A seventh is the rank that owns the tensor. In the store it owns all slices; without it they are dealt. Of a
        gather it alone gets the contributions; to others they are empty.

        Until `set_priorities`, a layer's place in the forward pass is its index.

        Without ``roles`` the book is for all workers alike. Tensors that are not the store's are for those who
        contribute.
        """

    @property
    def books(self) -> int:
        """How many books are open: the number of the next one."""

    def fingerprint(self, book: int) -> int:
        """64 bits of all that owners and slices of a book follow from, its roles included; the same on every rank."""

    def set_priorities(self, book: int, places: list[int]) -> None:
        """Set each layer's place in the forward pass, from 0. What is queued already keeps its place."""

    def submit(self, book: int, tensor: int, ptr: int, nbytes: int, op: _Op, step: int, more: bool = False) -> int:
        """Contribute the tensor at ``ptr`` to its next round; the result is written to the same memory.

        With ``more``, a small tensor may be held back until others have come, or `phase`, `landed` or `wait` is called.

        Returns a token. The memory must stay allocated until `landed` gives the token back, must not be touched
        before the result is in (`wait`), and must not be changed before it is released.
        """

    def submit_together(self, book: int, tensors: list[tuple[int, int, int]], op: _Op, step: int) -> list[int]:
        """As `submit`, with ``more``, for several tensors: each with its address and its length in bytes.

        Returns their tokens. If one of them is wrong none is submitted.
        """

    def submit_absent(
        self, book: int, tensor: int, ptr: int, nbytes: int, op: _Op, step: int, more: bool = False
    ) -> int:
        """Contribute nothing; the memory (which may be uninitialised) receives the result, as in `submit`."""

    def submit_gather(self, book: int, tensor: int, ptr: int, nbytes: int, step: int, more: bool = False) -> int:
        """Contribute these bytes, which may be none, to a tensor's next gather; what came of the last one is dropped.

        Returns a token, as `submit` does; the memory must not be changed before it is released.
        """

    def gathered(self, book: int, tensor: int) -> list[int | None]:
        """By rank the length of its contribution to the last gather, which must be complete (`wait`).

        ``None`` for ranks that took no part, because they had left.
        """

    def read_gathered(self, book: int, tensor: int, rank: int, offset: int, ptr: int, nbytes: int) -> None:
        """Copy a range of another rank's contribution to the last gather to the memory at ``ptr``."""

    def drop_gathered(self, book: int, tensor: int) -> None:
        """Let go of the contributions to the last gather, which must be complete."""

    def wait(self, book: int, tensors: list[int], released: bool = False) -> None:
        """Wait until the results of the last submissions are in memory; ``released``: until it may be changed, too."""

    def landed(
        self,
        book: int,
        tensors: list[int],
        least: list[int] | None = None,
        patience_s: float = 0.0,
        needed: bool = False,
    ) -> tuple[list[int], list[int], list[int]]:
        """What has come back: of these tensors' last submissions, and whose memory is free again.

        Does not block, unless ``least`` is given: for each tensor a number of leading bytes. Then it waits, at most
        ``patience_s``, until any of them is complete or so much of it in memory, or the job has failed.

        ``needed``: the program cannot go on without these. Then a failure of the job is raised, with the layer and the
        step of the first that is not complete; what is held back is sent; and a wait counts as a stall of the first
        tensor's layer. Otherwise a failure is left to the calls that raise it.

        Returns those of ``tensors`` whose round is complete; for each of them how many leading bytes of its result
        are in memory, all if it is complete, and none if it is and no rank contributed; and the tokens whose memory
        will never be touched again, since the last call with whatever arguments. `penstock.lending` takes these in:
        nobody else calls this.
        """

    def proceed(
        self, book: int, step: int, optimizers: list[Optimizer], groups: list[int], factor: float, in_advance: bool
    ) -> None:
        """Say that this rank's program has come to the end of a step: what it owns is updated, and all get it.

        For a book with the fold ``updated``; all its tensors must be submitted for this step. ``groups`` says by tensor
        which of the ``optimizers`` it is updated by; gradients are multiplied by ``factor`` before. Said once per step.
        ``in_advance``: nothing of the step need be submitted yet, and all of the step before must be through.
        """

    def order(self, book: int, optimizers: list[Optimizer], groups: list[int], factor: float) -> None:
        """Update what this rank owns of a book so whenever a round is complete, from now on and without a word.

        All that contribute and own something say it at the same point, once what they submitted is complete.
        """

    def versions(self, book: int, tensor: int) -> list[int]:
        """Where each contribution is a round of its own: by slice, how often what came last has been changed."""

    def late(self, book: int) -> list[tuple[int, int]]:
        """Ranks, and how many of their contributions to slices that this rank owns came too late for their round."""

    def discard(self, book: int, step: int) -> None:
        """As `proceed`, but the step is not made: the rounds end as if nobody had contributed (`landed`).

        What is then in the memory that was submitted is the sum where this rank owns it, and else what it was.
        """

    def squares(self, book: int, step: int) -> float:
        """Wait for all contributions to what this rank owns; the sum of the squares of what they come to.

        Before `proceed`. Slice by slice, in fp64: the same in every run.
        """

    def load(self, book: int, tensor: int, state: int | None, updates: int, ptr: int, nbytes: int) -> None:
        """Take what this rank owns and updates of a tensor from memory with all of it.

        First its value (None), with the number of ``updates`` that it has had, and then, if there were any, the states
        of its optimizer in their order. Between steps.
        """

    def lend(self, book: int, tensor: int, updates: int | None, ptr: int, nbytes: int) -> bool:
        """As `load` of a value, but the memory is read in place at each update: it stays, and gets every answer.

        Says whether it is so; of tensors that are rounded on the wire a value is kept as ever. Without a number of
        updates it is so already, and the memory alone is another.
        """

    def save(self, book: int, tensor: int, state: int | None, ptr: int, nbytes: int) -> int | None:
        """Copy what this rank owns and updates of a tensor to its places in memory for all of it.

        Says how often it was updated; None if this rank keeps no such thing. Between steps.
        """

    def leave(self) -> None:
        """Contribute no more; returns when every rank has left, and then all take part again.

        Raises `Timeout` when data has moved at no rank for the operation timeout.
        """

    def sequence(self, book: int) -> list[int]:
        """How often each tensor was submitted."""

    def set_sequence(self, book: int, seqs: list[int]) -> None:
        """Set how often each tensor was submitted: after `leave`, the ranks agree on the largest."""

    def phase(self, name: _Phase) -> None:
        """Say what the program does now, for the accounts."""

    @property
    def observed(self) -> bool:
        """Whether observations are kept."""

    def observe(self, records: int) -> int:
        """From now on keep so many records per lane, and as many of the program; with 0 none.

        What was kept until now is gone, but with 0 `observations` gives it once more. Nothing is kept in a job of one
        rank. Returns how many slices had landed when the lanes began, or ended: two calls' difference is how many
        records of landing lie between.
        """

    def applied(self, book: int, tensors: list[int]) -> None:
        """Say that the last results of these tensors are applied. Nothing happens unless observations are kept."""

    def observations(self, *, in_order: bool = True) -> tuple[bytes, int]:
        """What was observed of slices since the last call, in the order of time, and how much more was lost.

        Not ``in_order`` they are as lanes have written them, one lane's after the other's, which takes a fraction of
        the time.

        ``numpy.frombuffer(observations()[0], numpy.dtype(RECORD))`` is an array of records: ``time_ns`` on the clock of
        `time.monotonic_ns`; ``point``, an index into `POINTS`; book, layer, slice, seq; ``peer``, -1 for none;
        ``payload_bytes`` of a frame, and its ``kind`` as on the wire (docs/protocol.md). As many of the last are kept
        as the engine was made for; older ones are lost. Also after `shutdown`.
        """

    def report(self) -> Report:
        """What was counted so far."""

    def abort(self, reason: str, culprit: int | None = None) -> None:
        """End the job for all as this rank, or ``culprit``, failed; returns when all are told, or after a second."""

    def check(self) -> None:
        """Raise what has ended the job, if anything has."""

    def quiet(self) -> None:
        """After a failure: return when nothing writes memory that was handed over any more."""

    @property
    def has_failed(self) -> bool:
        """Whether the job is over, because a rank has failed or is lost, or after a shutdown."""

    def shutdown_by_status(self, reason: str, lent: object = None) -> None:
        """As the process exits: shut down in order if its status is 0, otherwise tell the other ranks the reason.

        `lent` is never let go of: what keeps the memory that was handed over.
        """

    def shutdown(self) -> None:
        """Wait for what is in flight, say goodbye, wait a bounded time for the others, and close everything.

        After a failure it only closes, and raises the failure if no call has raised it yet. Again: does nothing.
        """

    def form_group(self, group: int, members: list[int]) -> None:
        """Form a group for calls, from 1 on; all members must form it with the same number and order of ranks."""

    def slicing(self, book: int | None = None) -> tuple[int, int, int]:
        """Largest slice of the store and of collectives in bytes, and how many lanes carry slices.

        Of a book that is open, or of the next exact one that is opened.
        """

    def placement(self, book: int) -> list[list[tuple[int, int, int, int]]]:
        """By tensor of a book, its slices: bytes from its start, bytes, owner, lane.

        Of a collective the owner is the rank that comes first in its plan. A gathered tensor has one slice, which says
        nothing but its lane.
        """

    def set_rates(self, rates: Rates) -> None:
        """Set what the choice of an algorithm assumes, from the next call on; see `best_scheme`.

        Also sets `slicing`, and how much the connections hold in the kernel.

        All ranks set the same rates between the same two calls: else they may choose differently, which is an error.
        """

    def allreduce_plan(
        self, elems: int, dtype: str, ranks: int, algorithm: _Algorithm | None = None, vectors: int = 1
    ) -> tuple[_Algorithm, int, bool]:
        """The algorithm of an allreduce of so many elements by so many ranks, and the slices that it is cut into.

        Without ``algorithm`` the one that is chosen under the present rates. For `allreduce_cost`.

        The third says whether the sum has the same bits wherever the tensor is cut into calls of their own, if each
        rank gives so many ``vectors``. If not, pieces must begin where the slices of the group's ranks begin anew.
        """

    def call(
        self,
        group: int,
        request: str,
        rank: int,
        tag: int,
        op: str,
        dtype: str,
        inputs: list[tuple[int, int]],
        outputs: list[tuple[int, int]],
        keep: object,
        algorithm: _Algorithm | None = None,
        epoch: int | None = None,
    ) -> Call:
        """Begin a message or collective: ``send``, ``recv``, ``recv_any``, ``allreduce`` and so on.

        ``algorithm`` is for ``allreduce``; without it the one that `allreduce_plan` gives for this length.

        ``rank`` is the other rank or the root, as an index in the group; ``inputs`` and ``outputs`` are addresses and
        lengths in bytes. ``keep`` is let go of when nobody touches the memory any more. With ``epoch`` it is made in no
        other one.
        """

    def take_done(self, patience_s: float) -> list[int]:
        """The ids of watched calls that are done since the last time; waits for one, up to ``patience_s``.

        Raises the job's failure: what is not done will never be.
        """

    def after_fork_in_child(self) -> None:
        """Let go of the parent's connections; for a child right after a fork."""

@final
class Call:
    """A message or collective under way."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the results are in memory and the memory is the program's again."""

    @property
    def id(self) -> int:
        """What `Engine.take_done` calls it."""

    @property
    def source(self) -> int | None:
        """Of a ``recv_any`` that is done: who has sent the message, as an index in the group."""

    def watch(self) -> None:
        """Let `Engine.take_done` tell when it is done, or that it is."""

    def done(self) -> bool:
        """Whether that is so; raises the job's failure if it will never be."""
