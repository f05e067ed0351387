"""What is trained: six networks, four optimizers, two types. Everything here is plain PyTorch.

The bars can only be met if 20 steps do not amplify rounding; then a difference means a wrong gradient or update:

- no parameter has a gradient that is zero in exact arithmetic, such as the bias before a batch norm or the bias of
  attention keys: an optimizer that divides by the gradient's size would turn its rounding noise into full steps;
- the adaptive optimizers have an ``eps`` well above the rounding noise of the gradients, for the same reason;
- what we wrote ourselves is smooth (SiLU, not ReLU): at a kink, one activation that rounds to the other side changes a
  gradient by far more than rounding;
- learning rates are small enough for training not to be chaotic, and large enough to move the parameters by several
  `MOVED_MIN`. First parameters changed by one unit in the last place end 1e-7 (fp32) and 1e-15 (fp64) apart.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SEED = 7
STEPS = 20
FEW_STEPS = 6  # of what `make test` runs: all that differs between steps comes within these
DIFFERENCE_MAX = {"fp64": 1e-10, "fp32": 1e-4}  # relative L2, over all parameters
MOVED_MIN = 1e-3  # the same measure, between the first parameters and the last
DTYPES = {"fp64": torch.float64, "fp32": torch.float32}


# Networks


def quick():
    """The network of examples/cifar10.py itself: 145,578 parameters."""
    if "cifar10" not in sys.modules:
        spec = importlib.util.spec_from_file_location("cifar10", EXAMPLES / "cifar10.py")
        sys.modules["cifar10"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["cifar10"].Quick()


class Residual(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        y = F.silu(self.norm1(self.conv1(x)))
        return F.silu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.SiLU())
        self.blocks = nn.Sequential(Residual(8, 8, 1), Residual(8, 16, 2), Residual(16, 16, 1))
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self, vocabulary=20, width=16):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 12)
        self.lstm = nn.LSTM(12, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        return self.head(self.lstm(self.embedding(tokens))[0])


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, time, width = x.shape
        query, key, value = self.attend(self.norm1(x)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.narrow(F.gelu(self.widen(self.norm2(x))))


class GPT(nn.Module):
    """Its output layer is its embedding: the same module's parameter is read outside of that module's forward."""

    def __init__(self, vocabulary=20, context=8, width=20):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.1 * torch.randn(context, width))
        self.blocks = nn.Sequential(Block(width, 2), Block(width, 2))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.embedding.weight, std=0.3)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.position[: tokens.shape[-1]]
        return F.linear(self.norm(self.blocks(x)), self.embedding.weight)


class Branched(nn.Module):
    """One branch that some ranks use in some steps, and one that nobody ever uses."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(12, 24)
        self.branch = nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 24))
        self.never = nn.Linear(24, 24)
        self.last = nn.Linear(24, 10)

    def forward(self, x, with_branch):
        x = torch.tanh(self.first(x))
        if with_branch:
            x = x + self.branch(x)
        return self.last(x)


def uses_branch(rank, step):
    """Whether a rank does: all ranks in some steps, some ranks or none in others; rank 0 in step 0."""
    return step % 5 != 4 and (step % 5 == 3 or (step + rank) % 3 == 0)


class Words(nn.Module):
    """Rows in plenty of kinds: padded, of layers called twice, that some ranks use in some steps, that nobody uses."""

    def __init__(self, vocabulary=60, width=24):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=0)
        self.first, self.second = nn.Linear(width, 48), nn.Linear(48, width, bias=False)
        self.branch_words, self.branch = nn.Embedding(vocabulary, width), nn.Linear(width, width)
        self.never_words, self.never = nn.Embedding(vocabulary, width), nn.Linear(width, width)
        self.head = nn.Linear(width, 16)

    def forward(self, tokens, with_branch):
        x = self.embedding(tokens)
        if with_branch:
            x = x + self.branch(torch.tanh(self.branch_words(tokens)))
        for _ in range(2):
            x = x + self.second(torch.tanh(self.first(x)))
        return self.head(x)


# Data: a batch depends on the rank and the step only, and is not the same for any two.


def _random(rank, step):
    return torch.Generator().manual_seed(SEED * 1_000_000 + step * 100 + rank)


def _loss(model, x, y, *args):
    """The loss of a batch, which is moved to the model's device."""
    device = next(model.parameters()).device
    out = model(x.to(device, non_blocking=True), *args)
    return F.cross_entropy(out.flatten(0, -2), y.to(device, non_blocking=True).flatten())


def _image_loss(batch, size):
    def loss(model, dtype, rank, step):
        random = _random(rank, step)
        y = torch.randint(10, (batch,), generator=random)
        x = torch.randn(batch, 3, size, size, generator=random, dtype=torch.float64) + 0.1 * y.view(-1, 1, 1, 1)
        return _loss(model, x.to(dtype), y)

    return loss


