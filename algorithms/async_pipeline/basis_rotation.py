"""Basis rotation: Adam in the bases in which a matrix' gradients vary most, for stale gradients.

Source: arXiv 2602.03515 (after SOAP, 2409.11321, and full-rank GaLore), with quasi-hyperbolic
momentum (1810.06801). For a weight W `[m, n]` with the (stale, clipped) gradient G, and orthonormal
bases U of its left and V of its right side, a missing one the identity:

    L <- b2 L + (1-b2) G G^T,  R <- b2 R + (1-b2) G^T G                       source second
    refresh U and V in the first step and in every f-th                      bases.py
    g = U^T G V,  u <- b1 u + (1-b1) g,  v <- b2 v + (1-b2) g∘g
    û = u / (1-b1^t),  v̂ = v / (1-b2^t)
    D = U [((1-nu) g + nu û) / (sqrt(v̂) + eps + delta sqrt(mean v̂))] V^T
    W <- (1 - lr wd) W - lr D

Where it departs from the released code. u is kept in the rotated space and carried along when
a basis changes, which is the same in exact arithmetic and saves a product in every step; v is only
sorted, as there. eps is added where AdamW adds it. delta, which is not there, stops what rounding
leaves of zeros from becoming steps of full size: in the first step g is diagonal, and whenever
gradients have a null space g is zero in it. A gradient that is not finite changes nothing. What is
not a matrix gets AdamW, with the same nu.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from algorithms.async_pipeline import bases
from algorithms.async_pipeline.config import Geometry, Source
from algorithms.common.cohort import Cohort, Kept
from algorithms.common.dense import by_kind
from algorithms.common.matrix_optimizer import Group, MatrixOptimizer, Params, require

log = logging.getLogger(__name__)

DELTA = 1e-3
"""Of the root mean square of a rotated gradient: what is far below it is rounding."""

SIDES = {"left": -2, "right": -1}


class BasisRotation(MatrixOptimizer):
    """Weights `[..., rows, cols]`, their leading dimensions as many matrices (experts), are
    rotated; all others, and groups with `geometry` none, get AdamW.

    `source` first takes bases from the momentum, second from averaged G G^T and G^T G. `geometry`
    bilateral rotates both sides, unilateral the shorter one, of squares the right one; sides above
    `max_side` never. `refresh_every` is f; with `refresh_blocks` above 1 (source second) a refresh
    turns one of so many blocks of a basis. `nu` 1 is Adam's momentum.

    State of a weight: `exp_avg` and `exp_avg_sq` in its shape, and for each rotated side of length
    s `left_basis` or `right_basis` [..., s, s], with source second also `left_covariance` or
    `right_covariance`. It is float32 for bfloat16 and float16 weights, else in their dtype.
    A weight that requires no gradient has no state until it has a gradient. Gradients should be
    clipped before `step`. Raises `InputError` for a value out of range; `step` too where a group's
    `source`, `geometry` or `max_side` was changed so that state would begin or end.
    """

    _shaping = ("source", "geometry", "max_side")

    _told = False
    """Whether the log has said that a gradient was not finite."""

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        source: Source = "second",
        geometry: Geometry | str = "bilateral",
        refresh_every: int = 10,
        refresh_blocks: int = 1,
        nu: float = 1.0,
        max_side: int = 8192,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "source": source,
            "geometry": geometry,
            "refresh_every": refresh_every,
            "refresh_blocks": refresh_blocks,
            "nu": nu,
            "max_side": max_side,
        }
        super().__init__(params, defaults)

    def _has_matrices(self, group: Group) -> bool:
        return True

    def _takes(self, parameter: Tensor) -> bool:
        return parameter.numel() > 0

    def _waits(self, parameter: Tensor) -> bool:
        return not parameter.requires_grad

    def _check(self, group: Group) -> None:
        geometries = (*get_args(Geometry), "none")
        require("source", group["source"], group["source"] in get_args(Source))
        require("geometry", group["geometry"], group["geometry"] in geometries)
        require("refresh_every", group["refresh_every"], group["refresh_every"] >= 1)
        blocks = group["refresh_blocks"]
        require(
            "refresh_blocks", blocks, blocks == 1 or (blocks > 1 and group["source"] != "first")
        )
        require("nu", group["nu"], 0 <= group["nu"] <= 1)
        require("max_side", group["max_side"], group["max_side"] >= 1)
        _say_what_is_too_long(group)

    def _kept(self, parameter: Tensor, group: Group) -> Kept:
        dtype = _wide(parameter.dtype)
        lead, names = parameter.shape[:-2], ["basis"]
        if group["source"] == "second":
            names.append("covariance")
        kept: Kept = {name: (parameter.shape, dtype) for name in ("exp_avg", "exp_avg_sq")}
        for side in rotated_sides(parameter, group):
            length = parameter.shape[SIDES[side]]
            kept |= {f"{side}_{name}": ((*lead, length, length), dtype) for name in names}
        return kept

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, except that the state of bfloat16 weights stays in float32."""
        super().load_state_dict(state_dict)
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        ours = [parameter for group in self.param_groups for parameter in group["params"]]
        with torch.no_grad():
            for key, parameter in zip(saved, ours, strict=True):
                for name, value in state_dict["state"].get(key, {}).items():
                    self.state[parameter][name].copy_(value)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every weight that has a finite gradient; gradients are left as they are."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        left_out = self._not_finite()
        gradients = [parameter.grad for parameter in left_out]
        for parameter in left_out:
            parameter.grad = None
        super().step()
        for parameter, gradient in zip(left_out, gradients, strict=True):
            parameter.grad = gradient
        return loss

    def _not_finite(self) -> list[Tensor]:
        """Weights whose gradient has no finite norm; the first time the log says so."""
        found: list[Tensor] = []
        for group in self.param_groups:
            for alike in by_kind(each for each in group["params"] if each.grad is not None):
                gradients = [each.grad for each in alike if each.grad is not None]
                dtype = _wide(gradients[0].dtype)  # float16 ends at 65504
                norms = torch.stack(torch._foreach_norm(gradients, dtype=dtype))
                if not math.isfinite(norms.sum()):
                    finite = norms.isfinite().tolist()
                    found += [each for each, fine in zip(alike, finite, strict=True) if not fine]
        if found and not self._told:
            self._told = True
            shapes = ", ".join(sorted({str(tuple(each.shape)) for each in found}))
            log.warning(
                "%d weights of shape %s have a gradient that is not finite: such weights and their"
                " state stay as they are in that step",
                len(found),
                shapes,
            )
        return found

    def _update(self, cohort: Cohort, gradient: Tensor, group: Group) -> None:
        beta1, beta2 = group["betas"]
        first, second = cohort.flat["exp_avg"], cohort.flat["exp_avg_sq"]
        gradient = gradient.to(first.dtype)
        matrices = cohort.matrices(gradient)  # G, and in the end D; [B, rows, cols] by shape
        pairs: list[tuple[bases.Basis, bases.Basis]] = []
        rotates = any(name.endswith("basis") for name in cohort.flat)
        if rotates:
            for index, G in enumerate(matrices):
                _refresh(cohort, index, G, group)
            pairs = [_bases(cohort, index) for index in range(len(matrices))]
            step = torch.empty_like(gradient)  # g, and in the end [...]
            for G, (left, right), g in zip(matrices, pairs, cohort.matrices(step), strict=True):
                bases.rotate(G, left, right, out=g)
        else:
            step = gradient
        first.lerp_(step, 1 - beta1)
        second.mul_(beta2).addcmul_(step, step, value=1 - beta2)
        # 1/(sqrt(v/c) + eps) = sqrt(c)/(sqrt(v) + sqrt(c) eps): v stays as it is kept.
        root = math.sqrt(1 - beta2**cohort.step)
        scale = second.sqrt().add_(root * group["eps"])
        nu = group["nu"]
        step.mul_(1 - nu).add_(first, alpha=nu / (1 - beta1**cohort.step))
        if rotates:
            _add_floor(cohort, scale)
        step.div_(scale)
        if rotates:
            for G, (left, right), d in zip(matrices, pairs, cohort.matrices(step), strict=True):
                bases.unrotate(d, left, right, out=G)
        lr = group["lr"]
        cohort.apply(matrices, [-lr * root] * len(matrices), 1 - lr * group["weight_decay"])


