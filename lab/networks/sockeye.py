"""Sockeye's LSTM translation model as P3 trains it: the heaviest layer is the first one.

P3 (SysML 2019) shows this model's skewed parameters in figure 5(c) without numbers; its artifact gives the settings:
Sockeye 1.5, LSTM, ``--num-layers 2:2 --rnn-num-hidden 512 --num-embed 512:512 --attention-type mlp
--attention-num-hidden 512``, 32 sentences per worker, IWSLT'15 English to Vietnamese with the vocabularies of the
TensorFlow NMT tutorial, 17,191 and 7,709 words. Which tensors such a model has is Sockeye's own layout: the first
encoder layer runs in both directions with half of the hidden units each, and the decoder is fed its attention's output.
"""

from __future__ import annotations

from lab.networks.chain import Chain
from lab.trace import Trace

__all__ = ["sockeye", "translation"]

ENGLISH, VIETNAMESE = 17191, 7709
TOKENS = 25
"""Tokens per sentence. IWSLT'15 has sentences of 20 to 30 words on average in both languages."""
HIDDEN = 512


def sockeye(width: float = 1.0) -> Trace:
    """27,733,021 parameters, 32 % of them in the source embedding, which is the first layer."""
    return Trace(
        name="sockeye",
        layers=translation(width, ENGLISH, VIETNAMESE, attention_hidden=HIDDEN).layers,
        batch=32,
        source="settings, vocabularies and batch: P3's artifact (SysML 2019), run_exp.sh; layout: Sockeye 1.5; "
        "25 tokens per sentence",
        width=width,
        builder=sockeye,
    )


def translation(width: float, source_words: int, target_words: int, *, attention_hidden: int) -> Trace:
    """The model with any vocabularies.

    Args:
        width: The factor of embeddings and hidden units.
        source_words: Source vocabulary.
        target_words: Target vocabulary.
        attention_hidden: Hidden units of the attention's perceptron; 0: scalar products, without parameters.
    """
    chain = Chain((1, 1, TOKENS), width)
    hidden = chain.scaled(HIDDEN)
    chain.embedding("source_embed", source_words, HIDDEN, TOKENS)
    _lstm(chain, "encoder_birnn_forward_l0", hidden, hidden // 2)
    _lstm(chain, "encoder_birnn_reverse_l0", hidden, hidden // 2)
    _lstm(chain, "encoder_rnn_l0", hidden // 2 * 2, hidden)
    for state in range(4):  # cell and output of the decoder's two layers, once per sentence
        chain.shape = (hidden, 1, 1)
        chain.linear(f"enc2decinit_{state}", HIDDEN, kind="other")
    chain.embedding("target_embed", target_words, HIDDEN, TOKENS)
    _lstm(chain, "decoder_rnn_l0", 2 * hidden, hidden)
    _lstm(chain, "decoder_rnn_l1", hidden, hidden)
    _attention(chain, hidden, chain.scaled(attention_hidden) if attention_hidden else 0)
    chain.shape = (2 * hidden, 1, TOKENS)
    chain.linear("decoder_rnn_hidden", HIDDEN)
    chain.linear("target_output", classes=target_words)
    return Trace(
        "sockeye-like", tuple(chain.layers), 32, f"as sockeye, {source_words} and {target_words} words", width=width
    )


def _lstm(chain: Chain, name: str, inputs: int, hidden: int) -> None:
    gates = 4 * hidden
    shapes: dict[str, tuple[int, ...]] = {
        "i2h_weight": (gates, inputs),
        "i2h_bias": (gates,),
        "h2h_weight": (gates, hidden),
        "h2h_bias": (gates,),
    }
    chain.add(name, "lstm", shapes, 2.0 * gates * (inputs + hidden) * TOKENS, rows=TOKENS)


def _attention(chain: Chain, hidden: int, units: int) -> None:
    """Each target position scores each source position and takes their weighted mean."""
    pairs = TOKENS * TOKENS
    shapes: dict[str, tuple[int, ...]] = {}
    flops = 2.0 * pairs * hidden  # the mean
    if units:
        shapes = {"e2h_weight": (units, hidden), "q2h_weight": (units, hidden), "h2s_weight": (1, units)}
        flops += 2.0 * TOKENS * 2 * units * hidden + 2.0 * pairs * units
    else:
        flops += 2.0 * pairs * hidden
    chain.add("attention", "attention", shapes, flops, rows=TOKENS)
