"""Nobody may see a parameter before its update, or a gradient before its average.

While either is outstanding the parameter's class is `DeferredParameter`, whose ``__torch_function__`` is called by
every torch operation and attribute that is given it, from wherever: another module, a list kept by the user, an
optimizer of someone else. It brings in what is needed and only then lets the operation through. An idle parameter is a
plain `torch.nn.Parameter` and costs nothing.

What does not pass through the parameter object is invisible to that: tensors made earlier that share its memory, such
as ``p.data``, a numpy array, C++ code, or what a custom ``autograd.Function`` is given. `Watch` finds such reads in the
forward passes before the first step, those of a custom function in the graph that autograd makes. From then on the
innermost module that was running waits before its forward; what is read outside any submodule is updated *at the
start* of the next forward. Aliases that no forward has read are found by the number of those that hold a parameter's
memory at the end of the first step: such a parameter is updated before ``step`` returns. Aliases that are made later
and read outside of forward passes are not found: call ``penstock.synchronize`` before reading through them.

Where owners have the values, they must hear of what the program writes, too. A parameter's version counter tells of it,
also through what ``detach()`` gives; but torch gives each ``.data`` a counter of its own. So there an idle parameter is
a `WatchedParameter`, whose ``.data`` are all of one counter (`DataAliases`). To torch's operations it is a plain one.
"""

from __future__ import annotations

import bisect
import contextlib
import gc
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from penstock.torch.model.data_aliases import DATA_GETTER, DATA_SETTER, DataAliases, data_of
from penstock.torch.model.enrolment import check_forward
from penstock.torch.model.layers import DistributedModel, Layer, Slot
from penstock.torch.model.pre_hooks import register_first
from penstock.warning import warn

if TYPE_CHECKING:
    from penstock._native import Engine

__all__ = [
    "PARAMETER_TYPES",
    "DeferredParameter",
    "Watch",
    "claim",
    "compiled_outside",
    "defer",
    "distributed_in",
    "forget_numbers",
    "next_number",
    "note_compiled",
    "restore",
    "slot_of",
    "unclaim",
    "unwatch_data",
    "watch_data",
]

ANY_MODEL = -1  # where dynamo cannot tell which model a parameter belongs to

_distributed: weakref.WeakValueDictionary[int, DistributedModel] = weakref.WeakValueDictionary()
_numbers: dict[int, tuple[Engine, Iterator[int]]] = {}  # of the next model; holding the engine keeps its id unique
# By id of the parameter. A slot holds its parameter, so an id stays unique while its slot is here. A plain dictionary:
# every parameter of every step is looked up here, and a WeakValueDictionary is Python code.
_slots: dict[int, weakref.ref[Slot]] = {}

_users: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
_nodes_made: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]

_TENSOR: Any = Tensor  # its attributes are descriptors, which torch's stubs hide
_GRAD_GETTERS = frozenset({_TENSOR.grad.__get__, _TENSOR._grad.__get__})
_GRAD_SETTERS = frozenset({_TENSOR.grad.__set__, _TENSOR.grad.__delete__, _TENSOR._grad.__set__})
_METADATA_ATTRIBUTES = """
    shape dtype device layout requires_grad is_leaf grad_fn ndim names is_cuda is_cpu is_sparse is_meta is_mkldnn
    is_nested is_quantized retains_grad output_nr _version _backward_hooks _base name itemsize nbytes
"""
_METADATA_METHODS = """
    size dim ndimension numel nelement stride storage_offset element_size is_floating_point is_complex is_contiguous
    get_device __len__ __hash__ _is_view register_hook register_post_accumulate_grad_hook requires_grad_
"""
# What neither reads nor writes values.
_METADATA = frozenset(
    [
        *(attribute.__get__ for name in _METADATA_ATTRIBUTES.split() if (attribute := getattr(_TENSOR, name, None))),
        *(getattr(_TENSOR, name) for name in _METADATA_METHODS.split()),
        _TENSOR.requires_grad.__set__,
        _TENSOR._backward_hooks.__set__,
    ]
)


class _PutOn(nn.Parameter):
    """What a parameter is for a time. Never made, only put on and taken off."""

    def __new__(cls, data: Tensor | None = None, requires_grad: bool = True) -> nn.Parameter:  # type: ignore[misc]
        """A plain parameter: code that copies by ``type(p)(data)``, such as deepcopy, gets what it means."""
        return nn.Parameter(requires_grad=requires_grad) if data is None else nn.Parameter(data, requires_grad)


