"""Stages that sleep instead of computing, so that many fit on few cores. Their messages are real.

A layer of c seconds takes a third of them forward, a third for the gradient of its input and a
third for that of its weight. The last two are separate nodes of the graph, so whoever asks for one
gradient waits for that one alone: the halves of zero bubble's backward take c / 3 each.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn


class Nap(torch.autograd.Function):
    """The identity, which takes so many seconds forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        time.sleep(ctx.seconds)
        return gradients[0], None, None


class Layer(nn.Module):
    """Of `[..., width]`, in `seconds` forward and backward together."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(width))
        self.weight = nn.Parameter(torch.zeros(width))
        self.third = seconds / 3

    def forward(self, x: Tensor) -> Tensor:
        """Adds both weights; the shift gives the first layer of a model an input with a gradient,
        as an embedding does."""
        nap: Tensor = Nap.apply(x + self.shift, self.third, self.third)  # type: ignore[no-untyped-call]
        return nap + Nap.apply(self.weight, 0.0, self.third)  # type: ignore[no-any-return, no-untyped-call]


def stage(layers: int, width: int, seconds: float) -> nn.Module:
    """So many layers, `seconds` a microbatch for all together."""
    return nn.Sequential(*(Layer(width, seconds / layers) for _ in range(layers)))