def rotated_sides(parameter: Tensor, group: Group) -> list[str]:
    """Which of `left` and `right` a weight has bases of."""
    if parameter.dim() < 2 or group["geometry"] == "none":
        return []
    rows, cols = parameter.shape[-2:]
    both = group["geometry"] == "bilateral"
    wanted = {"left": both or rows < cols, "right": both or rows >= cols}
    lengths = {"left": rows, "right": cols}
    return [side for side in SIDES if wanted[side] and lengths[side] <= group["max_side"]]


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What a weight's state has: float32 at least."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _say_what_is_too_long(group: Group) -> None:
    unlimited = {**group, "max_side": math.inf}
    cut = {
        tuple(each.shape)
        for each in group["params"]
        if rotated_sides(each, group) != rotated_sides(each, unlimited)
    }
    for shape in sorted(cut):
        log.warning("sides above %d are not rotated: weights %s", group["max_side"], shape)


def _bases(cohort: Cohort, index: int) -> tuple[bases.Basis, bases.Basis]:
    """Left and right of the cohort's shape `index`, `[B, s, s]`."""
    found = [cohort.stacked.get(f"{side}_basis") for side in SIDES]
    left, right = (None if each is None else each[index] for each in found)
    return left, right


def _refresh(cohort: Cohort, index: int, G: Tensor, group: Group) -> None:
    """Average the covariances of the cohort's shape `index`; refresh its bases if that is due."""
    beta1, beta2 = group["betas"]
    for side, factors in {"left": (G, G.mT), "right": (G.mT, G)}.items():
        if covariances := cohort.stacked.get(f"{side}_covariance"):
            covariances[index].baddbmm_(*factors, beta=beta2, alpha=1 - beta2)
    cold = cohort.step == 1
    if not (cold or cohort.step % group["refresh_every"] == 0):
        return
    kept = {name: parts[index] for name, parts in cohort.stacked.items()}
    pair = _bases(cohort, index)
    mean = bases.unrotate(kept["exp_avg"], *pair)
    if group["source"] == "second":
        _follow_covariances(
            kept, cold, group["refresh_blocks"], cohort.step // group["refresh_every"]
        )
    else:
        _follow_momentum(kept, cold, mean.lerp(G, 1 - beta1))
    bases.rotate(mean, *pair, out=kept["exp_avg"])


