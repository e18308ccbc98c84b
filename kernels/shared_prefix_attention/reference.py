"""Dense attention over [prefix; own keys], written to be read: the truth for the other twins."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.shared_prefix_attention.prefix import Prefix, Saved, accumulation_dtype


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
    saved: Saved | None = None,
) -> Tensor:
    """The same as the package's `attention`, with the prefix copied to every row of the batch."""
    options = {"scale": scale, "window": window, "softcap": softcap}
    out: Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
        query, key, value, sinks, prefix, options
    )
    return out


class _Attention(torch.autograd.Function):
    """Autograd's own gradient of `dense`, as one node: whoever asks for any of it, by `backward` or
    by `torch.autograd.grad`, has the prefix's part added to its sums."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        prefix: Prefix,
        options: dict[str, Any],
    ) -> Tensor:
        needed = ctx.needs_input_grad[:4]
        query, key, value = (
            x.detach().requires_grad_(need)
            for x, need in zip((query, key, value), needed[:3], strict=True)
        )
        sinks = None if sinks is None else sinks.detach().requires_grad_(needed[3])
        shared = [
            x if total is None else x.detach().to(total.dtype, copy=True).requires_grad_()
            for x, total in ((prefix.key, prefix.key_grad), (prefix.value, prefix.value_grad))
        ]
        with torch.enable_grad():
            rows = [x.expand(query.shape[0], -1, -1, -1) for x in shared]
            out = dense(
                query,
                torch.cat([rows[0], key], dim=2),
                torch.cat([rows[1], value], dim=2),
                sinks=sinks,
                **options,
            )
        ctx.graph, ctx.prefix = ([query, key, value, sinks], shared, out), prefix
        return out.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        given, shared, out = ctx.graph
        leaves = [x for x in (*given, *shared) if x is not None and x.requires_grad]
        found = iter(torch.autograd.grad([out], leaves, [grad_out], retain_graph=True))
        grads = [next(found) if x is not None and x.requires_grad else None for x in given]
        for total in (ctx.prefix.key_grad, ctx.prefix.value_grad):
            if total is not None:
                total += next(found)
        return (*grads, None, None)
