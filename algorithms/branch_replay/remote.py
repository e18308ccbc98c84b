"""Attention on a prefix that lies in host memory or is kept in bfloat16.

The prefix is fetched for one layer at a time and dropped again; backward fetches it once more,
repeats the forward of this attention and adds the prefix's cotangents to the host's. So the device
never holds more than one layer's prefix.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from algorithms.branch_replay.path import Path, first_seen
from kernels.shared_prefix_attention import Prefix, attention


def attend_remote(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    path: Path,
    layer: int,
    end: int,
    settings: dict[str, Any],
) -> Tensor:
    """`attention` behind the first `end` positions of `path`; `settings`: its keywords."""
    place = (path, layer, slice(first_seen(end, settings["window"]), end))
    out: Tensor = _Remote.apply(query, key, value, settings["sinks"], place, settings)  # type: ignore[no-untyped-call]
    return out


class _Remote(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        place: tuple[Path, int, slice],
        settings: dict[str, Any],
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, sinks)
        ctx.place, ctx.settings = place, settings
        return attention(query, key, value, _fetch(place, query, gradient=False), **settings)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        path, layer, seen = ctx.place
        needed = ctx.needs_input_grad[:4]
        inputs: list[Any] = [
            t if t is None else t.detach().requires_grad_(need)
            for t, need in zip(ctx.saved_tensors, needed, strict=True)
        ]
        query, key, value, sinks = inputs
        prefix = _fetch(ctx.place, query, gradient=bool(path.key_grads))
        with torch.enable_grad():
            out = attention(query, key, value, prefix, **(ctx.settings | {"sinks": sinks}))
        wanted = [t for t, need in zip(inputs, needed, strict=True) if need]
        grads = iter(torch.autograd.grad([out], wanted, [grad]))
        for buffers, added in (
            (path.key_grads, prefix.key_grad),
            (path.value_grads, prefix.value_grad),
        ):
            if added is not None:
                buffers[layer][:, seen] += added.to(buffers[layer].device)
        return (*(next(grads) if need else None for need in needed), None, None)


def _fetch(place: tuple[Path, int, slice], like: Tensor, gradient: bool) -> Prefix:
    path, layer, seen = place
    key, value = (
        buffers[layer][:, seen].to(device=like.device, dtype=like.dtype)
        for buffers in (path.keys, path.values)
    )
    if not gradient:
        return Prefix(key, value, None, None)
    grads = (
        torch.zeros(kept.shape, dtype=path.key_grads[layer].dtype, device=like.device)
        for kept in (key, value)
    )
    return Prefix(key, value, *grads)
