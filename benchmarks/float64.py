"""A context in which a float64 model of `transformers` is one.

The library casts to float32 in norms, rotary embeddings, softmax and recurrences, whatever the
model's dtype; then two orders of the same sums differ by 1e-8 instead of 1e-15.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class _Float64Torch:
    """`torch` for a modeling module, in which float32 is float64."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def true_float64(model: nn.Module) -> Iterator[None]:
    """No cast of `model`'s code leaves float64."""
    names = {type(module).__module__ for module in model.modules()}
    modules: list[Any] = [sys.modules[n] for n in names if n.startswith("transformers.")]
    patched = [module for module in modules if getattr(module, "torch", None) is torch]
    tensor: Any = torch.Tensor
    single = tensor.float
    for module in patched:
        module.torch = _Float64Torch()
    tensor.float = tensor.double
    try:
        yield
    finally:
        tensor.float = single
        for module in patched:
            module.torch = torch
