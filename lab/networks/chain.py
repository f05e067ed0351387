"""Builds traces layer by layer: keeps the activation's shape, and knows each kind of layer's tensors and arithmetic.

Activation functions, pooling and additions take no time here: published counts leave them out, and the arithmetic of
the rest is a thousand times theirs.
"""

from __future__ import annotations

from lab.trace import Layer, Tensor

__all__ = ["Chain", "scaled"]


def scaled(features: int, width: float) -> int:
    """A channel or feature dimension at another width."""
    return max(1, round(features * width))


def _pair(value: int | tuple[int, int]) -> tuple[int, int]:
    return value if isinstance(value, tuple) else (value, value)


class Chain:
    """Layers in forward order, and the activation behind the last one.

    Channels and features are given at full width and scaled by `width`; inputs, classes and vocabularies, which have no
    width, are passed as ``classes``.

    Args:
        shape: Channels, height and width of one sample; (features, 1, rows) for sequences.
        width: The factor of channels and features.
    """

    def __init__(self, shape: tuple[int, int, int], width: float = 1.0) -> None:
        self.layers: list[Layer] = []
        self.shape = shape
        self.width = width

    def scaled(self, features: int) -> int:
        """A dimension at this chain's width."""
        return scaled(features, self.width)

    def add(self, name: str, kind: str, shapes: dict[str, tuple[int, ...]], flops: float, *, rows: int = 1) -> None:
        """Append a layer with these tensors, by their names within the layer."""
        tensors = tuple(Tensor(f"{name}.{part}", shape) for part, shape in shapes.items())
        self.layers.append(Layer(name, kind, tensors, float(flops), rows))

    # Images

    def conv(
        self,
        name: str,
        channels: int,
        kernel: int | tuple[int, int],
        *,
        stride: int = 1,
        padding: int | tuple[int, int] = 0,
        bias: bool = True,
    ) -> None:
        """A convolution to `channels`."""
        inputs, height, width = self.shape
        outputs, (down, across), (above, beside) = self.scaled(channels), _pair(kernel), _pair(padding)
        height = (height + 2 * above - down) // stride + 1
        width = (width + 2 * beside - across) // stride + 1
        shapes: dict[str, tuple[int, ...]] = {"weight": (outputs, inputs, down, across)}
        if bias:
            shapes["bias"] = (outputs,)
        self.add(name, "conv", shapes, 2.0 * outputs * inputs * down * across * height * width)
        self.shape = (outputs, height, width)

    def norm(self, name: str) -> None:
        """A normalisation with scale and shift per channel: a multiplication and an addition per number."""
        channels, height, width = self.shape
        shapes: dict[str, tuple[int, ...]] = {"weight": (channels,), "bias": (channels,)}
        self.add(name, "norm", shapes, 2.0 * channels * height * width)

    def pool(self, kernel: int, stride: int, *, padding: int = 0, ceil: bool = False) -> None:
        """Pooling changes the shape alone."""
        channels, height, width = self.shape

        def pooled(side: int) -> int:
            span = side + 2 * padding - kernel + (stride - 1 if ceil else 0)
            return span // stride + 1

        self.shape = (channels, pooled(height), pooled(width))

    def flatten(self) -> None:
        """All numbers of the activation become features of one row."""
        channels, height, width = self.shape
        self.shape = (channels * height * width, 1, 1)

    # Rows

    @property
    def rows(self) -> int:
        """Rows of the activation per sample, for layers that treat it as rows."""
        return self.shape[2]

    def linear(
        self, name: str, features: int = 0, *, classes: int = 0, bias: bool = True, kind: str = "linear"
    ) -> None:
        """A linear map of each row to `features`, or to `classes` whatever the width."""
        inputs, _, rows = self.shape
        outputs = classes or self.scaled(features)
        shapes: dict[str, tuple[int, ...]] = {"weight": (outputs, inputs)}
        if bias:
            shapes["bias"] = (outputs,)
        self.add(name, kind, shapes, 2.0 * outputs * inputs * rows, rows=rows)
        self.shape = (outputs, 1, rows)

    def embedding(self, name: str, vocabulary: int, features: int, rows: int, *, kind: str = "embedding") -> None:
        """Rows looked up by index. No arithmetic, but each number is moved once, which counts as one."""
        outputs = self.scaled(features)
        self.add(name, kind, {"weight": (vocabulary, outputs)}, float(rows * outputs), rows=rows)
        self.shape = (outputs, 1, rows)
