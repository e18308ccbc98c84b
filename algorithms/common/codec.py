"""How a flat buffer is written for the wire. `Comm.all_reduce_flat` takes any `Codec`."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Codec(Protocol):
    """A code for flat buffers. What it loses is the caller's to keep (error feedback)."""

    def encode(self, flat: Tensor) -> Tensor:
        """Bytes (uint8 [size]) of `flat` [numel]; `size` may depend on its numel and dtype only,
        because every rank must send equally much. Does not change `flat`."""
        ...

    def decode(self, encoded: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Values [numel] of `dtype`; the same bits wherever the same bytes are decoded."""
        ...


class Bf16Codec:
    """Two bytes per value: rounded to bfloat16, to nearest even."""

    def encode(self, flat: Tensor) -> Tensor:
        return flat.to(torch.bfloat16).view(torch.uint8)

    def decode(self, encoded: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        return encoded.view(torch.bfloat16)[:numel].to(dtype)
