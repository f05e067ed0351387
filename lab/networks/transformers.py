"""Networks of today: two small GPTs and a small vision transformer."""

from __future__ import annotations

from lab.networks.chain import Chain
from lab.trace import Layer, Trace

__all__ = ["gpt_25m", "gpt_small", "vit_s"]


def _block(chain: Chain, name: str, features: int) -> None:
    """Attention and perceptron with four times the features, a normalisation before each.

    Scores are counted for all pairs of tokens, also where a causal mask discards half of them.
    """
    before = chain.shape
    inner, _, rows = before
    chain.norm(f"{name}_ln1")
    chain.linear(f"{name}_qkv", 3 * features)
    chain.add(f"{name}_scores", "attention", {}, 2 * 2.0 * rows * rows * inner, rows=rows)
    chain.shape = before
    chain.linear(f"{name}_proj", features)
    chain.norm(f"{name}_ln2")
    chain.linear(f"{name}_fc", 4 * features)
    chain.linear(f"{name}_out", features)


def gpt_small(width: float = 1.0) -> Trace:
    """124,439,808 parameters: the smallest GPT-2. Its output shares the matrix of the token embedding."""
    return Trace(
        name="gpt-small",
        layers=_gpt(768, 12, 50257, width),
        batch=12,
        source="Radford et al. 2019 (GPT-2), the smallest model, 1,024 tokens; batch: nanoGPT's default for it",
        width=width,
        builder=gpt_small,
    )


def gpt_25m(width: float = 1.0) -> Trace:
    """25,875,456 parameters: GPT-2's layers, fewer and narrower, over bytes, so that nearly all is in the blocks."""
    return Trace(
        name="gpt-25m",
        layers=_gpt(512, 8, 256, width),
        batch=12,
        source="GPT-2's layout with 8 blocks of 512 features over bytes, 1,024 of them; batch: as of `gpt-small`",
        width=width,
        builder=gpt_25m,
    )


def _gpt(features: int, blocks: int, vocabulary: int, width: float) -> tuple[Layer, ...]:
    tokens = 1024
    chain = Chain((1, 1, tokens), width)
    # Not kind "embedding": the tied output makes its gradient dense, and it is complete only when backward ends.
    chain.embedding("wte", vocabulary, features, tokens, kind="other")
    chain.embedding("wpe", tokens, features, tokens, kind="other")  # every step uses every position
    for block in range(blocks):
        _block(chain, f"h{block}", features)
    chain.norm("ln_f")
    chain.add("lm_head", "other", {}, 2.0 * vocabulary * chain.scaled(features) * tokens, rows=tokens)
    return tuple(chain.layers)


def vit_s(width: float = 1.0) -> Trace:
    """22,050,664 parameters: ViT-S/16 for images of 224 x 224 and 1,000 classes."""
    features, blocks = 384, 12
    chain = Chain((3, 224, 224), width)
    chain.conv("patch_embed", features, 16, stride=16)
    inner, height, across = chain.shape
    tokens = height * across + 1  # and the one that is classified
    chain.shape = (inner, 1, tokens)
    learned: dict[str, tuple[int, ...]] = {"cls_token": (1, 1, inner), "pos_embed": (1, tokens, inner)}
    chain.add("position", "other", learned, float(tokens * inner), rows=tokens)
    for block in range(blocks):
        _block(chain, f"block{block}", features)
    chain.norm("norm")
    chain.shape = (inner, 1, 1)
    chain.linear("head", classes=1000)
    return Trace(
        name="vit-s",
        layers=tuple(chain.layers),
        batch=128,
        source="Dosovitskiy et al. 2020, Touvron et al. 2020 (DeiT-S), 16 x 16 patches; batch: DeiT's 1,024 on 8 GPUs",
        width=width,
        builder=vit_s,
    )
