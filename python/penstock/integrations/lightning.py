"""Lightning: a strategy whose models are Penstock's, with transfers hidden under the backward and the next forward.

It is Lightning's own strategy for DDP, with our class in the place of torch's (`penstock.torch.ddp`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import penstock.torch.backend  # noqa: F401 - registers it
from penstock.torch.ddp.wrapper import DistributedDataParallel

try:
    from lightning.pytorch.plugins.precision import MixedPrecision, Precision
    from lightning.pytorch.strategies import DDPStrategy
except ImportError as error:
    raise ImportError(
        f"penstock.integrations.lightning needs Lightning 2.6 or later ({error}): `pip install penstock[lightning]`"
    ) from error

__all__ = ["PenstockStrategy"]


class PenstockStrategy(DDPStrategy):
    """Data-parallel training in a ``Trainer``, with Penstock's transfers in the place of DDP's.

    Gradients are averages over all ranks, as with ``strategy="ddp"``; callbacks, accumulation, clipping, checkpoints
    and manual optimization stay as they are. What Penstock cannot take is left to torch's DDP, on the process group's
    backend, with a warning that says why.

    Args:
        *args: As Lightning's ``DDPStrategy``.
        process_group_backend: What carries Lightning's own collectives: barriers, and values logged with
            ``sync_dist=True``.
        **kwargs: As Lightning's ``DDPStrategy``.

    Raises:
        PenstockError: From ``Trainer.fit``: ranks did not meet, or one was lost.

    Example::

        trainer = Trainer(accelerator="cpu", devices=2, strategy=PenstockStrategy())
        trainer.fit(model, loader)
    """

    def __init__(self, *args: Any, process_group_backend: str | None = "penstock", **kwargs: Any) -> None:
        super().__init__(*args, process_group_backend=process_group_backend, **kwargs)

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        """As Lightning's, which names torch's class."""
        return DistributedDataParallel(model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs)

    def pre_backward(self, closure_loss: Tensor) -> None:
        """With manual optimization one forward may have several backwards: each is asked for here.

        Args:
            closure_loss: What the backward begins with.
        """
        if not isinstance(self.model, DistributedDataParallel) or self.model.is_torchs:
            super().pre_backward(closure_loss)
        elif not self.lightning_module.automatic_optimization:
            self.model.ask_for_backward()

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: nn.Module | None = None, **kwargs: Any
    ) -> Any:
        """Run the closure and step, in this order.

        Lightning gives the closure to the optimizer, which may then call it as often as it likes, and return only with
        all averages. An optimizer that calls it once first does the same when it gets none, and need not wait.

        Args:
            optimizer: The optimizer.
            closure: The step's forward and backward; returns the loss.
            model: The module, if it is not the strategy's.
            **kwargs: For the optimizer's ``step``.

        Returns:
            What the closure, or the optimizer's ``step``, returns.
        """
        module = model or self.lightning_module
        if self._needs_closure(optimizer) or self._model_averager is not None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        result = self.precision_plugin._wrap_closure(module, optimizer, closure)
        optimizer.step(**kwargs)
        return result

    def teardown(self) -> None:
        """Apply what is outstanding, unless something has failed: Lightning moves the model to main memory now."""
        if isinstance(self.model, DistributedDataParallel) and sys.exc_info()[1] is None:
            self.model.finish()
        super().teardown()

    def _needs_closure(self, optimizer: Optimizer) -> bool:
        """Whether the plugin for precision does otherwise than to pass it on, or the optimizer than to call it once."""
        plugin = self.precision_plugin
        scales = getattr(plugin, "scaler", None) is not None  # it runs the closure first, itself
        passes_on = type(plugin).optimizer_step in (Precision.optimizer_step, MixedPrecision.optimizer_step)
        return scales or not passes_on or isinstance(optimizer, torch.optim.LBFGS)
