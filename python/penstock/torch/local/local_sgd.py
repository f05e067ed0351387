"""`penstock.LocalSGD`."""

from __future__ import annotations

from typing import Any

from torch import nn

from penstock.torch.local.local_steps import LocalSteps
from penstock.torch.local.schedule import Schedule

__all__ = ["LocalSGD"]


class LocalSGD(LocalSteps):
    """Train on every rank by itself, and average parameters over all ranks every so many steps.

    *Not the same result as synchronous training*: ranks move apart between two averages, the more the larger ``every``
    is. In return the network carries a model once in ``every`` steps, instead of a gradient in each. Stich, Local SGD
    Converges Fast and Communicates Little (2019, arXiv 1805.09767), algorithm 1.

    It is used in the place of the optimizer. At the start all ranks get rank 0's parameters and buffers. What the
    optimizer keeps stays each rank's own. Of buffers the statistics of batch norm are averaged with the parameters; all
    others stay each rank's own.

    Args:
        model: What is trained, in main memory, trainable parameters in fp32 or fp64. Not given to `distribute`.
        optimizer: Its optimizer.
        every: Steps from one average to the next.
        inside: ``"gradients"``: each group of the job (`init`, option ``groups``) is one client, as is a site with fast
            links inside. Its ranks average their gradients in each step, and only groups meet after ``every`` steps,
            each weighed by its number of ranks. ``None``: every rank is by itself.
        not_finite: What becomes of a round in which a parameter of a rank is NaN or infinite; nothing of it reaches
            other ranks. ``"raise"``: all ranks raise. ``"skip"``: its client is left out of that round, once. The mean
            is over the others; it takes that, and its optimizer begins anew: with the options that it has, and the
            state that it had when it was given, empty as a rule, since momenta have what is not finite, too. A warning
            names rank and parameter on all ranks. If it is not finite in the next round either, or no rank is, all
            raise. Before ranks contribute they tell each
            other, so a round takes one more way through the network.

    Raises:
        ConfigError: Before `init`, or one of these cannot be. On all ranks.
        ModelMismatch: Ranks differ in ``every`` or the model, and in what.

    Example:
        >>> optimizer = ps.LocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.1), every=16)
        >>> for x, y in loader:
        ...     loss_of(model(x), y).backward()
        ...     optimizer.step()                       # each 16th averages
        ...     optimizer.zero_grad()
        >>> optimizer.synchronize()                    # the same parameters on all ranks
    """

    _every = "every"

    def __init__(
        self, model: nn.Module, optimizer: Any, every: int, inside: str | None = None, not_finite: str = "raise"
    ) -> None:
        super().__init__(model, optimizer, Schedule(every), inside=inside, not_finite=not_finite)
