"""Common values of parameters whose outer gradients, and whose changes, travel in fewer bytes than they have.

Each rank owns a part of a fragment. In a round it sends every owner its outer gradient, as integers or rounded; an
owner adds them up in rank order, in single precision, and updates the *exact value* that it keeps by the outer
optimizer. All ranks then get the change of the common value, as the same type, and add it: so common values have the
same bits everywhere. Nothing is lost on either way (error feedback). What a rank has not sent of its outer gradient it
adds to the next one. What an owner has not sent of a change is what the exact value is ahead of the common one, and
the next change begins there.

The largest numbers alone go to all ranks, not to owners: what these would send back would be as long. Every rank then
updates all values itself: the exact ones are the common ones, in the same memory.

Where each group is one client, heads are the ranks of all this, and a head gives its group the common values; the
others contribute nothing and keep nothing. It omits servers apart: ranks own parts whatever there is of these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from penstock import collectives, job
from penstock.collectives import Group
from penstock.errors import ConfigError
from penstock.optimizers import NamedOptimizer, named
from penstock.torch.local.checking import agree, options_of
from penstock.torch.local.common_values import is_finite, put, take_options
from penstock.torch.local.encoding import decode, encode
from penstock.wire_types import TopK, WireType, part_elems

__all__ = ["ShortenedUpdates"]

CALLER = "DiLoCo"


class ShortenedUpdates:
    """What `OuterUpdates` is where outer gradients travel as they are.

    Args:
        fragments: By name the parameters of each, of fp32. All ranks make it alike.
        outer: The optimizer, whose options are read at each round.
        wire: The type.
        clients: Groups of ranks that have the same parameters; none: every rank is by itself.
    """

    def __init__(
        self,
        fragments: Sequence[Mapping[str, Tensor]],
        outer: Optimizer,
        wire: WireType | TopK,
        clients: Sequence[Sequence[int]] = (),
    ) -> None:
        self._running = job.current(CALLER)
        rank, everybody = self._running.rank, range(self._running.world_size)
        clients = clients or [[one] for one in everybody]
        self._everybody = collectives.new_group(everybody)
        across = collectives.new_group([client[0] for client in clients])
        size = len(clients)
        for number, client in enumerate(clients):
            inside = collectives.new_group(client)
            if rank in client:
                weight = len(client) * size / len(everybody)
                self._ways = _Ways(across if rank == client[0] else None, inside, number, weight)
        self._fragments = [_Fragment(one, self._ways, size, wire) for one in fragments if one]
        self._of = {name: fragment for fragment in self._fragments for name in fragment.places}
        self._outer = outer
        self._optimizer = named(CALLER, type(outer), self._present(), 1 / size)
        self._agree(self._optimizer)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="penstock-outer")
        self._round: Future[None] | None = None

    def _present(self) -> dict[str, Any]:
        return options_of(self._outer, self._outer.param_groups[0])

    def _agree(self, optimizer: NamedOptimizer) -> None:
        agree(self._running.engine, CALLER, [("the outer optimizer", optimizer.fields())], None)

    @torch.no_grad()
    def prepare(self, names: Sequence[str]) -> str | None:
        """Make this rank's contribution; returns the first tensor of which it is not finite.

        All ranks call it, in the same order. A scheduler may have changed options: then they meet first.
        """
        options = self._optimizer.changed(CALLER, **self._present())
        if options != self._optimizer:
            self._agree(options)
            self._optimizer = options
        self._outer._opt_called = True  # type: ignore[attr-defined]  # schedulers warn without it
        return self._of[names[0]].contribute() if names else None

    def send(self, names: Sequence[str], *, void: bool, factor: float = 1.0) -> None:
        """Let the round begin. All ranks do, in the same order.

        Args:
            names: Of `prepare`.
            void: Contribute nothing, and keep what was kept before: what is not finite must not reach those who sum.
            factor: By which the average grows, the same on all ranks: more than 1 where some are void.
        """
        if names:
            fragment = self._of[names[0]]
            if void:
                fragment.withdraw()
            self._round = self._thread.submit(fragment.meet, self._optimizer, factor)

    def wait(self) -> None:
        """Until the common values have changed.

        Raises:
            PeerLost: A rank was lost.
            Timeout: A rank did not come.
        """
        if self._round is not None:
            under_way, self._round = self._round, None
            under_way.result()  # every wait in it has the engine's limit

    @torch.no_grad()
    def land(self, names: Sequence[str], alpha: float) -> None:
        """Put the common values in place, but for this share of what is there."""
        for name in names:
            put(self._of[name].tensors[name], self._of[name].common_of(name), alpha)

    @torch.no_grad()
    def take(self) -> None:
        """Put the common values in place of all parameters."""
        for name, fragment in self._of.items():
            fragment.tensors[name].copy_(fragment.common_of(name))

    def open(self) -> None:
        """Nothing is left to be opened."""

    # What is saved

    def state_dict(self, names: Sequence[str]) -> dict[str, Any]:
        """As that of `OuterUpdates`, of the exact values; and the common ones. All ranks call it alike."""
        state: dict[str, Any] = {"values": {}, "at_ranks": {}, "updates": {}, "states": {}}
        for fragment in self._fragments:
            exact, *kept = map(fragment.gathered, fragment.parts(self._optimizer))
            for name in fragment.places:
                state["values"][name] = fragment.taken_out(name, exact)
                state["at_ranks"][name] = fragment.taken_out(name, fragment.common)
                state["updates"][name] = fragment.updates
                fields = zip(self._optimizer.states, kept, strict=False)
                state["states"][name] = {field: fragment.taken_out(name, whole) for field, whole in fields}
        return {**state, "optimizer": self._optimizer.fields(), "present": self._present()}

    def kept(self) -> dict[str, Tensor]:
        """By name what this rank has not sent yet."""
        return {name: fragment.taken_out(name, fragment.kept) for name, fragment in self._of.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take rank 0's. All ranks call it alike; there may be another number of them, and another wire type.

        Raises:
            ConfigError: It is of other parameters, or of another outer optimizer.
            ModelMismatch: Ranks' states are of different optimizers.
        """
        error: ConfigError | None = None
        given = state["optimizer"]
        if state["values"].keys() != self._of.keys() or given["name"] != self._optimizer.name:
            error = ConfigError(
                f"penstock.{CALLER}.load_state_dict: the state is of {len(state['values'])} parameters and "
                f"{given['name']}, this of {len(self._of)} and {self._optimizer.name}"
            )
        facts = () if error is not None else [("the outer optimizer", given), ("updates", state["updates"])]
        agree(self._running.engine, f"{CALLER}.load_state_dict", facts, error)
        self._optimizer = named(CALLER, given["name"], given["options"], self._optimizer.rescale)
        for fragment in self._fragments:
            fragment.load(state, self._optimizer, self._everybody)
        take_options(self._outer, state["present"])

    @torch.no_grad()
    def load_kept(self, kept: Mapping[str, Tensor]) -> None:
        """Take back what this rank has not sent, or begin with nothing where there is none of it."""
        for name, fragment in self._of.items():
            if name in kept:
                fragment.kept_of(name).copy_(kept[name])
            else:
                fragment.kept_of(name).zero_()