def _text_loss(model, dtype, rank, step):
    """One sentence of 5 to 8 words: few enough for their rows to be fewer bytes than any layer's gradient."""
    tokens = torch.randint(20, (1, 6 + (rank + step) % 4), generator=_random(rank, step))
    return _loss(model, tokens[:, :-1], tokens[:, 1:])


def _words_loss(model, dtype, rank, step):
    """1 to 4 rows, another number on each rank and in each step; some words more than once."""
    random = _random(rank, step)
    tokens = torch.randint(20, (1 + (rank + step) % 4,), generator=random)
    return _loss(model, tokens, torch.randint(16, tokens.shape, generator=random), uses_branch(rank, step))


def _branched_loss(model, dtype, rank, step):
    random = _random(rank, step)
    x = torch.randn(6, 12, generator=random, dtype=torch.float64).to(dtype)
    return _loss(model, x, torch.randint(10, (6,), generator=random), uses_branch(rank, step))


@dataclass(frozen=True)
class Network:
    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, torch.dtype, int, int], torch.Tensor]
    unused: bool = False  # DDP must be told
    uneven: bool = False  # K differs between ranks and steps
    accumulates: bool = False  # two backwards per step, the first under no_sync
    tied: tuple[str, ...] = ()  # layers whose weight is read elsewhere, too: told to send rows, they send the gradient


NETWORKS = {
    "quick": Network(quick, _image_loss(1, 32)),
    "resnet": Network(ResNet, _image_loss(4, 10)),
    "lstm": Network(Recurrent, _text_loss, uneven=True),
    "gpt": Network(GPT, _text_loss, uneven=True, tied=("embedding",)),
    "branched": Network(Branched, _branched_loss, unused=True),
    "words": Network(Words, _words_loss, unused=True, uneven=True, accumulates=True),
}

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda params: torch.optim.AdamW(params, lr=5e-4, weight_decay=0.1, eps=1e-6),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-3, eps=1e-6),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-4, momentum=0.5, eps=1e-6),
}


@dataclass(frozen=True)
class Case:
    size: int  # workers
    network: str
    optimizer: str
    dtype: str
    send: str = "store"  # or "rows": factors and pairs wherever they can be sent
    steps: int = STEPS

    def __str__(self):
        return f"{self.size}-workers-{self.network}-{self.optimizer}-{self.dtype}-{self.send}-{self.steps}-steps"

    @classmethod
    def parse(cls, text):
        size, _, *names, steps, _ = text.split("-")
        return cls(int(size), *names, steps=int(steps))

    def model(self):
        """The first parameters, the same in every process."""
        torch.manual_seed(SEED)
        return NETWORKS[self.network].build().to(DTYPES[self.dtype])

    def make_optimizer(self, model):
        return OPTIMIZERS[self.optimizer](model.parameters())

    def schemes(self, model):
        """What every layer is told to send."""
        if self.send == "store":
            return None
        from penstock.torch.schemes.survey import gather_scheme, why_whole

        named = model.named_modules()
        return {name: gather_scheme(module) for name, module in named if why_whole(module, model) is None}

    def train(self, model, optimizer, rank, after_backward=lambda: None):
        """The user's loop."""
        loss_of, dtype = NETWORKS[self.network].loss, DTYPES[self.dtype]
        for step in range(self.steps):
            if NETWORKS[self.network].accumulates:
                with model.no_sync():
                    loss_of(model, dtype, rank, step + self.steps).backward()
            loss_of(model, dtype, rank, step).backward()
            after_backward()
            optimizer.step()
            optimizer.zero_grad()


SIZES = (1, 2, 3, 4)
SENDS = ("store", "rows")


def _sends(size):
    return SENDS if size > 1 else SENDS[:1]  # one worker sends nothing


ALL_CASES = [
    Case(*values, send) for values in product(SIZES, NETWORKS, OPTIMIZERS, DTYPES) for send in _sends(values[0])
]


def _pairwise():
    """A case for each network and optimizer, among which every two values of two parameters meet: a Latin square."""
    for (i, network), (j, optimizer) in product(enumerate(NETWORKS), enumerate(OPTIMIZERS)):
        size, dtype = SIZES[(i + j) % 4], list(DTYPES)[(i + j // 2) % 2]
        sends = _sends(size)
        yield Case(size, network, optimizer, dtype, sends[(i // 2 + j) % len(sends)], FEW_STEPS)


PAIRWISE_CASES = list(_pairwise())
# Whatever is particular to rows, on every number of workers: `words` has it all, in layers of both kinds.
ROWS_CASES = [replace(case, send="rows") for case in PAIRWISE_CASES if case.network == "words" and case.size > 1]
CASES = list(dict.fromkeys([*PAIRWISE_CASES, *ROWS_CASES]))
