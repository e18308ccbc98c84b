"""LoRDO's local step: Adam whose moments live in a low-rank subspace, plus a full-rank term.

Source: LoRDO (2602.04396), after LDAdam (2410.16103) and quasi-hyperbolic momentum (1810.06801).
With Q `[m, r]` the projection of a weight, m its shorter side, G its (clipped) gradient and
A = G + E its gradient with the fed-back error (A = G without):

    g = Q^T A,  E <- A - Q g,  u <- b1 u + (1-b1) g,  v <- b2 v + (1-b2) g∘g
    û = u / (1-b1^t),  v̂ = v / (1-b2^t),  den = sqrt(v̂) + eps
    none:      U = Q û/den
    low_rank:  U = Q ((1-ω) g + ω û)/den
    full_rank: U = (1-ω) G / (μ (S(v̂) + eps)) + ω Q û/den
    x <- (1 - lr wd) x - lr U

The source omits bias correction and weight decay, which are AdamW's here, and writes sqrt(v), whose
shape does not fit G, for S(v̂). `scaling` names our readings of it:

    column  sqrt of the mean of v̂ over r: one value per column (the usable one)
    scalar  sqrt of the mean of v̂ over r and n: one value per weight
    energy  sqrt of the sum of v̂ over r, divided by m: right if all of G lies in span(Q)
    lift    sqrt of (Q∘Q) v̂: one value per entry, tiny for rows outside span(Q)

Q is given (`algorithms/lordo/sync.py` sets it), or with `local` follows the weight's own gradients
at every step by LDAdam's block power iteration.
"""

from __future__ import annotations

import math
from typing import get_args

import torch
from torch import Tensor

from algorithms.common.cohort import Cohort, Kept
from algorithms.common.matrix_optimizer import Group, Params, require
from algorithms.lordo.config import Qhm, Scaling
from algorithms.lordo.moments import LowRank, kept_low_rank
from algorithms.lordo.projection import oriented, orthonormal, rotate, top_r