def _follow_covariances(kept: dict[str, Tensor], cold: bool, blocks: int, turn: int) -> None:
    for side, dim in SIDES.items():
        if f"{side}_basis" not in kept:
            continue
        basis, covariance = kept[f"{side}_basis"], kept[f"{side}_covariance"]
        if cold:
            basis.copy_(bases.eigenbasis(covariance))
            continue
        if blocks == 1:
            new, order = bases.follow(covariance, basis)
        else:
            columns = bases.block_columns(basis.shape[-1], blocks, turn, basis.device)
            new, order = bases.follow_block(covariance, basis, columns)
        basis.copy_(new)
        bases.reorder(kept["exp_avg_sq"], order, dim)


def _follow_momentum(kept: dict[str, Tensor], cold: bool, mean: Tensor) -> None:
    """`mean` is the momentum after this step, `[B, m, n]`, not rotated."""
    sides = [side for side in SIDES if f"{side}_basis" in kept]
    if cold:  # one side alone is the shorter one: see `rotated_sides`
        found = bases.singular_bases(mean, whole=len(sides) == 2)
        for side, vectors in zip(SIDES, found, strict=True):
            if side in sides:
                kept[f"{side}_basis"].copy_(vectors)
    elif len(sides) == 2:
        left, right = (kept[f"{side}_basis"] for side in SIDES)
        new_left, new_right, order = bases.follow_pairs(mean, left, right)
        left.copy_(new_left)
        right.copy_(new_right)
        for dim in SIDES.values():
            bases.reorder(kept["exp_avg_sq"], order, dim)
    elif sides:
        side = sides[0]
        basis = kept[f"{side}_basis"]
        new, order = bases.follow_one_side(mean if side == "left" else mean.mT, basis)
        basis.copy_(new)
        bases.reorder(kept["exp_avg_sq"], order, SIDES[side])


def _add_floor(cohort: Cohort, scale: Tensor) -> None:
    """Add delta sqrt(mean v) of each matrix to the denominators `scale`, flat."""
    parts: Sequence[Tensor] = cohort.matrices(scale)
    for v, part in zip(cohort.stacked["exp_avg_sq"], parts, strict=True):
        part.add_(v.mean(dim=(-2, -1), keepdim=True).sqrt_(), alpha=DELTA)