class DeferredParameter(_PutOn):
    """What a parameter is while its gradient or its update is outstanding."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Bring in what `func` is about to see, then call it as if the parameter were a plain one."""
        if torch.compiler.is_compiling():
            note_compiled(ANY_MODEL)
        elif func in _GRAD_SETTERS:
            slot = slot_of(args[0])
            if slot is not None:
                slot.flight.leave_to_caller()
                if slot.pending.by is not None:
                    slot.pending.by.zero_after(slot, False)
                if slot.gather is not None and slot.gather.holds(slot):
                    slot.gather.drop(slot)
        elif func not in _METADATA:
            reads_grad = func in _GRAD_GETTERS
            used = [_settle(param, reads_grad=reads_grad) for param in _deferred_in((args, kwargs))]
            watched = [] if reads_grad else [slot for slot in used if slot is not None and slot.reads.watched]
            if func == DATA_GETTER:
                func = _data_for_program
            if watched:
                return _observed_call(watched, func, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


# Torch's optimizers, which update them, take many in one call, where a device gains by it, only of classes listed here.
getattr(torch_optimizer, "_foreach_supported_types", []).append(DeferredParameter)


class WatchedParameter(_PutOn):
    """What an idle parameter is where it must be known what the program writes into it."""

    @property
    def data(self) -> Tensor:
        """As `torch.Tensor.data`."""
        return _data_for_program(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        DATA_SETTER(self, value)


PARAMETER_TYPES = (nn.Parameter, DeferredParameter, WatchedParameter)
"""What a parameter may be that is a plain one to the program."""


def _data_for_program(param: Tensor) -> Tensor:
    slot = slot_of(param)
    return data_of(param) if slot is None or slot.reads.aliases is None else slot.reads.aliases.make()


def watch_data(slot: Slot) -> None:
    """From now on what the program writes through ``.data`` of this parameter is counted."""
    if slot.swappable:
        slot.reads.aliases = DataAliases(slot.param)
        slot.reads.idle = WatchedParameter
        if not slot.is_busy:
            restore(slot)


def unwatch_data(slot: Slot) -> None:
    """No more is counted: it is a plain parameter whenever it is idle."""
    slot.reads.idle = nn.Parameter
    if not slot.is_busy:
        restore(slot)


def _deferred_in(value: Any) -> Iterable[DeferredParameter]:
    if isinstance(value, DeferredParameter):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _deferred_in(item)
    elif isinstance(value, dict):
        yield from _deferred_in(list(value.values()))


def _settle(param: nn.Parameter, *, reads_grad: bool) -> Slot | None:
    slot = slot_of(param)
    distributed = None if slot is None else slot.distributed
    if slot is None or distributed is None:
        param.__class__ = nn.Parameter  # its model is gone
        return None
    if (update := slot.pending.by) is not None:  # another thread may end it meanwhile
        update.finish([slot.layer])
    elif reads_grad and slot.flight.flying:
        distributed.finish_gradient(slot)
    if reads_grad and slot.gather is not None and slot.gather.holds(slot):
        slot.gather.fold()
    return slot


def _observed_call(
    slots: Sequence[Slot], func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    with contextlib.ExitStack() as stack:
        outside = [slot for slot in slots if slot.distributed and stack.enter_context(slot.distributed.reading(slot))]
        stack.enter_context(torch._C.DisableTorchFunctionSubclass())
        result = func(*args, **kwargs)
        if outside and any(tensor.requires_grad for tensor in _tensors_in(result)):
            for slot in outside:
                slot.reads.elsewhere = True
        return result


def claim(distributed: DistributedModel, slots: Sequence[Slot]) -> None:
    """Register the parameters of a distributed model, so that they can be found from a bare parameter."""
    _distributed[distributed.key] = distributed
    for slot in slots:
        _slots[id(slot.param)] = weakref.ref(slot, _forget(id(slot.param)))
        slot.distributed = distributed


def unclaim(distributed: DistributedModel, slots: Sequence[Slot]) -> None:
    """The model is not distributed any more: its parameters are plain ones."""
    _distributed.pop(distributed.key, None)
    for slot in slots:
        reference = _slots.get(id(slot.param))
        if reference is not None and reference() is slot:
            del _slots[id(slot.param)]
        slot.distributed = None


def next_number(engine: Engine) -> int:
    """How many models have been distributed in this job: the same on all ranks, whoever is still alive on which."""
    return next(_numbers.setdefault(id(engine), (engine, itertools.count()))[1])


def forget_numbers(engine: Engine) -> None:
    """The job is over."""
    _numbers.pop(id(engine), None)


def distributed_in(engine: Engine) -> list[DistributedModel]:
    """The distributed models of this engine, in the order of `distribute`."""
    # Taken at once: another thread may be distributing a model of its own job.
    alive = [distributed for reference in _distributed.valuerefs() if (distributed := reference()) is not None]
    return sorted(
        (distributed for distributed in alive if distributed.engine is engine), key=lambda distributed: distributed.key
    )


def _forget(key: int) -> Callable[[object], None]:
    def gone(reference: object) -> None:
        if _slots.get(key) is reference:  # the id may be another parameter's by now
            del _slots[key]

    return gone


def slot_of(param: object) -> Slot | None:
    """The slot of a parameter of a distributed model."""
    reference = _slots.get(id(param))
    return None if reference is None else reference()


def distributed_of(param: object) -> DistributedModel | None:
    """The distributed model that a parameter belongs to."""
    slot = slot_of(param)
    return None if slot is None else slot.distributed


def defer(slot: Slot) -> None:
    """From now on whoever uses this parameter waits for what is outstanding."""
    if slot.swappable:
        slot.param.__class__ = DeferredParameter


def restore(slot: Slot) -> None:
    """Nothing is outstanding any more, unless rows are held that ``.grad`` does not show."""
    if slot.swappable and (slot.gather is None or not slot.gather.holds(slot)):
        slot.param.__class__ = slot.reads.idle


# Compiled code


def _noted_compiled(key: int) -> bool:
    """Called by dynamo while it traces a forward hook; the result becomes a constant of the compiled code.

    Compiled code contains no hook, so nothing in it would wait. From now on this model's `step` waits for all averages.
    """
    for distributed in [one() for one in _distributed.valuerefs()] if key == ANY_MODEL else [_distributed.get(key)]:
        if distributed is not None and distributed.is_live():
            distributed.be_synchronous("its forward pass is compiled")
    return True


# As torch.compiler.assume_constant_result does, which would import dynamo, taking a second, into every program.
_noted_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]
# torch 2.4 keeps the result in a global variable of the caller, by the name in the function's code. Not ours.
note_compiled = _noted_compiled


def compiled_outside(model: nn.Module) -> str | None:
    """Why hooks on this model would not be called in Python, if so."""
    for module in model.modules():
        if getattr(module, "_compiled_call_impl", None) is not None or type(module).__name__ == "OptimizedModule":
            return "its forward pass is compiled"
        if isinstance(module, torch.jit.ScriptModule):
            return "a module of it is scripted"
    return None


# Who reads what, before the first step


class Watch(TorchDispatchMode):
    """Observes all forward passes until the first step: the order of layers, and readers that no wait would precede.

    A parameter's memory is read *openly* while its own module runs, or within a call of torch that was given the
    parameter object; the same will wait in later steps. Any other reader holds an alias: the innermost submodule that
    is running becomes a `reader` of the layer, and waits for it in later steps; without one the next forward waits at
    its start.

    What a custom ``autograd.Function`` does with a parameter that it is given, a kernel of its own for instance, need
    not be seen at all. But it stands in the graph, with a number that tells when it was called: so who called it reads.
    """

    def __init__(
        self, model: nn.Module, layers: Sequence[Layer], slots: Sequence[Slot], own: dict[int, list[Slot]]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._slots = slots
        self._slot_of = {id(slot.param): slot for slot in slots}
        self._layers = layers
        self._own = own  # by id of the module
        self._running: list[nn.Module] = []
        self._entered = False
        self._active = True
        # Who ran from when on: how many nodes autograd had made by then, and all that ran, the innermost last.
        self._course: list[tuple[int, tuple[nn.Module, ...]]] = []
        self._outputs: list[Any] = []  # nodes of the graph
        self._forwards = 0
        self._first: dict[Layer, tuple[int, int]] = {}  # when it was read first: the forward, the place in its course
        self._seen: set[Slot] = set()
        self._noticed: set[tuple[Slot, nn.Module]] = set()  # with the innermost that ran
        self._open: Counter[Slot] = Counter()
        self._readers: dict[nn.Module, dict[Layer, None]] = {}
        self._hidden: set[Slot] = set()  # read through an alias in a forward
        self._by_storage: dict[int, list[Slot]] = {}
        self._handles: list[RemovableHandle] = []
        for module in model.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                self._handles.append(register_first(module, _marked(self._before)))
                self._handles.append(module.register_forward_hook(_marked(self._after), always_call=True))

    @property
    def is_in_forward(self) -> bool:
        """Whether a forward is under way."""
        return bool(self._running)

    def _before(self, module: nn.Module, args: object) -> None:
        if torch.compiler.is_compiling() or not self._active:
            return
        check_forward(module)
        if not self._running:
            self._begin()
        self._running.append(module)
        self._note_course()
        for slot in self._own.get(id(module), ()):
            self._enter_read(slot)

    def _after(self, module: nn.Module, args: object, output: object) -> None:
        if torch.compiler.is_compiling() or not self._running:
            return
        # An exception that is no Exception (Ctrl-C) skips these hooks on its way out.
        while self._running.pop() is not module and self._running:
            pass
        for slot in self._own.get(id(module), ()):
            self._open[slot] -= 1
        with torch._C.DisableTorchFunctionSubclass():
            self._outputs += [tensor.grad_fn for tensor in _tensors_in(output) if tensor.grad_fn is not None]
        if self._running:
            self._note_course()
        else:
            self._end()

    def _begin(self) -> None:
        self._open.clear()
        self._by_storage.clear()
        self._forget_course()
        self._forwards += 1
        for slot in self._slots:
            self._by_storage.setdefault(slot.param.untyped_storage().data_ptr(), []).append(slot)
            slot.reads.watched = True
            defer(slot)
        self._entered = True
        self.__enter__()  # type: ignore[no-untyped-call]

    def _end(self) -> None:
        if self._entered:
            self._entered = False
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._note_given()
        self._forget_course()
        self._unwatch()

    def _note_course(self) -> None:
        self._course.append((_nodes_made(), tuple(self._running)))

    def _forget_course(self) -> None:
        self._course.clear()
        self._outputs.clear()  # or the graph would live as long as this
        self._noticed.clear()

    def _note_given(self) -> None:
        """Look through the graph of this forward for custom functions that were given parameters."""
        began = [made for made, _ in self._course]
        passed: set[Any] = set()
        nodes = self._outputs[:]
        while nodes:
            node = nodes.pop()
            if node in passed or _is_leaf(node) or node._sequence_nr() < began[0]:
                continue  # the last: of what was before this forward
            passed.add(node)
            below = [other for other, _ in node.next_functions if other is not None]
            nodes += below
            if isinstance(node, torch.autograd.function.BackwardCFunction):
                place = bisect.bisect_right(began, node._sequence_nr()) - 1
                for given in filter(_is_leaf, below):
                    if (slot := self._slot_of.get(id(given.variable))) is not None:
                        self._note_given_to(slot, place)

    def _note_given_to(self, slot: Slot, place: int) -> None:
        running = self._course[place][1]
        waits = any(slot in self._own.get(id(module), ()) for module in running)
        if not waits and (slot, running[-1]) not in self._noticed:
            self._note_hidden_read(slot, running, place)

    def _unwatch(self) -> None:
        for slot in self._slots:
            slot.reads.watched = False
            if not slot.is_busy:
                restore(slot)

    @contextlib.contextmanager
    def reading(self, slot: Slot) -> Iterator[bool]:
        """The duration of a call that was given the parameter object: the same call would wait in later steps.

        Yields:
            Whether the parameter's own module is not running.
        """
        outside = self._open[slot] <= 0
        self._enter_read(slot)
        try:
            yield outside
        finally:
            self._open[slot] -= 1

    def _enter_read(self, slot: Slot) -> None:
        self._open[slot] += 1
        self._note_read(slot, self._running, len(self._course) - 1)

    def _note_hidden_read(self, slot: Slot, running: Sequence[nn.Module], place: int) -> None:
        """Nothing in later steps would tell of this read but the module that was running."""
        self._hidden.add(slot)
        if len(running) <= 1:  # the root, whose forward is the next forward
            slot.reads.at_start = True
            return
        self._readers.setdefault(running[-1], {})[slot.layer] = None
        self._note_read(slot, running, place)

    def _note_read(self, slot: Slot, running: Sequence[nn.Module], place: int) -> None:
        self._seen.add(slot)
        self._noticed.add((slot, running[-1]))
        when = (self._forwards, place)
        self._first[slot.layer] = min(when, self._first.get(slot.layer, when))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Find parameters among the operands by their memory."""
        if self._active:
            for tensor in _tensors_in((args, kwargs)):
                if type(tensor) in (Tensor, *PARAMETER_TYPES) and tensor.layout is torch.strided:
                    for slot in self._by_storage.get(tensor.untyped_storage().data_ptr(), ()):
                        if self._open[slot] <= 0:
                            self._note_hidden_read(slot, self._running, len(self._course) - 1)
        return func(*args, **(kwargs or {}))

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Tells dynamo that compiled functions within the forward may run as usual: this mode only looks."""
        return True

    def stop(self) -> None:
        """End the observation: the model turns out to be compiled. Hooks stay, because dynamo may be tracing them."""
        self._active = False
        self._unwatch()

    def remove(self) -> None:
        """End the observation at the first step."""
        self.stop()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def readers(self) -> dict[nn.Module, list[Layer]]:
        """By module, the layers that were read while it was the innermost that ran, where nothing else would wait."""
        return {module: list(layers) for module, layers in self._readers.items()}

    def update_held_at_once(self, rank: int) -> None:
        """Let nothing be outstanding after `step` of what somebody else can read, who has read it in no forward."""
        held = self._held()
        if held:
            gc.collect()  # what is left of an earlier job holds nothing
            held = self._held()
        for slot in held:
            slot.reads.held = True
        if held:
            more = f" and {len(held) - 1} more" if len(held) > 1 else ""
            warn(
                f"penstock: something else holds the memory of {held[0].name}{more}: what detach() or .data gave, a "
                "NumPy array, a graph that is kept. It may be read at any time, so step() waits for its average. To "
                "let that come in during the next forward, make such tensors anew where they are read",
                rank=rank,
            )

    def _held(self) -> list[Slot]:
        candidates = (slot for slot in self._slots if slot.elems and not slot.immediate and slot not in self._hidden)
        return [slot for slot in candidates if _holders(slot) > 1]

    def decide(self) -> list[int]:
        """Mark what nobody was seen to read as due at the start, and return each layer's place in the forward pass."""
        for slot in self._slots:
            # Nobody knows when it will be read, so it counts as needed first.
            slot.reads.at_start = slot.reads.at_start or slot not in self._seen
        first = {slot.layer.index for slot in self._slots if slot.reads.at_start and not slot.immediate}
        order = sorted(self._first, key=lambda layer: self._first[layer])
        places = {layer.index: place for place, layer in enumerate(order)}
        for layer in self._layers:
            layer.place = 0 if layer.index in first else places.get(layer.index, len(places))
        return [layer.place for layer in self._layers]


def _tensors_in(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors_in(item)
    elif isinstance(value, dict):
        yield from _tensors_in(list(value.values()))


def _holders(slot: Slot) -> int:
    """How many tensors have this memory: views, what ``.data`` gives, what a graph keeps, also behind NumPy arrays."""
    storage = slot.param.untyped_storage()
    if _users is None:
        return 1
    aliases = slot.reads.aliases
    kept = aliases is not None and aliases.kept is not None
    return int(_users(storage._cdata)) - (2 if kept else 1)  # the object that stands for the storage is one


def _is_leaf(node: Any) -> bool:
    """Whether a node of the graph stands for a parameter, or another tensor that nothing has made."""
    return type(node).__name__ == "AccumulateGrad"


def _marked(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that patches.strip recognises as ours. A plain function, because dynamo inlines those."""

    def penstock_hook(*arguments: Any) -> Any:
        return hook(*arguments)

    penstock_hook._penstock = True  # type: ignore[attr-defined]
    return penstock_hook