class LoRDO(LowRank):
    """Groups with a `rank` above 0 hold weights `[..., rows, cols]`, their leading dimensions as
    many matrices; other groups get AdamW.

    State of a matrix, in the weight's dtype: `projection` [..., m, r], `exp_avg` and `exp_avg_sq`
    [..., r, n], and with `error_feedback` `error` in the weight's shape. The projection is random
    until a `Sync` writes another into it. A rank above m becomes m, with one line in the log.

    `local` makes the projection follow the weight's own gradients, with the share `rho` of the
    momentum in them. Gradients should be clipped before `step`. Raises `InputError` for a value out
    of range.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-2,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        rank: int = 0,
        qhm: Qhm = "full_rank",
        omega: float = 0.7,
        mu: float = 1.0,
        scaling: Scaling = "column",
        error_feedback: bool = False,
        local: bool = False,
        rho: float = 0.908,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "rank": rank,
            "qhm": qhm,
            "omega": omega,
            "mu": mu,
            "scaling": scaling,
            "error_feedback": error_feedback,
            "local": local,
            "rho": rho,
        }
        super().__init__(params, defaults)

    def _check(self, group: Group) -> None:
        super()._check(group)
        require("qhm", group["qhm"], group["qhm"] in get_args(Qhm))
        require("omega", group["omega"], 0 <= group["omega"] <= 1)
        require("mu", group["mu"], group["mu"] > 0)
        require("scaling", group["scaling"], group["scaling"] in get_args(Scaling))
        require("rho", group["rho"], 0 <= group["rho"] <= 1)

    def _kept(self, parameter: Tensor, group: Group) -> Kept:
        return kept_low_rank(parameter, group["rank"], group["error_feedback"])

    def _update(self, cohort: Cohort, gradient: Tensor, group: Group) -> None:
        beta1, beta2 = group["betas"]
        low = self._project(cohort, gradient, group)
        first, second = cohort.flat["exp_avg"], cohort.flat["exp_avg_sq"]
        first.lerp_(low, 1 - beta1)
        second.mul_(beta2).addcmul_(low, low, value=1 - beta2)
        correction1, correction2 = 1 - beta1**cohort.step, 1 - beta2**cohort.step
        # 1/(sqrt(v/c) + eps) = sqrt(c)/(sqrt(v) + sqrt(c) eps): v stays as it is kept.
        root = math.sqrt(correction2)
        eps, omega = root * group["eps"], group["omega"]
        # From here on low is what Q is multiplied with, over root.
        if group["qhm"] == "low_rank":
            low.mul_(1 - omega).add_(first, alpha=omega / correction1)
        else:
            share = omega if group["qhm"] == "full_rank" else 1.0
            torch.mul(first, share / correction1, out=low)
        low.div_(second.sqrt().add_(eps))
        bases = cohort.stacked["projection"]
        matrices = cohort.matrices(gradient)  # G, and in the end U; [B, rows, cols] by shape
        if group["qhm"] == "full_rank":
            variances = [
                full_rank_variance(group["scaling"], v, Q)
                for v, Q in zip(cohort.stacked["exp_avg_sq"], bases, strict=True)
            ]
            scales = torch.cat([each.view(-1) for each in variances]).sqrt_().add_(eps)
            scales.reciprocal_().mul_(root * (1 - omega) / group["mu"])
            parts = scales.split_with_sizes([each.numel() for each in variances])
            for G, part, like in zip(matrices, parts, variances, strict=True):
                scale = part.view(like.shape)
                G.mul_(scale.mT if is_tall(G) else scale)
        else:
            gradient.zero_()
        for G, Q, part in zip(matrices, bases, as_moments(cohort, low), strict=True):
            add_product(G, Q, part, root)
        lr = group["lr"]
        cohort.apply(matrices, [-lr] * len(matrices), 1 - lr * group["weight_decay"])

    def _project(self, cohort: Cohort, gradient: Tensor, group: Group) -> Tensor:
        """g, flat, once Q has followed the gradients; E becomes what it leaves of them."""
        feedback = group["error_feedback"]
        seen = cohort.matrices(cohort.flat["error"].add_(gradient) if feedback else gradient)  # A
        if group["local"]:
            for index, A in enumerate(seen):
                _follow(cohort, index, oriented(A), group)
        low = torch.empty_like(cohort.flat["exp_avg"])
        bases = cohort.stacked["projection"]
        for A, Q, g in zip(seen, bases, as_moments(cohort, low), strict=True):
            torch.bmm(Q.mT, oriented(A), out=g)
            if feedback:
                add_product(A, Q, g, -1.0)
        return low


def full_rank_variance(scaling: Scaling, variance: Tensor, basis: Tensor) -> Tensor:
    """S(v)^2 of v `[B, r, n]` and Q `[B, m, r]`; shaped to broadcast over `[B, m, n]`."""
    if scaling == "column":
        return variance.mean(dim=1, keepdim=True)
    if scaling == "scalar":
        return variance.mean(dim=(1, 2), keepdim=True)
    if scaling == "energy":
        return variance.sum(dim=1, keepdim=True).div_(basis.shape[1])
    return torch.bmm(basis.square(), variance)


def is_tall(matrices: Tensor) -> bool:
    """Whether `[..., rows, cols]` are stored transposed to [m, n]."""
    return matrices.shape[-2] > matrices.shape[-1]


def add_product(target: Tensor, basis: Tensor, low: Tensor, scale: float) -> None:
    """Add scale Q low to `target` `[B, rows, cols]` in its own layout: a transposed copy of a tall
    matrix takes longer than the product."""
    if is_tall(target):
        target.baddbmm_(low.mT, basis.mT, alpha=scale)
    else:
        target.baddbmm_(basis, low, alpha=scale)


def as_moments(cohort: Cohort, flat: Tensor) -> list[Tensor]:
    """`flat`, laid out like the cohort's moments, as `[B, r, n]` by shape; views."""
    likes = cohort.stacked["exp_avg"]
    parts = flat.split_with_sizes([like.numel() for like in likes])
    return [part.view(like.shape) for part, like in zip(parts, likes, strict=True)]


def _follow(cohort: Cohort, index: int, seen: Tensor, group: Group) -> None:
    """LDAdam's projection: Q <- QR(b b^T Q) with b = rho Q û + (1-rho) A, then u and v turn.

    `seen` A `[B, m, n]` are the gradients of the cohort's shape `index`. The first Q is that of the
    first gradient. With error feedback E also takes what the momentum loses, b1/(1-b1) (Qold uold -
    Qnew unew).
    """
    old, first, second = (
        cohort.stacked[name][index] for name in ("projection", "exp_avg", "exp_avg_sq")
    )
    if cohort.step == 1:
        old.copy_(top_r(seen, old.shape[2], previous=old))
        return
    beta1, beta2 = group["betas"]
    rho, before = group["rho"], cohort.step - 1
    correction1, correction2 = 1 - beta1**before, 1 - beta2**before
    mean = first / correction1
    right = (rho * mean + (1 - rho) * (old.mT @ seen)).mT  # b^T Q [B, n, r]
    new = orthonormal(rho * (old @ (mean @ right)) + (1 - rho) * (seen @ right))
    turned, variance = rotate(first, second, new.mT @ old, correction1, correction2)
    if group["error_feedback"]:
        # Lies outside the new span, so that g does not see it before the next step.
        seen.add_(old @ first - new @ turned, alpha=beta1 / (1 - beta1))
    old.copy_(new)
    first.copy_(turned)
    second.copy_(variance)
