"""Optimizers by name and options, without torch: what owners of values apply to them.

`penstock.torch` finds the twin of an optimizer of torch by the same functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock._native import Optimizer as Twin

__all__ = [
    "ELASTIC",
    "NAMES",
    "Described",
    "NamedOptimizer",
    "adagrad",
    "adam",
    "adamw",
    "named",
    "rmsprop",
    "sgd",
    "twin",
]


Described = tuple[str, dict[str, Any]]
"""An optimizer as it travels: which of the core's, and its options by the core's names."""
_CORE = ("sgd", "adam", "adagrad", "rmsprop", "elastic")
ELASTIC = "ElasticAverage"
"""No optimizer of torch's: what is pushed is a value, by which the owner's moves (MXNET-MPI, equation 2)."""


def twin(described: Described) -> Twin:
    """The core's optimizer.

    Raises:
        ConfigError: There is none of this name, or an option is not possible.
    """
    from penstock._native import Optimizer as Twin

    kind, options = described
    if kind not in _CORE:
        raise ConfigError(f"an optimizer {kind!r}; the core has {', '.join(_CORE)}")
    make: Callable[..., Twin] = getattr(Twin, kind)
    return make(**{name: tuple(value) if isinstance(value, list) else value for name, value in options.items()})


def sgd(of: Mapping[str, Any]) -> Described:
    """As torch.optim.SGD with these options, by its names."""
    options = dict(**_common(of), momentum=of["momentum"], dampening=of["dampening"], nesterov=of["nesterov"])
    return "sgd", options


def adam(of: Mapping[str, Any]) -> Described:
    """As torch.optim.Adam; ``decoupled_weight_decay`` is an option of its since torch 2.7."""
    beta1, beta2 = of["betas"]
    more = {"eps": of["eps"], "amsgrad": of["amsgrad"], "decoupled": of.get("decoupled_weight_decay", False)}
    return "adam", dict(**_common(of), betas=(float(beta1), float(beta2)), **more)


def adamw(of: Mapping[str, Any]) -> Described:
    """As torch.optim.AdamW."""
    kind, options = adam(of)
    return kind, {**options, "decoupled": True}


def adagrad(of: Mapping[str, Any]) -> Described:
    """As torch.optim.Adagrad."""
    initial = float(of["initial_accumulator_value"])
    return "adagrad", dict(**_common(of), lr_decay=of["lr_decay"], eps=of["eps"], initial=initial)


def rmsprop(of: Mapping[str, Any]) -> Described:
    """As torch.optim.RMSprop."""
    more = {"eps": of["eps"], "momentum": of["momentum"], "centered": of["centered"]}
    return "rmsprop", dict(**_common(of), alpha=of["alpha"], **more)


def elastic(of: Mapping[str, Any]) -> Described:
    """Elastic averaging."""
    return "elastic", {"alpha": of["alpha"]}


def _common(of: Mapping[str, Any]) -> dict[str, Any]:
    return {"lr": float(of["lr"]), "weight_decay": float(of["weight_decay"]), "maximize": of["maximize"]}


# By torch's names the options that have an effect, and torch's defaults.
_ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False, "maximize": False}
_MAKERS: dict[str, tuple[Callable[[Mapping[str, Any]], Described], dict[str, Any]]] = {
    "SGD": (
        sgd,
        {
            "lr": 1e-3,
            "momentum": 0.0,
            "dampening": 0.0,
            "weight_decay": 0.0,
            "nesterov": False,
            "maximize": False,
        },
    ),
    "Adam": (adam, _ADAM),
    "AdamW": (adamw, {**_ADAM, "weight_decay": 1e-2}),
    "Adagrad": (
        adagrad,
        {
            "lr": 1e-2,
            "lr_decay": 0.0,
            "weight_decay": 0.0,
            "initial_accumulator_value": 0.0,
            "eps": 1e-10,
            "maximize": False,
        },
    ),
    "RMSprop": (
        rmsprop,
        {
            "lr": 1e-2,
            "alpha": 0.99,
            "eps": 1e-8,
            "weight_decay": 0.0,
            "momentum": 0.0,
            "centered": False,
            "maximize": False,
        },
    ),
    ELASTIC: (elastic, {"alpha": None}),
}
NAMES = tuple(_MAKERS)
"""Those that there are."""
_BELOW_1 = {("RMSprop", "alpha"), ("Adam", "betas"), ("AdamW", "betas")}
_FREE = {"foreach": None, "fused": None, "capturable": False}
"""How torch computes it, and not what; nothing here."""


@dataclass(frozen=True)
class NamedOptimizer:
    """An optimizer with all its options, as it is told and saved.

    Attributes:
        name: torch's name of the class, or `ELASTIC`.
        options: By torch's names; numbers and flags alone.
        rescale: What gradients are multiplied by before.
    """

    name: str
    options: dict[str, Any]
    rescale: float = 1.0

    def described(self) -> Described:
        """As it travels."""
        describe, _ = _MAKERS[self.name]
        return describe(self.options)

    def twin(self) -> Twin:
        """The core's."""
        return twin(self.described())

    @property
    def exchanges(self) -> bool:
        """Whether what is pushed is a value, and whoever pushes gets the one that was there before."""
        return self.name == ELASTIC

    @property
    def states(self) -> list[str]:
        """What is kept beside each value, by torch's names."""
        return self.twin().states

    def fields(self) -> dict[str, Any]:
        """Fit for JSON; `named` makes the same of it."""
        return {"name": self.name, "options": self.options, "rescale": self.rescale}

    def changed(self, caller: str, **options: Any) -> NamedOptimizer:
        """The same with some options changed.

        Raises:
            ConfigError: An option is not known or not possible, or changes what is kept beside each value.
        """
        rescale = options.pop("rescale", self.rescale)
        new = named(caller, self.name, {**self.options, **options}, rescale)
        if new.states != self.states:
            raise ConfigError(
                f"penstock.{caller}: {self.name} would keep {new.states or 'nothing'} beside each value, and keeps "
                f"{self.states or 'nothing'}: that cannot change while training; call set_optimizer to begin anew"
            )
        return new


