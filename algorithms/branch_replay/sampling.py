"""The next token of each row, from its logits and a number of its own in [0, 1).

A row's numbers are a hash of its seed and the token's place, so what it samples depends neither on
the rows beside it nor on a generator's state, but for the rounding of its logits.
"""

from __future__ import annotations

from torch import Tensor

from algorithms.common.seeding import mix


def uniform(seed: int, place: int) -> float:
    """In [0, 1), of 53 bits, for the sampled token at `place` of the branch with `seed`."""
    return (mix("sample", seed, place) >> 11) / 2.0**53


def choose(logits: Tensor, uniforms: Tensor, temperature: float, top_p: float) -> Tensor:
    """Tokens int64 [rows] by inverse transform from `logits` [rows, vocabulary] and `uniforms`
    float64 [rows]. Temperature 0: the likeliest. top_p: only the fewest likeliest tokens that hold
    at least this probability (nucleus sampling, 1904.09751, section 3.1)."""
    if temperature == 0:
        return logits.argmax(-1)
    probabilities = (logits.double() / temperature).softmax(-1)
    if top_p == 1:
        return _inverse(probabilities, uniforms)
    likely, order = probabilities.sort(dim=-1, descending=True, stable=True)
    before = likely.cumsum(-1) - likely
    chosen = _inverse(likely * (before < top_p), uniforms)
    return order.gather(-1, chosen[:, None])[:, 0]


def _inverse(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The first place [rows] at which the sum of `weights` [rows, n] exceeds its share."""
    sums = weights.cumsum(-1)
    return (sums <= uniforms[:, None] * sums[:, -1:]).sum(-1)
