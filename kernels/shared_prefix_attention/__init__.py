"""Attention of a batch of rows over one shared prefix and their own keys, exact in both directions.

Every twin (`reference`, `cpu`, `blocks`, `triton`) computes the same; `kernels.dispatch` picks one.
"""

from functools import partial

from torch import Tensor

from kernels import dispatch
from kernels.dispatch import Twin
from kernels.shared_prefix_attention import cpu, reference, triton
from kernels.shared_prefix_attention.prefix import (
    Prefix,
    Saved,
    accumulation_dtype,
    check,
    empty_prefix,
)

__all__ = ["OP", "TWINS", "Prefix", "Saved", "accumulation_dtype", "attention"]

OP = "shared_prefix_attention"


TWINS = (
    Twin("triton", triton.refuses, triton.attention),
    Twin("cpu", cpu.refuses, cpu.attention),
    Twin("blocks", dispatch.anywhere, partial(cpu.attention, flash=False)),
    Twin("reference", dispatch.anywhere, reference.attention),
)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prefix: Prefix | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    saved: Saved | None = None,
) -> Tensor:
    """Causal attention over `[prefix; own keys]`; returns `[batch, heads, tokens, value_dim]`.

    query `[batch, heads, tokens, head_dim]`, key and value `[batch, kv_heads, tokens, dim]`, one
    floating dtype; heads are a multiple of kv_heads. Own token i is at position prefix + i and sees
    the positions up to its own, with a window only the last `window` of them. Scores are
    `scale * query @ key`, with a softcap `softcap * tanh(scores / softcap)`. sinks `[heads]` are
    logits that take part in the softmax and have no value. saved, of an earlier call with equal
    arguments, spares this one the forward.

    Autograd gives the gradients of query, key, value and sinks. Each backward through the result
    adds the prefix's to `prefix.key_grad` and `prefix.value_grad` in place, where given.

    Raises ValueError where the arguments do not fit each other, and `dispatch.CannotRun` where a
    twin was forced that cannot run.
    """
    if prefix is None:
        prefix = empty_prefix(key, value)
    check(query, key, value, prefix, window, softcap, sinks)
    twin = dispatch.choose(OP, TWINS, query, value)
    if query.numel() == 0:
        return query @ query.new_zeros(query.shape[3], value.shape[3])
    options = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
    out: Tensor = twin.run(query, key, value, prefix, saved=saved, **options)
    return out
