"""The projections of one worker's low-rank weights: the first, later ones, and moments that turn.

Works on any optimizer whose state of a weight `[..., rows, cols]` holds `projection` `[..., m, r]`,
`exp_avg` `[..., r, n]`, perhaps `exp_avg_sq` in the same shape, and `step`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from algorithms.common.seeding import mix
from algorithms.lordo.config import LowRankConfig
from algorithms.lordo.projection import (
    oriented,
    overlap,
    random_orthonormal,
    rotate,
    top_r,
    usable,
)

log = logging.getLogger(__name__)

Agree = Callable[[Tensor], Tensor]

SAME_SPACE = 1 - 1e-6
"""Overlap from which on two projections span the same space; the old one is kept."""


class Bases:
    """The projections of `named` low-rank weights, refreshed together.

    `agree` makes a flat tensor equal on all workers (`algorithms/lordo/agreement.py`).
    """

    def __init__(
        self,
        named: Sequence[tuple[str, Parameter]],
        optimizer: Optimizer,
        config: LowRankConfig,
        seed: int,
        agree: Agree | None,
    ) -> None:
        self.named = list(named)
        self.from_first_gradient = config.projection in ("global", "frozen")
        self.refreshes = config.projection in ("global", "random")
        self.optimizer = optimizer
        self.config = config
        self.seed = seed
        self.agree = agree
        self._groups = group_of_each(optimizer)
        self.overlaps: dict[str, float] = {}
        """Of the last refresh, by name: of the new space with the old, mean over matrices."""
        self._alike: dict[tuple[object, ...], list[tuple[str, Parameter]]] = {}
        for name, parameter in self.named:
            basis = self._state(parameter)["projection"]
            key = (basis.shape[-2:], max(parameter.shape[-2:]), basis.dtype, basis.device)
            self._alike.setdefault(key, []).append((name, parameter))
        if config.projection != "local":
            self._write([self._drawn(members, "first") for members in self._alike.values()])

    @torch.no_grad()
    def find(self, matrices: Mapping[str, Tensor], step: int) -> list[Tensor]:
        """New projections from `matrices` by name, in the weights' shapes; equal on all workers,
        which `agree` sees to. Changes nothing that another call would see.

        Weights whose matrix has no direction keep theirs, with one line in the log.
        """
        found, self.overlaps = [], {}
        for members in self._alike.values():
            old = self._stacked(members, "projection")
            if self.config.projection == "random":
                new = self._drawn(members, step)
            else:
                directions = torch.cat(
                    [_batched(oriented(matrices[name])) for name, _ in members]
                ).to(old)
                new = top_r(directions, old.shape[2], self.config.compute, old)
                self._report(members, usable(directions), step)
            same = overlap(new, old)
            self._note(members, same)
            found.append(torch.where((same > SAME_SPACE)[:, None, None], old, new))
        return self._agreed(found)

    def _agreed(self, found: list[Tensor]) -> list[Tensor]:
        if self.agree is None:
            return found
        flat = self.agree(torch.cat([each.flatten() for each in found]))
        parts = torch.split(flat, [each.numel() for each in found])
        return [part.view_as(each) for part, each in zip(parts, found, strict=True)]

    @torch.no_grad()
    def turn(self, found: list[Tensor]) -> None:
        """Take what `find` gave; moments turn with it."""
        for members, new in zip(self._alike.values(), found, strict=True):
            old = self._stacked(members, "projection")
            # A kept projection keeps the moments' bits: old^T old is one only up to rounding.
            moved = (new != old).any(dim=(1, 2), keepdim=True)
            turn = new.mT @ old
            first = self._stacked(members, "exp_avg")
            turned = turn @ first
            if "exp_avg_sq" in self._state(members[0][1]):
                second = self._stacked(members, "exp_avg_sq")
                turned, variance = rotate(first, second, turn, *self._corrections(members, first))
                self._unstack(members, "exp_avg_sq", torch.where(moved, variance, second))
            self._unstack(members, "exp_avg", torch.where(moved, turned, first))
        self._write(found)

    def _write(self, projections: list[Tensor]) -> None:
        for members, new in zip(self._alike.values(), projections, strict=True):
            self._unstack(members, "projection", new)

    def _drawn(self, members: list[tuple[str, Parameter]], when: int | str) -> Tensor:
        """Random projections `[B, m, r]` that depend on seed, name and `when` only."""
        drawn = []
        for name, parameter in members:
            old = _batched(self._state(parameter)["projection"])
            count, short, rank = old.shape
            seed = mix("projection", self.seed, when, name)
            drawn.append(random_orthonormal(count, short, rank, seed, like=old))
        return torch.cat(drawn)

    def _corrections(self, members: list[tuple[str, Parameter]], like: Tensor) -> list[Tensor]:
        """1 - beta^t of every matrix for both betas, `[B, 1, 1]`; 1 before the first step, when
        moments are 0."""
        values: tuple[list[float], list[float]] = ([], [])
        for _, parameter in members:
            state = self._state(parameter)
            betas = self.optimizer.param_groups[self._groups[parameter]]["betas"]
            step, count = int(state["step"]), _batched(state["exp_avg"]).shape[0]
            for place, beta in enumerate(betas):
                values[place].extend([1 - beta**step if step else 1.0] * count)
        return [
            torch.tensor(each, dtype=like.dtype, device=like.device)[:, None, None]
            for each in values
        ]

    def _report(self, members: list[tuple[str, Parameter]], good: Tensor, step: int) -> None:
        if bool(good.all()):
            return
        counts = [_batched(parameter).shape[0] for _, parameter in members]
        for (name, _), part in zip(members, torch.split(good, counts), strict=True):
            if not bool(part.all()):
                log.warning(
                    "step %d: the projection of %s is kept, what it would come from is zero or"
                    " not finite",
                    step,
                    name,
                )

    def _note(self, members: list[tuple[str, Parameter]], same: Tensor) -> None:
        counts = [_batched(parameter).shape[0] for _, parameter in members]
        for (name, _), part in zip(members, torch.split(same, counts), strict=True):
            self.overlaps[name] = part.mean().item()

    def _stacked(self, members: list[tuple[str, Parameter]], key: str) -> Tensor:
        return torch.cat([_batched(self._state(parameter)[key]) for _, parameter in members])

    def _unstack(self, members: list[tuple[str, Parameter]], key: str, values: Tensor) -> None:
        targets = [_batched(self._state(parameter)[key]) for _, parameter in members]
        parts = torch.split(values, [target.shape[0] for target in targets])
        torch._foreach_copy_(targets, list(parts))

    def _state(self, parameter: Parameter) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.optimizer.state[parameter]
        return state


def group_of_each(optimizer: Optimizer) -> dict[Tensor, int]:
    """Which of the optimizer's groups each parameter is in; its options may change any time."""
    return {
        parameter: index
        for index, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }


def _batched(matrices: Tensor) -> Tensor:
    """`[..., a, b]` as `[B, a, b]`; a view where the memory allows."""
    return matrices.flatten(0, -3) if matrices.dim() > 2 else matrices[None]
