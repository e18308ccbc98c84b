"""Matrices that are updated together: their state lies in a few flat buffers.

A step then launches a few kernels per cohort, or per shape, instead of a few per weight. What
`Optimizer.state` holds of a weight are views, so a sync or a checkpoint that writes into them
writes into the buffers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import Parameter

from algorithms.common.errors import InputError

ELEMENTS = 1 << 22
"""Largest cohort of several weights: beyond it one product keeps the machine busy, and the copy of
the gradient would only take memory."""

Kept = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""What is kept of one weight: name -> shape and dtype."""

Layout = tuple[list[int], list[tuple[int, ...]]]
"""Sizes and shapes of the parts of a flat buffer."""


def is_matrix(parameter: Tensor) -> bool:
    """Whether a weight has matrices: 0-d, 1-D and empty ones have none."""
    return parameter.dim() >= 2 and parameter.numel() > 0


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
            layout = self._layout([kept(each[0])[name][0] for each in self.alike])
            self.stacked[name] = _stacked(flat, layout)
        self._weights = self._layout([each[0].shape for each in self.alike])

    def _layout(self, shapes: Sequence[tuple[int, ...]]) -> Layout:
        """Of buffers that have parts of these shapes for one weight of each shape."""
        counts = [len(each) * math.prod(s[:-2]) for each, s in zip(self.alike, shapes, strict=True)]
        stacked = [(count, *s[-2:]) for count, s in zip(counts, shapes, strict=True)]
        return [math.prod(shape) for shape in stacked], stacked

    def restore(self, given: Sequence[dict[str, Tensor]]) -> None:
        """Take over each weight's state; all have the same `step`."""
        for state, values in zip(self.state, given, strict=True):
            take_over(state, values)
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
        return _stacked(flat, self._weights)

    def apply(self, updates: Sequence[Tensor], scales: Sequence[float], decay: float) -> None:
        """W <- decay W + scale U, with U `[B, rows, cols]` and a scale for each shape."""
        if decay != 1:
            torch._foreach_mul_(self.parameters, decay)
        for each, update, scale in zip(self.alike, updates, scales, strict=True):
            parts = update.view(len(each), *each[0].shape).unbind()
            torch._foreach_add_(each, parts, alpha=scale)


def _stacked(flat: Tensor, layout: Layout) -> list[Tensor]:
    """Views of a flat buffer."""
    sizes, shapes = layout
    return [part.view(s) for part, s in zip(flat.split_with_sizes(sizes), shapes, strict=True)]


def take_over(state: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Copy what is `given` into a weight's `state`. Raises `InputError` for that of another kind of
    optimizer or shape of weight."""
    for name, tensor in state.items():
        if name not in given or given[name].shape != tensor.shape:
            raise InputError(f"state_dict: holds no {name} of shape {tuple(tensor.shape)}")
        tensor.copy_(given[name])


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
