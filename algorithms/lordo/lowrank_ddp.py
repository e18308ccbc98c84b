"""Low-rank data parallelism, the baseline that LoRDO is measured against: LDAdam with thin factors.

LDAdam (2410.16103) adapts its projection at every step by one block power iteration. Run on the
mean gradient it would send as much as DDP. Here, as in PowerSGD (1905.13727), workers send two thin
products with factors that all of them share, and never the gradient Ā of a matrix itself. With
A = G + E on every worker, Q `[m, r]` and V `[n, r]` orthonormal, and bars for means:

    sent:   g = Q^T A,  y = A V           and the gradients of all other weights, in one buffer
    E <- A - Q g                          per worker, with error feedback
    u <- b1 u + (1-b1) ḡ,  v <- b2 v + (1-b2) ḡ∘ḡ,  x <- (1 - lr wd) x - lr Q û/(sqrt(v̂) + eps)
    with b = rho Q û + (1-rho) Ā:         Qnew = orth(b V),  Vnew = orth(b^T Q)
    u, v turn into Qnew,  E <- E + b1/(1-b1) (Q u - Qnew unew)       (LDAdam's generalised feedback)

b V and b^T Q follow from ȳ and ḡ alone. Departures from LDAdam: V is one step old, so Qnew serves
the next step rather than this one; and where LDAdam begins with the singular vectors of the first
gradient, Q and V are random in the first step, which turns them by Ā alone (rho 0).
A step sends 4 (D + W + P) bytes in fp32: D other entries, W = sum r n, P = sum r m.

Ranks start alike and stay alike, as under DDP: if all compute the same from the same means.
"""

from __future__ import annotations

import torch
from torch import Tensor

from algorithms.common.cohort import Cohort, Kept
from algorithms.common.matrix_optimizer import Group, Params, require
from algorithms.lordo.moments import LowRank, begin_basis, kept_low_rank
from algorithms.lordo.optimizer import add_product, as_moments, is_tall
from algorithms.lordo.projection import oriented, orthonormal, rotate, usable


