"""The networks of the papers, and three of today, with their true shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lab.networks.cifar10_quick import cifar10_quick
from lab.networks.googlenet import googlenet
from lab.networks.inception_v3 import inception_v3
from lab.networks.resnet import resnet50, resnet152
from lab.networks.sockeye import sockeye
from lab.networks.transformers import gpt_25m, gpt_small, vit_s
from lab.networks.vgg import vgg19, vgg19_22k

if TYPE_CHECKING:
    from collections.abc import Callable

    from lab.trace import Trace

__all__ = ["NETWORKS"]

NETWORKS: dict[str, Callable[[], Trace]] = {
    "cifar10-quick": cifar10_quick,
    "googlenet": googlenet,
    "inception-v3": inception_v3,
    "vgg19": vgg19,
    "vgg19-22k": vgg19_22k,
    "resnet50": resnet50,
    "resnet152": resnet152,
    "sockeye": sockeye,
    "gpt-25m": gpt_25m,
    "gpt-small": gpt_small,
    "vit-s": vit_s,
}
