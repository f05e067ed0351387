"""`penstock.ElasticAveraging`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from penstock import collectives, job
from penstock.errors import ConfigError
from penstock.torch.local.checking import GRADIENTS
from penstock.torch.local.common_values import Averages, Centre
from penstock.torch.local.local_steps import LocalSteps
from penstock.torch.local.schedule import Schedule

__all__ = ["ElasticAveraging"]

TOGETHER = 0.9
"""What all clients' shares come to, unless one is given: as in the paper on elastic averaging."""


class ElasticAveraging(LocalSteps):
    """Train on every rank by itself, drawn to a common centre every so many steps; no rank waits for another.

    *Not the same result as synchronous training*, and it depends on who is fast. In return the network carries a model
    once in ``every`` steps, instead of a gradient in each, and a slow rank holds nobody up.

    Whoever owns a slice, a worker or a server apart, keeps a *centre* of it. After every ``every`` steps a rank with
    the parameters x and the owner with the centre c, as it is then, go towards each other, in one exchange::

        c += alpha * (x - c)
        x -= alpha * (x - c)        # with the same c

    Zhang, Choromanska, LeCun, Deep learning with elastic averaging SGD (2015); MXNET-MPI (arXiv 1801.03855), equations
    2 and 3 and figure 8. In a job with groups each is one client: its ranks average their gradients in each step, so
    they have the same parameters and count once.

    It is used in the place of the optimizer. At the start all ranks and the centre get rank 0's parameters and buffers.
    What the optimizer keeps stays each rank's own. Of buffers the statistics of batch norm have a centre, too; all
    others stay each rank's own.

    Args:
        model: What is trained, in main memory, trainable parameters in fp32 or fp64. Not given to `distribute`.
        optimizer: Its optimizer.
        every: Steps of a rank from one exchange to its next; the first comes after so many.
        alpha: How far both go, as a share of what lies between them, from 0 to 1. 0.9 over the number of clients (of
            groups, or else of ranks) if it is not given.
        not_finite: What becomes of a rank of which a parameter is NaN or infinite when it is to meet the centre;
            nothing of it reaches that. ``"raise"``: it raises. ``"skip"``: it gives nothing, once, but takes the
            centre, and its optimizer begins anew: with the options that it has, and the state that it had when it was
            given, empty as a rule, since momenta have what is not finite, too. In a group all ranks do. A warning on
            them names rank and parameter; others do not hear of it, as they wait for nobody. If it is not finite
            the next time either, it raises.

    Attributes:
        alpha: As given, or chosen.

    Raises:
        ConfigError: Before `init`, or one of these cannot be. On all ranks.
        ModelMismatch: Ranks differ in ``every``, ``alpha`` or the model, and in what.

    Example:
        >>> optimizer = ps.ElasticAveraging(model, torch.optim.SGD(model.parameters(), lr=0.1), every=64)
        >>> for x, y in loader:
        ...     loss_of(model(x), y).backward()
        ...     optimizer.step()                       # each 64th is drawn to the centre
        ...     optimizer.zero_grad()
        >>> optimizer.synchronize()                    # the centre on all ranks
    """

    _every = "every"
    _together = False

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        every: int = 64,
        alpha: float | None = None,
        not_finite: str = "raise",
    ) -> None:
        running = job.current(self._caller)
        groups = running.groups
        self.alpha: Any = TOGETHER / (len(groups) or running.world_size) if alpha is None else alpha
        super().__init__(model, optimizer, Schedule(every), inside=GRADIENTS if groups else None, not_finite=not_finite)

    def _options(self) -> dict[str, Any]:
        alpha = self.alpha
        if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 <= alpha <= 1:
            raise ConfigError(f"penstock.{self._caller}: alpha={alpha!r}; it must be from 0 to 1")
        return {"alpha": float(alpha)}

    def _common_values(
        self, parameters: Mapping[str, Tensor], statistics: Mapping[str, Tensor], outer: Any
    ) -> tuple[Averages, Averages]:
        return Centre(parameters, float(self.alpha)), Centre(statistics, float(self.alpha))

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's step; after it, if it is time, an exchange with the centre.

        In a group all ranks make as many steps, and gradients are averaged before. Arguments and what it returns are
        those of the optimizer's step.

        Raises:
            ConfigError: In a group, a closure is given, or a gradient is sparse.
            PenstockError: A parameter of this rank is not finite; the message names it. Nothing of it has been given
                away. Other ranks hear of it when this one ends. With ``not_finite="skip"`` only if it was so at the
                exchange before, too.
            PeerLost: A rank was lost.
            Timeout: A rank of the group, or an owner, did not come.
        """
        return super().step(*args, **kwargs)

    def synchronize(self) -> None:
        """Let all ranks have the centre now, as before evaluating or saving the model. All ranks call it.

        A rank that has trained since its last exchange makes one before. The steps of the schedule stay as they are.

        Raises:
            PenstockError: As for `step`.
        """
        if self._landed_after[0] != self._steps:
            self._take(0)
            self._land(0.0)
        collectives.barrier()  # all exchanges are in the centre
        for values, _ in self._parts(self._fragments[0]):
            assert isinstance(values, Centre)
            values.take()
        self._landed_after[0] = self._steps
        collectives.barrier()  # nobody changes it before all have it
