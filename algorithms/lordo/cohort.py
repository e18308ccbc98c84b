"""Matrices that are updated together: their state lies in a few flat buffers.

A step then launches a few kernels per cohort, or per shape, instead of a few per weight. What
`Optimizer.state` holds of a weight are views, so a sync or a checkpoint that writes into them
writes into the buffers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import Parameter

ELEMENTS = 1 << 22
"""Largest cohort of several weights: beyond it one product keeps the machine busy, and the copy of
the gradient would only take memory."""

Kept = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""What is kept of one weight: name -> shape and dtype."""


class Cohort:
    """Weights `[..., rows, cols]` of one group, dtype and device that have seen equally many
    gradients; leading dimensions count as matrices of their own."""

    def __init__(
        self, parameters: Iterable[Parameter], group: int, kept: Callable[[Tensor], Kept]
    ) -> None:
        self.parameters: list[Tensor] = sorted(parameters, key=lambda parameter: parameter.shape)
        self.group = group
        self.step = 0
        self.alike = [list(each) for _, each in groupby(self.parameters, lambda p: p.shape)]
        """Weights of one shape each."""
        self._steps = torch.zeros(len(self.parameters))  # on the CPU: nobody waits for it
        self.state: list[dict[str, Tensor]] = [{"step": count} for count in self._steps]
        """Of each weight; views, zero at first."""
        self.flat: dict[str, Tensor] = {}
        """By name, the tensors of all weights one after the other."""
        self.stacked: dict[str, list[Tensor]] = {}
        """By name, those of each shape as `[B, ...]`; views."""
        for name, (_, dtype) in kept(self.parameters[0]).items():
            shapes = [kept(parameter)[name][0] for parameter in self.parameters]
            sizes = [math.prod(shape) for shape in shapes]
            flat = torch.zeros(sum(sizes), dtype=dtype, device=self.parameters[0].device)
            for state, shape, part in zip(
                self.state, shapes, torch.split(flat, sizes), strict=True
            ):
                state[name] = part.view(shape)
            self.flat[name] = flat
            self.stacked[name] = self._stacked(
                flat, [kept(each[0])[name][0] for each in self.alike]
            )

    def _stacked(self, flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """`shapes`: of one weight's part, for each shape of weights."""
        sizes = [len(e) * math.prod(s) for e, s in zip(self.alike, shapes, strict=True)]
        return [p.view(-1, *s[-2:]) for p, s in zip(torch.split(flat, sizes), shapes, strict=True)]

    def restore(self, given: Sequence[dict[str, Tensor]]) -> None:
        """Take over each weight's state; all have the same `step`."""
        for state, values in zip(self.state, given, strict=True):
            for name, tensor in state.items():
                tensor.copy_(values[name])
        self.step = int(self._steps[0])

    def advance(self) -> Tensor:
        """Count a step; all gradients, one after the other: a copy, or the state `carried` itself
        where that is what the weights have as gradients."""
        self.step += 1
        self._steps += 1
        if "carried" in self.flat and all(
            parameter.grad is state["carried"]
            for parameter, state in zip(self.parameters, self.state, strict=True)
        ):
            return self.flat["carried"]
        gradients = [parameter.grad for parameter in self.parameters]
        return torch.cat([each.reshape(-1) for each in gradients if each is not None])

    def matrices(self, flat: Tensor) -> list[Tensor]:
        """`flat`, laid out like the gradients, as `[B, rows, cols]` for each shape; views."""
        if flat is self.flat.get("carried"):
            return self.stacked["carried"]
        return self._stacked(flat, [each[0].shape for each in self.alike])

    def apply(self, updates: Sequence[Tensor], scales: Sequence[float], decay: float) -> None:
        """W <- decay W + scale U, with U `[B, rows, cols]` and a scale for each shape."""
        if decay != 1:
            torch._foreach_mul_(self.parameters, decay)
        for each, update, scale in zip(self.alike, updates, scales, strict=True):
            parts = update.view(len(each), *each[0].shape).unbind()
            torch._foreach_add_(each, parts, alpha=scale)


def portions(parameters: Iterable[Parameter]) -> list[list[Parameter]]:
    """Weights sorted by shape, in portions of at most `ELEMENTS`; larger ones are alone."""
    found: list[list[Parameter]] = [[]]
    size = 0
    for parameter in sorted(parameters, key=lambda parameter: parameter.shape):
        if found[-1] and size + parameter.numel() > ELEMENTS:
            found.append([])
            size = 0
        found[-1].append(parameter)
        size += parameter.numel()
    return found
