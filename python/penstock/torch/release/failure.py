"""What becomes of all distributed models when their job is over: after a failure, and at the end.

When a rank is lost, the program gets the error from whatever it waits in, once. If that is a model or an optimizer,
nothing writes its memory any more by then, and all of it can be read: with ``whole_steps`` of `penstock.Options` the
last whole step, otherwise the layers as they are, and the error says which of them have the update of the step that
never became whole. Gradients that were on their way read as ``None``. Only what needs the other ranks raises again,
until `penstock.shutdown`.

After that, whatever the job's end was, models and optimizers are the program's own again, without anything of ours on
them: they can be trained on alone, or distributed in a new job.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.checkpointing import name_last
from penstock.errors import PenstockError
from penstock.torch.reads.safety import distributed_in, forget_numbers
from penstock.torch.updates.whole import forget_steps, undo_steps

if TYPE_CHECKING:
    from penstock._native import Engine

__all__ = ["after_failure", "let_go", "tells_what_is_whole"]

CallT = TypeVar("CallT", bound=Callable[..., Any])
LAYERS_NAMED_MAX = 8


def tells_what_is_whole(method: CallT) -> CallT:
    """For methods of what has an `engine`: where the job has failed, put models away, and say what is whole."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except PenstockError as error:
            after_failure(self.engine, error)
            raise

    return call  # type: ignore[return-value]


def after_failure(engine: Engine, error: PenstockError) -> None:
    """If the job has failed: make all that its models hold readable, and let the error say what that is.

    Args:
        engine: Of the job.
        error: That is on its way to the program.
    """
    if not engine.has_failed:
        return  # a mistake that harms nobody else
    models = distributed_in(engine)
    if any(distributed.ending.lost is None for distributed in models):
        engine.quiet()
        for distributed in models:
            distributed.ending.stop_work()
        undone = undo_steps(engine)
        for distributed in models:
            distributed.ending.put_away(undone)
        text = _said(
            [(distributed.name, distributed.ending.whole_step, distributed.ending.torn) for distributed in models]
        )
        for distributed in models:
            distributed.ending.lost = (error, text)
    lost = next((distributed.ending.lost for distributed in models if distributed.ending.lost is not None), None)
    if lost is None or error.whole_step is not None:
        return
    error.message = f"{error.message}. {lost[1]}"
    error.args = (error.message,)
    name_last(engine, error)
    error.whole_step, error.torn = models[0].ending.whole_step, models[0].ending.torn


def _said(found: list[tuple[str, int, tuple[str, ...]]]) -> str:
    texts = []
    for name, step, torn in found:
        of_model = f" of {name}" if len(found) > 1 else ""
        whole = f"those after step {step}, the last whole one" if step >= 0 else "those before the first step"
        if not torn:
            texts.append(f"Parameters and optimizer state{of_model} are {whole}")
            continue
        shown = ", ".join(torn[:LAYERS_NAMED_MAX]) + (", ..." if len(torn) > LAYERS_NAMED_MAX else "")
        texts.append(
            f"Parameters and optimizer state{of_model} are {whole}, but for layers that have all or part of the update "
            f"of step {step + 1} already, {len(torn)} of them: {shown}. penstock.init(whole_steps=True) keeps what is "
            "needed to give back whole steps"
        )
    return ". ".join(texts)


def let_go(engine: Engine) -> None:
    """The job is over, and its engine is shut down: nothing of it stays on models and optimizers."""
    models = distributed_in(engine)
    for distributed in models:
        distributed.ending.stop_work()
    undone = undo_steps(engine)
    for distributed in models:
        distributed.ending.put_away(undone)
        distributed.ending.release()
    forget_steps(engine)
    forget_numbers(engine)