class _Ways(NamedTuple):
    """By which a rank takes part in rounds.

    Attributes:
        across: The heads of all clients, if this rank is one.
        inside: The ranks of its client, the head first.
        client: Its number.
        weight: Of this client in an average over clients.
    """

    across: Group | None
    inside: Group
    client: int
    weight: float

    def give(self, tensor: Tensor) -> None:
        """Let all of the client have the head's."""
        if self.inside.size > 1:
            self.inside.broadcast(tensor, root=self.inside.ranks[0])


class _Fragment:
    """Parameters that meet in one round, end to end, and with zeros at the end so that each rank owns as many.

    Attributes:
        tensors: By name, in order.
        places: By name where each begins in what follows.
        common: What all ranks have.
        kept: What this rank has not sent.
        wanted: From when a contribution is made until it is sent, what was kept and the outer gradient. Apart from what
            is kept, so that a contribution can be withdrawn.
        exact: Of this rank's part, or of all, the values that the outer optimizer has updated.
        states: What it keeps beside these; nothing before the first update.
        updates: How many there were.
    """

    def __init__(self, tensors: Mapping[str, Tensor], ways: _Ways, clients: int, wire: WireType | TopK) -> None:
        self._ways = ways
        self.tensors = dict(tensors)
        self.places: dict[str, int] = {}
        elems = 0
        for name, tensor in self.tensors.items():
            self.places[name] = elems
            elems += tensor.numel()
        self._wire = wire
        self._clients, owners = clients, 1 if wire.to_all else clients
        self._part = part_elems(elems, owners, wire.block)
        self._starts = range(0, self._part * owners, self._part)
        own = self._starts[ways.client % owners]
        self._own = slice(own, own + self._part)
        self.common = torch.zeros(self._part * owners, dtype=torch.float32, device="cpu")
        self.kept = torch.zeros_like(self.common)
        self.wanted: Tensor | None = None
        for name, tensor in self.tensors.items():
            self.common_of(name).copy_(tensor.detach())
        self.exact = self._own_part(self.common)
        self.states: list[Tensor] = []
        self.updates = 0

    def _own_part(self, whole: Tensor) -> Tensor:
        return whole[self._own] if self._wire.to_all else whole[self._own].clone()

    def _view(self, name: str, whole: Tensor) -> Tensor:
        tensor, start = self.tensors[name], self.places[name]
        return whole[start : start + tensor.numel()].view(tensor.shape)

    def common_of(self, name: str) -> Tensor:
        """One parameter's common value."""
        return self._view(name, self.common)

    def kept_of(self, name: str) -> Tensor:
        """What is kept of one parameter."""
        return self._view(name, self.kept)

    def taken_out(self, name: str, whole: Tensor) -> Tensor:
        """One parameter's, copied."""
        return self._view(name, whole).clone()

    def contribute(self) -> str | None:
        """Add outer gradients to what is kept; returns the first parameter of which that is not finite."""
        self.wanted = self.kept * self._wire.decay
        for name, tensor in self.tensors.items():
            gone = self.common_of(name) - tensor
            self._view(name, self.wanted).add_(gone, alpha=self._ways.weight)
        return next((name for name in self.tensors if not is_finite(self._view(name, self.wanted))), None)

    def withdraw(self) -> None:
        """Contribute nothing after all."""
        self.wanted = None

    # A round

    @torch.no_grad()
    def meet(self, optimizer: NamedOptimizer, factor: float) -> None:
        """Make a round with all clients: contributions to owners, changes back. Its own thread does."""
        if self._ways.across is None:
            self.wanted = None
            self.updates += 1
        else:
            self._meet_across(self._ways.across, optimizer, factor)
        self._ways.give(self.common)

    def _meet_across(self, group: Group, optimizer: NamedOptimizer, factor: float) -> None:
        wanted, self.wanted = self.wanted, None
        if wanted is None:  # nothing, and what is kept waits for the next round
            wanted = torch.zeros_like(self.kept)
        else:
            self.kept = wanted
        outgoing = [self._shortened(wanted[start : start + self._part]) for start in self._starts]
        incoming = [torch.empty_like(outgoing[0]) for _ in range(self._clients)]
        if self._wire.to_all:
            group.all_gather(outgoing[0], incoming)
        else:
            group.all_to_all(outgoing, incoming)
        total = self._read(incoming[0])
        for data in incoming[1:]:
            total.add_(self._read(data))
        self._update(total.mul_(optimizer.rescale * factor), optimizer)
        if self._wire.to_all:  # the exact value is the common one
            return
        change = encode(self._wire, self.exact - self.common[self._own])
        group.all_gather(change, incoming)
        for start, data in zip(self._starts, incoming, strict=True):
            self.common[start : start + self._part].add_(self._read(data))

    def _shortened(self, kept: Tensor) -> Tensor:
        """What is sent of these numbers; the rest stays in them."""
        data = encode(self._wire, kept)
        kept.sub_(self._read(data))
        return data

    def _read(self, data: Tensor) -> Tensor:
        return decode(self._wire, data, self._part)

    def _update(self, gradient: Tensor, optimizer: NamedOptimizer) -> None:
        twin = optimizer.twin()
        if not self.states:
            self.states = [torch.full_like(gradient, twin.initial) for _ in twin.states]
        self.updates += 1
        states = [state.data_ptr() for state in self.states]
        nbytes = gradient.numel() * gradient.element_size()
        twin.update("f32", self.updates, self.exact.data_ptr(), gradient.data_ptr(), states, nbytes)

    # What is saved

    def parts(self, optimizer: NamedOptimizer) -> list[Tensor]:
        """The exact values of this client's part, and what the optimizer keeps of it; only heads know them."""
        states = len(optimizer.states) if self.updates else 0
        return [self.exact, *(self.states or [torch.empty_like(self.exact) for _ in range(states)])]

    def gathered(self, part: Tensor) -> Tensor:
        """What owners have of all parts."""
        ways = self._ways
        whole = part if self._wire.to_all else torch.empty_like(self.common)
        if ways.across is not None and not self._wire.to_all:
            ways.across.all_gather(part, whole)
        ways.give(whole)
        return whole

    def load(self, state: Mapping[str, Any], optimizer: NamedOptimizer, group: Group) -> None:
        """Take what rank 0 has of a state; without common values in it, they are the exact ones."""
        whole = self._loaded(state["values"], group)
        self.exact = self._own_part(whole)
        self.common = whole if self._wire.to_all else self._loaded(state.get("at_ranks", state["values"]), group)
        self.updates = state["updates"][next(iter(self.places))]
        fields = optimizer.states if self.updates else []
        wholes = [self._loaded({name: state["states"][name][field] for name in self.places}, group) for field in fields]
        self.states = [self._own_part(one) for one in wholes]

    def _loaded(self, by_name: Mapping[str, Tensor], group: Group) -> Tensor:
        whole = torch.zeros_like(self.common)
        for name in self.places:
            self._view(name, whole).copy_(by_name[name])
        group.broadcast(whole)
        return whole
