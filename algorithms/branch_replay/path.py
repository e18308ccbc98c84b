"""Keys and values of the open nodes, from the root down to the one being run, and their cotangents.

One buffer per attention layer, allocated once: positions form a stack, a sibling overwrites what
its elder left. Cotangents are summed in float32 (float64 for float64), whatever the model computes
in: bfloat16 would lose branches of small advantage. Layers that differ in their window share the
layout; all keys are kept, since the sweep needs them again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.shared_prefix_attention import Prefix


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which cotangents of tensors of `dtype` are summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Path:
    """Buffers `[kv_heads, positions, dim]` by layer; `[prompts * kv_heads, positions, dim]` of
    several prompts of equal length, which attention takes for more heads."""

    def __init__(self, positions: int, *, offload: bool = False, bf16: bool = False) -> None:
        self.positions = positions
        self.offload = offload
        self.bf16 = bf16
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.key_grads: dict[int, Tensor] = {}
        """Empty while no cotangents are collected."""
        self.value_grads: dict[int, Tensor] = {}
        self._collected: torch.dtype | None = None

    @property
    def remote(self) -> bool:
        """Whether attention has to fetch the prefix: it lies elsewhere or in another dtype."""
        return self.offload or self.bf16

    def write(self, layer: int, start: int, key: Tensor, value: Tensor) -> None:
        """Keep key and value `[prompts, kv_heads, tokens, dim]` from position `start` on."""
        end = start + key.shape[2]
        for buffers, new in ((self.keys, key), (self.values, value)):
            if layer not in buffers:
                dtype = torch.bfloat16 if self.bf16 else new.dtype
                heads = new.shape[0] * new.shape[1]
                buffers[layer] = self._empty(heads, new.shape[3], dtype, new.device)
            buffers[layer][:, start:end].copy_(new.flatten(0, 1))
        self._add_cotangents()

    def reserve(self, positions: int) -> None:
        """Make room for `positions` in all."""
        if positions <= self.positions:
            return
        held, self.positions = self.positions, positions
        for buffers in (self.keys, self.values):
            for layer, old in buffers.items():
                buffers[layer] = self._empty(old.shape[0], old.shape[2], old.dtype, old.device)
                buffers[layer][:, :held].copy_(old)

    def open_cotangents(self, dtype: torch.dtype) -> None:
        """Collect cotangents from now on; `dtype` is what the model computes in."""
        self._collected = accumulator(dtype)
        self._add_cotangents()

    def close_cotangents(self) -> None:
        """Drop them."""
        self._collected = None
        self.key_grads.clear()
        self.value_grads.clear()

    def _add_cotangents(self) -> None:
        if self._collected is None:
            return
        for buffers, grads in ((self.keys, self.key_grads), (self.values, self.value_grads)):
            for layer, kept in buffers.items():
                if layer not in grads:
                    heads, _, dim = kept.shape
                    empty = self._empty(heads, dim, self._collected, kept.device)
                    grads[layer] = empty.zero_()

    def _empty(self, heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        pinned = self.offload and (device.type == "cuda" or torch.cuda.is_available())
        return torch.empty(
            (heads, self.positions, dim),
            dtype=dtype,
            device="cpu" if self.offload else device,
            pin_memory=pinned,
        )

    def prefix(self, layer: int, end: int, window: int | None) -> Prefix:
        """What tokens from position `end` on can see of the positions before."""
        seen = slice(first_seen(end, window), end)
        if not self.key_grads or not torch.is_grad_enabled():
            return Prefix(self.keys[layer][:, seen], self.values[layer][:, seen], None, None)
        return Prefix(
            self.keys[layer][:, seen],
            self.values[layer][:, seen],
            self.key_grads[layer][:, seen],
            self.value_grads[layer][:, seen],
        )

    def clear_cotangents(self, start: int, end: int) -> None:
        """Before the first child of the node at `start` to `end` is replayed."""
        for grads in (*self.key_grads.values(), *self.value_grads.values()):
            grads[:, start:end].zero_()

    def cotangents(self, layer: int, start: int, end: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Of keys and values of the node at `start` to `end`: `[prompts, kv_heads, tokens, dim]`,
        the first two as in `like`."""
        pair = (self.key_grads[layer][:, start:end], self.value_grads[layer][:, start:end])
        key, value = (
            grad.to(device=like.device, dtype=like.dtype).view(*like.shape[:3], -1) for grad in pair
        )
        return key, value


def first_seen(end: int, window: int | None) -> int:
    """First position that a token at `end` sees; later tokens see no earlier one."""
    return max(0, end - window + 1) if window else 0
