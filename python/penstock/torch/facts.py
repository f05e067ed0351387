"""What a program may ask about a distributed model: the information book; how each layer is synchronised, and why."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from penstock import job
from penstock.coordinator import Cluster, Coordinator, Placed
from penstock.errors import ConfigError
from penstock.torch.access import distributed_for
from penstock.torch.choice.measuring import network_of
from penstock.torch.choice.network import trained

if TYPE_CHECKING:
    from penstock.explanation import Explanation
    from penstock.plan import LayerPlan

__all__ = ["coordinator_of", "explain"]


def coordinator_of(model: nn.Module) -> Coordinator:
    """The information book of a distributed model: `Coordinator.query`, `Coordinator.best_scheme`. Not collective.

    Args:
        model: A distributed model. In a job of one process any model: there is nothing to send.

    Raises:
        ConfigError: The model is not distributed.

    Example:
        >>> ps.coordinator_of(model).query("n_worker", "batchsize")
        (4, 32)
        >>> ps.coordinator_of(model).best_scheme("classifier.0")
        'factors'
    """
    running = job.current("coordinator_of")
    if running.world_size == 1:
        network = network_of(model, {}, type(model).__name__)
        tensors = [tensor for layer in network.layers for tensor in layer.tensors]
        alone = {tensor.name: [Placed(0, tensor.nbytes, 0, 0)] for tensor in tensors}
        return Coordinator(network, Cluster(1, 1), placements=lambda: alone)
    distributed = distributed_for(model)
    if distributed is None:
        raise ConfigError("penstock.coordinator_of: the model is not distributed; call penstock.distribute first")
    return distributed.schemes.coordinator


def explain(model: nn.Module, compute_s: float | None = None) -> Explanation:
    """How each layer of a distributed model is synchronised now, what every scheme would cost, and why. Not collective.

    Args:
        model: A distributed model. Rows are known from its second step on.
        compute_s: Forward and backward of one worker alone, in seconds; with it step times are predicted.

    Returns:
        An object; ``print(ps.explain(model).render())`` shows the table of ``penstock explain``. Parameters that are
        frozen at present are left out. Where a layer that sends rows had to send its gradient on this rank (its weight
        was read elsewhere, or a hook wanted to see the gradient), the reason says how often and why; and also why it
        would have to.

    Raises:
        ConfigError: The model is not distributed, or all of its parameters are frozen.
    """
    coordinator, distributed = coordinator_of(model), distributed_for(model)
    network = trained(coordinator.network, model if distributed is None else distributed.model)
    if network is not coordinator.network:
        coordinator = coordinator.of_part(network)
    explanation = coordinator.explain(compute_s)
    if distributed is None:  # a job of one process
        return explanation

    def with_exceptions(plan: LayerPlan) -> LayerPlan:
        gather = distributed.schemes.gathers.get(plan.name)
        if gather is None:
            return plan
        reason = plan.reason
        if plan.name in distributed.schemes.choice.why_whole:
            reason += f"; cannot leave rows on this rank: {distributed.schemes.choice.why_whole[plan.name]}"
        if gather.dense_sent:
            times = f"{gather.dense_sent} time{'s' if gather.dense_sent != 1 else ''}"
            reason += f"; sent whole {times} on this rank: {gather.dense_reason}"
        return replace(plan, reason=reason)

    return replace(explanation, layers=tuple(with_exceptions(plan) for plan in explanation.layers))