class LowRankDdp(LowRank):
    """Groups with a `rank` above 0 hold weights `[..., rows, cols]`; other groups get AdamW.

    In a loop, after clipping: `apply(mean of contribution() over the workers)`. A world of one may
    call `step`. State of a matrix: `projection` Q, `right` V, `exp_avg` and `exp_avg_sq`, with
    `error_feedback` `error`, all as in `LoRDO`. Raises `InputError` for a value out of range.
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
        error_feedback: bool = False,
        rho: float = 0.908,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "rank": rank,
            "error_feedback": error_feedback,
            "rho": rho,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def contribution(self) -> Tensor:
        """What this worker sends, flat: other weights' gradients, then all g, then all y.

        A weight without a gradient sends zeros, since others may have one.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        given = [
            self._give(cohort, cohort.advance(), self.param_groups[cohort.group])
            for cohort in self._due()
        ]
        gradients = [each.reshape(-1) for each in self._dense_gradients()]
        return torch.cat([*gradients, *[g for g, _ in given], *[y for _, y in given]])

    @torch.no_grad()
    def apply(self, mean: Tensor) -> None:
        """Update all weights from the mean of the workers' contributions."""
        gradients = self._dense_gradients()
        cohorts = self._due()
        sizes = [each.numel() for each in gradients]
        sizes += [cohort.flat["exp_avg"].numel() for cohort in cohorts]
        sizes += [cohort.flat["projection"].numel() for cohort in cohorts]
        parts = list(torch.split(mean, sizes))
        for gradient in gradients:
            gradient.copy_(parts.pop(0).view_as(gradient))
        for index, cohort in enumerate(cohorts):
            group = self.param_groups[cohort.group]
            self._take(cohort, parts[index], parts[len(cohorts) + index], group)
        self._update_dense()

    def _check(self, group: Group) -> None:
        super()._check(group)
        require("rho", group["rho"], 0 <= group["rho"] <= 1)

    def _kept(self, parameter: Tensor, group: Group) -> Kept:
        kept = kept_low_rank(parameter, group["rank"], group["error_feedback"])
        (*lead, rank, long), dtype = kept["exp_avg"]
        return {**kept, "right": ((*lead, long, rank), dtype)}

    def _begin(self, state: dict[str, Tensor]) -> None:
        super()._begin(state)
        begin_basis(state["right"], seed=1)

    def _update(self, cohort: Cohort, gradient: Tensor, group: Group) -> None:
        self._take(cohort, *self._give(cohort, gradient, group), group)

    def _dense_gradients(self) -> list[Tensor]:
        members = [each for weights in self._others for each in weights.parameters]
        return [each.grad for each in members if each.grad is not None]

    def _give(self, cohort: Cohort, gradient: Tensor, group: Group) -> tuple[Tensor, Tensor]:
        """g and y of a cohort, flat; E becomes what g leaves."""
        feedback = group["error_feedback"]
        seen = cohort.matrices(cohort.flat["error"].add_(gradient) if feedback else gradient)
        bases, rights = cohort.stacked["projection"], cohort.stacked["right"]
        lows = [Q.mT @ oriented(A) for A, Q in zip(seen, bases, strict=True)]  # [B, r, n]
        lefts = [oriented(A) @ V for A, V in zip(seen, rights, strict=True)]  # [B, m, r]
        if feedback:
            for A, Q, g in zip(seen, bases, lows, strict=True):
                add_product(A, Q, g, -1.0)
        return _flat(lows), _flat(lefts)

    def _take(self, cohort: Cohort, low: Tensor, left: Tensor, group: Group) -> None:
        """Update a cohort from the mean g and y, flat, then turn to the next Q and V."""
        beta1, beta2 = group["betas"]
        first = cohort.flat["exp_avg"].lerp_(low, 1 - beta1)
        second = cohort.flat["exp_avg_sq"].mul_(beta2).addcmul_(low, low, value=1 - beta2)
        corrections = (1 - beta1**cohort.step, 1 - beta2**cohort.step)
        mean = first / corrections[0]
        step = mean / (second / corrections[1]).sqrt_().add_(group["eps"])
        bases = cohort.stacked["projection"]
        updates = [
            (part.mT @ Q.mT) if is_tall(each[0]) else (Q @ part)
            for each, Q, part in zip(cohort.alike, bases, as_moments(cohort, step), strict=True)
        ]
        lr = group["lr"]
        cohort.apply(updates, [-lr] * len(updates), 1 - lr * group["weight_decay"])
        share = group["rho"] if cohort.step > 1 else 0.0
        blended = as_moments(cohort, share * mean + (1 - share) * low)  # (b^T Q)^T
        means = as_moments(cohort, mean)
        lefts = torch.split(left, [Q.numel() for Q in bases])
        for index, (Q, y) in enumerate(zip(bases, lefts, strict=True)):
            V = cohort.stacked["right"][index]
            forward = share * (Q @ (means[index] @ V)) + (1 - share) * y.view_as(Q)
            self._turn(cohort, index, forward, blended[index].mT, corrections, group)

    def _turn(
        self,
        cohort: Cohort,
        index: int,
        forward: Tensor,
        backward: Tensor,
        corrections: tuple[float, float],
        group: Group,
    ) -> None:
        """To Qnew = orth(b V) and Vnew = orth(b^T Q), where those are not zero."""
        Q, V, first, second = (
            cohort.stacked[name][index] for name in ("projection", "right", "exp_avg", "exp_avg_sq")
        )
        moved = (usable(forward) & usable(backward))[:, None, None]
        new = torch.where(moved, orthonormal(forward), Q)
        turned, variance = rotate(first, second, new.mT @ Q, *corrections)
        turned, variance = torch.where(moved, turned, first), torch.where(moved, variance, second)
        if group["error_feedback"]:
            beta1 = group["betas"][0]
            error = oriented(cohort.stacked["error"][index])
            error.add_(Q @ first - new @ turned, alpha=beta1 / (1 - beta1))
        V.copy_(torch.where(moved, orthonormal(backward), V))
        Q.copy_(new)
        first.copy_(turned)
        second.copy_(variance)


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([each.flatten() for each in tensors])