def named(caller: str, algorithm: Any, options: Mapping[str, Any], rescale: Any = 1.0) -> NamedOptimizer:
    """The optimizer of this class or name.

    Args:
        caller: For messages.
        algorithm: One of `NAMES`, or the class of torch.optim that has this name.
        options: By torch's names; what is not given is torch's default.
        rescale: What gradients are multiplied by before.

    Raises:
        ConfigError: It has no twin here, or an option is not known or not possible.
    """
    kind = algorithm if isinstance(algorithm, str) else _name_of(caller, algorithm)
    if kind not in _MAKERS:
        raise ConfigError(
            f"penstock.{caller}: there is no optimizer {kind!r} here; there are {', '.join(NAMES)}, as torch.optim "
            "has them, and no subclass of them"
        )
    _, defaults = _MAKERS[kind]
    given = dict(options)
    for name, neutral in _FREE.items():
        if given.get(name, neutral) != neutral and name == "capturable":
            raise ConfigError(f"penstock.{caller}: {kind} cannot be computed here with {name}={given[name]!r}")
        given.pop(name, None)
    unknown = sorted(set(given) - set(defaults))
    if unknown:
        raise ConfigError(f"penstock.{caller}: {kind} has no option {unknown[0]!r} here; it has {', '.join(defaults)}")
    complete = {
        name: _number(caller, kind, name, default, given.get(name, default)) for name, default in defaults.items()
    }
    if kind == ELASTIC and rescale != 1:
        raise ConfigError(f"penstock.{caller}: {kind} takes values, not gradients: rescale={rescale!r} is none of its")
    if complete.get("nesterov") and (complete["momentum"] <= 0 or complete["dampening"] != 0):
        raise ConfigError(f"penstock.{caller}: {kind}: nesterov needs a momentum, and no dampening")
    return NamedOptimizer(kind, complete, _number(caller, kind, "rescale", 1.0, rescale))


def _name_of(caller: str, algorithm: Any) -> str:
    """Of a class of torch.optim and no other: a subclass may do something else."""
    module, name = getattr(algorithm, "__module__", ""), getattr(algorithm, "__qualname__", "")
    if not isinstance(algorithm, type):
        raise ConfigError(
            f"penstock.{caller}: a {type(algorithm).__name__} is no optimizer's class or name; give torch.optim.SGD, "
            "or 'SGD', and its options by name"
        )
    return name if module.startswith("torch.optim.") else f"{module}.{name}"


def _number(caller: str, kind: str, name: str, default: Any, value: Any) -> Any:
    """An option as it travels: plain numbers and flags."""
    wrong = ConfigError(f"penstock.{caller}: {kind} with {name}={value!r}: that is not possible")
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise wrong
        return value
    if isinstance(default, tuple):
        if not isinstance(value, (tuple, list)) or len(value) != len(default):
            raise wrong
        return [_number(caller, kind, name, 0.0, one) for one in value]
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise wrong from error
    signed = name == "rescale"
    if not math.isfinite(number) or (number < 0 and not signed) or ((kind, name) in _BELOW_1 and number >= 1):
        raise wrong
    if kind == ELASTIC and number > 1:
        raise wrong
    return number
