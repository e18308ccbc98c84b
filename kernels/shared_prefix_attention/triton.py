"""Shared-prefix attention on a GPU: the launches of the kernels in `triton_kernels.py`.

One online softmax goes over the prefix and the own keys, so nothing is merged afterwards. The
backward computes the query's gradient in the same order, the own keys' per block of keys, and the
prefix's per block of keys over all rows of the batch, added to the caller's float32 buffers without
atomics. Structure after FlashAttention-2 (Dao 2023). Half precision multiplies on tensor cores with
float32 sums; float32 multiplies as three TF32 products, which keeps its accuracy.

TRITON_INTERPRET=1, set before the first call, runs the kernels on CPU tensors, slowly.
"""

import os
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.shared_prefix_attention.prefix import Prefix, Saved

MAX_DIM = 256


@dataclass(frozen=True)
class Tile:
    """How much one program of a kernel works on at a time."""

    rows: int
    keys: int
    warps: int
    stages: int


def refuses(query: Tensor, value: Tensor) -> str | None:
    """Why this twin cannot take these tensors, or None."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if query.device.type != "cuda" and not (query.device.type == "cpu" and interpreted):
        return f"tensors are on {query.device.type}"
    if not _installed():
        return "triton is not installed"
    if query.device.type == "cuda" and torch.cuda.get_device_capability(query.device) < (8, 0):
        return "the GPU is older than sm_80"
    if query.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"{query.dtype} is not supported"
    if max(query.shape[3], value.shape[3]) > MAX_DIM:
        return f"head sizes above {MAX_DIM} are not supported"
    return None


@cache
def _installed() -> bool:
    return find_spec("triton") is not None


# By the bytes of a number and the padded head size: for forward and the query's gradient, and for
# the gradients of keys and values. Chosen from what the compiler reports for sm_80 and sm_90, not
# from timings: two stages within 163 KB of shared memory, and few spilled registers.
TILES = {
    (2, 64): (Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    (2, 128): (Tile(128, 64, 8, 2), Tile(64, 64, 8, 2)),
    (2, 256): (Tile(64, 32, 8, 2), Tile(64, 32, 8, 2)),
    (4, 64): (Tile(32, 32, 4, 2), Tile(32, 32, 4, 2)),
    (4, 128): (Tile(32, 32, 8, 2), Tile(32, 32, 8, 2)),
    (4, 256): (Tile(16, 32, 8, 2), Tile(16, 16, 8, 2)),
}


def tiles(query: Tensor, value: Tensor) -> tuple[Tile, Tile]:
    """The tiles for forward and the query's gradient, and for the gradients of keys and values."""
    padded = max(64, _power_of_two(max(query.shape[3], value.shape[3])))
    return TILES[query.element_size(), padded]


def launch(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], **constants: Any) -> None:
    """The one place where a kernel starts."""
    kernel[grid](*args, **constants)


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
    """The same as the package's `attention`."""
    options = _Options(float(scale), window, softcap)
    out: Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
        query, key, value, sinks, prefix, options, saved
    )
    return out


