"""MODEL of ``penstock explain``: a torchvision name or ``module:attribute``, as a network's description.

What a module gives may be a torch module, a pair of a torch module and an example of its input (batch first), any
object that describes a network (`penstock.description.read`), or a function without arguments that returns one of
these. So nothing here knows who describes networks: ``lab:vgg19`` is attribute ``vgg19`` of a package named ``lab`` in
the working directory.
"""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path
from typing import Any

from penstock import description
from penstock.description import Network
from penstock.errors import ConfigError

__all__ = ["load"]


def load(model: str) -> Network:
    """The description of a network.

    Args:
        model: ``module:attribute``, found on the Python path or in the working directory, or a torchvision name.

    Raises:
        ConfigError: There is no such thing, it cannot be built, or it is no network; the message says what to do.
    """
    module_name, colon, attribute = model.partition(":")
    if not colon:
        return _torchvision(model)
    return _described(_found(module_name, attribute, model), model)


def _found(module_name: str, attribute: str, model: str) -> Any:
    here = str(Path.cwd())
    added = here not in sys.path
    if added:
        sys.path.insert(0, here)  # as for `python -m`: the command's own directory is not on the path
    try:
        module = importlib.import_module(module_name)
        try:
            found = getattr(module, attribute)  # a network of the lab may have a point in its name: lab:vgg19-x0.5
        except AttributeError:
            found = functools.reduce(getattr, attribute.split("."), module)
        return found() if callable(found) and not _is_module(found) else found
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{model}: no module named {error.name!r}, neither installed nor in {here}. MODEL is a torchvision name or "
            "module:function"
        ) from error
    except AttributeError as error:
        raise ConfigError(f"{model}: {error}") from error
    except Exception as error:  # whatever a user's function raises
        raise ConfigError(f"{model} cannot be built: {type(error).__name__}: {error}") from error
    finally:
        if added and here in sys.path:
            sys.path.remove(here)


def _is_module(found: Any) -> bool:
    """Whether this is a torch module; torch is not imported for it."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(found, torch.nn.Module)


def _described(found: Any, model: str) -> Network:
    example = None
    if isinstance(found, tuple) and len(found) == 2 and _is_module(found[0]):
        found, example = found
    if _is_module(found):
        from penstock.torch.choice.network import describe

        return describe(found, example, name=model)
    return description.read(found, model)


def _torchvision(name: str) -> Network:
    try:
        from torchvision import models
    except ImportError as error:
        raise ConfigError(
            f"{name} is taken for a torchvision name, but torchvision does not import: {error}. "
            "`pip install torchvision`; or give a module:function of yours, such as mycode.nets:make_model; or, in the "
            "root of the repository, a network of the lab, such as lab:vgg19, which needs no torchvision"
        ) from error
    from penstock.torch.choice.network import describe_torchvision

    return describe_torchvision(models, name)
