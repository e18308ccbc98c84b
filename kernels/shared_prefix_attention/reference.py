"""Dense attention over [prefix; own keys], written to be read: the truth for the other twins."""

import torch
from torch import Tensor

from kernels.shared_prefix_attention.prefix import Prefix, accumulation_dtype


def dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of the last tokens of one full sequence, all scores at once.

    query `[batch, heads, tokens, head_dim]`; key, value `[batch, kv_heads, positions, dim]` with
    positions >= tokens: the queries are the last ones. Returns `[batch, heads, tokens, value_dim]`.
    """
    dtype = accumulation_dtype(query.dtype)
    group = query.shape[1] // key.shape[1]
    full_key = key.to(dtype).repeat_interleave(group, dim=1)
    full_value = value.to(dtype).repeat_interleave(group, dim=1)
    scores = query.to(dtype) @ full_key.mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    tokens, positions = scores.shape[-2:]
    at = torch.arange(positions - tokens, positions, device=query.device)[:, None]
    keys = torch.arange(positions, device=query.device)
    visible = keys <= at
    if window is not None:
        visible &= keys > at - window
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        extra = sinks.to(dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, extra], dim=-1)
    weights = scores.softmax(dim=-1)[..., :positions]
    return (weights @ full_value).to(query.dtype)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prefix: Prefix,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The same as the package's `attention`, with the prefix copied to every row of the batch."""
    batch = query.shape[0]
    shared_key = _with_sink(prefix.key, prefix.key_grad)
    shared_value = _with_sink(prefix.value, prefix.value_grad)
    return dense(
        query,
        torch.cat([shared_key.expand(batch, -1, -1, -1), key], dim=2),
        torch.cat([shared_value.expand(batch, -1, -1, -1), value], dim=2),
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
    )


def _with_sink(tensor: Tensor, sink: Tensor | None) -> Tensor:
    """The tensor as a leaf in the sink's dtype whose gradient is added to the sink."""
    if sink is None or not torch.is_grad_enabled():
        return tensor
    leaf = tensor.detach().to(sink.dtype, copy=True).requires_grad_()

    def add(grad: Tensor) -> None:
        sink.add_(grad)

    leaf.register_hook(add)  # type: ignore[no-untyped-call]
    return leaf