@dataclass(frozen=True)
class _Options:
    scale: float
    window: int | None
    softcap: float | None

    @property
    def numbers(self) -> tuple[int, float, float]:
        return self.window or 0, self.scale, self.softcap or 0.0


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        prefix: Prefix,
        options: _Options,
        saved: Saved | None,
    ) -> Tensor:
        query, key, value = (_dense_last(x) for x in (query, key, value))
        if saved is None:
            saved = Saved()
        if saved.out is None:
            saved.out, saved.lse = _forward(query, key, value, sinks, prefix, options)
        out = saved.out.detach()  # not the very tensor: autograd marks what is returned
        ctx.save_for_backward(query, key, value, sinks, out, saved.lse)
        ctx.prefix, ctx.options = prefix, options
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        from kernels.shared_prefix_attention import triton_kernels

        query, key, value, sinks, out, lse = ctx.saved_tensors
        prefix: Prefix = ctx.prefix
        options: _Options = ctx.options
        grad_out = _dense_last(grad_out)
        prefix_key, prefix_value = _dense_last(prefix.key), _dense_last(prefix.value)
        batch, heads, tokens, _ = query.shape
        kv_heads = key.shape[1]
        rows = tokens * heads // kv_heads
        delta = (grad_out.float() * out).sum(-1).contiguous()
        by_rows, by_keys = tiles(query, value)

        query_grad = torch.empty_like(query)
        launch(
            triton_kernels.query_grad,
            (_blocks(rows, by_rows.rows), kv_heads, batch),
            (
                *(query, key, value, prefix_key, prefix_value, grad_out, lse, delta, query_grad),
                *_strides(query, key, value, prefix_key, prefix_value, grad_out, query_grad),
                *(tokens, len(prefix), *options.numbers),
            ),
            **_constants(query, key, value, by_rows, options),
        )
        key_grad = torch.empty_like(key, memory_format=torch.contiguous_format)
        value_grad = torch.empty_like(value, memory_format=torch.contiguous_format)
        launch(
            triton_kernels.own_grads,
            (_blocks(tokens, by_keys.keys), kv_heads, batch),
            (
                *(query, key, value, grad_out, lse, delta, key_grad, value_grad),
                *_strides(query, key, value, grad_out),
                *(tokens, *options.numbers),
            ),
            **_constants(query, key, value, by_keys, options),
        )
        if prefix.key_grad is not None and prefix.value_grad is not None and len(prefix):
            sums = _dense_last(prefix.key_grad), _dense_last(prefix.value_grad)
            launch(
                triton_kernels.prefix_grads,
                (_blocks(len(prefix), by_keys.keys), kv_heads),
                (
                    *(query, prefix_key, prefix_value, grad_out, lse, delta, *sums),
                    *_strides(query, prefix_key, prefix_value, grad_out, *sums),
                    *(batch, tokens, len(prefix), *options.numbers),
                ),
                **_constants(query, key, value, by_keys, options),
            )
            for target, total in zip((prefix.key_grad, prefix.value_grad), sums, strict=True):
                if target is not total:
                    target.copy_(total)
        sinks_grad = None
        if sinks is not None:
            mass = torch.exp(sinks.float()[None, :, None] - lse)
            sinks_grad = (mass * delta).sum((0, 2)).neg().to(sinks.dtype)
        return query_grad, key_grad, value_grad, sinks_grad, None, None, None


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    prefix: Prefix,
    options: _Options,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp."""
    from kernels.shared_prefix_attention import triton_kernels

    prefix_key, prefix_value = _dense_last(prefix.key), _dense_last(prefix.value)
    batch, heads, tokens, _ = query.shape
    # In memory [batch, tokens, heads, dim], as the projection after attention reads it.
    out = query.new_empty(batch, tokens, heads, value.shape[3]).transpose(1, 2)
    lse = torch.empty(batch, heads, tokens, dtype=torch.float32, device=query.device)
    rows = tokens * heads // key.shape[1]
    shape, _ = tiles(query, value)
    launch(
        triton_kernels.forward,
        (_blocks(rows, shape.rows), key.shape[1], batch),
        (
            *(query, key, value, prefix_key, prefix_value, sinks, out, lse),
            *_strides(query, key, value, prefix_key, prefix_value, out),
            *(tokens, len(prefix), *options.numbers),
        ),
        **_constants(query, key, value, shape, options),
        SINKS=sinks is not None,
    )
    return out, lse


def _constants(
    query: Tensor, key: Tensor, value: Tensor, shape: Tile, options: _Options
) -> dict[str, Any]:
    return {
        "GROUP": query.shape[1] // key.shape[1],
        "WIDTH": query.shape[3],
        "PADDED": _power_of_two(query.shape[3]),
        "VALUE_WIDTH": value.shape[3],
        "VALUE_PADDED": _power_of_two(value.shape[3]),
        "ROWS": shape.rows,
        "KEYS": shape.keys,
        "WINDOWED": options.window is not None,
        "CAPPED": options.softcap is not None,
        "PRECISION": precision(query),
        "num_warps": shape.warps,
        "num_stages": shape.stages,
    }


def precision(query: Tensor) -> str:
    """How the kernels multiply."""
    return "interpreter" if query.device.type == "cpu" else gpu_precision(query)


def gpu_precision(query: Tensor) -> str:
    return "tf32x3" if query.dtype == torch.float32 else "ieee"


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    """All strides but the last, which is 1."""
    return tuple(stride for x in tensors for stride in x.stride()[:-1])


def _dense_last(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _power_of_two(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())


def _blocks(total: int, size: int) -> int:
    return -(-total // size)
