"""`penstock.DiLoCo`."""

from __future__ import annotations

from typing import Any

from torch import nn

from penstock.torch.local.local_steps import LocalSteps
from penstock.torch.local.schedule import Schedule
from penstock.wire_types import TopK

__all__ = ["DiLoCo"]


class DiLoCo(LocalSteps):
    """Train on every rank by itself, and let an outer optimizer take what all have trained, every so many steps.

    *Not the same result as synchronous training*, and the loss after as many samples grows with the number of ranks and
    with ``sync_every``. In return the network carries a model once in ``sync_every`` steps, instead of a gradient in
    each.

    A round: every rank's *outer gradient* is the common parameter, as the last round left it, minus its own. Whoever
    owns a slice, a worker or a server apart, averages these and updates the common parameter by the outer optimizer,
    whose state is sharded so. Every rank goes on from the result. Douillard et al. 2023 (arXiv 2311.08105, algorithm
    1); with fragments and a delay Streaming DiLoCo (2025, arXiv 2501.18512, algorithm 2), by the names that torchft
    has.

    It is used in the place of the inner optimizer. At the start all ranks get rank 0's parameters and buffers. What the
    inner optimizer keeps stays each rank's own. Of buffers the statistics of batch norm are averaged, with the fragment
    that their layer is in; all others stay each rank's own.

    Args:
        model: What is trained, in main memory, trainable parameters in fp32 or fp64. Not given to `distribute`.
        inner: The optimizer of the steps in between; AdamW as a rule.
        outer: Of one parameter group with all trainable parameters: SGD, Adam, AdamW, Adagrad or RMSprop of torch.optim
            and no subclass. It says class and options, read at each round, so it may have a scheduler; the owners have
            its twin, and its own state stays empty.
        sync_every: Steps from one round of a parameter to its next.
        fragments: Into how many runs of layers, of about the same bytes, the model is split. They meet in turn,
            ``sync_every / fragments`` steps apart, so less travels at a time.
        fragment_sync_delay: For how many steps training goes on while a fragment is under way; below ``sync_every /
            fragments``. With 0 the step waits for it.
        fragment_update_alpha: What a rank has after a round is ``(1 - alpha) * common + alpha * own``, where its own
            parameters have all steps of the delay. With 0 all ranks have the common ones.
        wire: The type in which outer gradients, and the changes that come back, travel: ``"fp32"`` (as they are),
            ``"bf16"``, or ``"int8"`` and ``"int4"``: integers with a scale for each 128. What a type cannot carry is
            kept and goes with the next round (error feedback): of outer gradients by each rank, of changes by owners.
            Those below fp32 are for parameters of fp32, and each worker owns a part then, also where there are servers
            apart. In a job of one process nothing travels, and nothing is rounded. `TopK`, or ``"top-k"``, sends the
            largest numbers alone (SparseLoCo).
        inside: ``"gradients"``: each group of the job (`init`, option ``groups``) is one client, as is a site with fast
            links inside. Its ranks average their gradients in each step, and only groups meet in rounds,
            each weighed by its number of ranks. ``None``: every rank is by itself.
        not_finite: What becomes of a round in which a parameter of a rank is NaN or infinite; nothing of it reaches
            other ranks. ``"raise"``: all ranks raise. ``"skip"``: its client is left out of that round, once. The mean
            is over the others; it takes the common values of the whole model, whatever ``fragment_update_alpha`` is,
            and its inner optimizer begins anew: with the options that it has, and the state that it had when it was
            given, empty as a rule, since momenta have what is not finite, too. A warning names rank and parameter on
            all ranks. If it is not finite in the next round either, or no rank is, all raise. Before ranks contribute
            they tell each other, so a round takes one more way through the network.

    Raises:
        ConfigError: Before `init`, or one of these cannot be. On all ranks.
        ModelMismatch: Ranks differ in options or the model, and in what.

    Example:
        >>> inner = torch.optim.AdamW(model.parameters(), lr=4e-4)
        >>> outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        >>> optimizer = ps.DiLoCo(model, inner, outer, sync_every=30)
        >>> for x, y in loader:
        ...     loss_of(model(x), y).backward()
        ...     optimizer.step()                       # each 30th meets the other ranks
        ...     optimizer.zero_grad()
        >>> optimizer.synchronize()                    # the same parameters on all ranks
    """

    _needs_outer = True

    def __init__(
        self,
        model: nn.Module,
        inner: Any,
        outer: Any,
        sync_every: int,
        fragments: int = 1,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float = 0.0,
        wire: str | TopK = "fp32",
        inside: str | None = None,
        not_finite: str = "raise",
    ) -> None:
        schedule = Schedule(sync_every, fragments, fragment_sync_delay, fragment_update_alpha)
        super().__init__(model, inner, schedule, outer, wire, inside, not_finite)
