"""Muon: momentum of matrices, orthogonalised; in full or in r directions. AdamW for the rest.

`Muon` keeps the whole momentum, as its source (arXiv 2502.16982), in the weights' dtype, in blocks
of int8 or int4, or in `.grad`; between rare exchanges it is MuLoCo's inner optimizer (2505.23725).
`LowRankMuon` keeps the momentum of r directions, and of the others what `.grad` can hold: a share
c of it stays there, and the next backward pass adds to it. With A [m, n] what `.grad` holds,
m <= n after transposing, Q [m, r] orthonormal, b = beta1, t the step:

    Muon           u <- b u + (1-b) A   D = b u / (1-b^t) + (1-b) A
    Muon, grad     .grad <- b A         D = A
    LowRankMuon    g = Q^T A,  R = A - Q g,  u <- b u + (1-b) g,  .grad <- c R
                   D = Q (b u / (1-b^t) + (1-b) g) + (1-c) / (1-c^t) R
    all            W <- (1 - lr wd) W - lr 0.2 sqrt(n) NS(D)

So in span(Q) D is an average that looks ahead as Nesterov does, as with Muon, and outside it a
plain one, with c = 0 the gradient itself. Averages have their bias corrected, where the source has
sums, so that early steps mix momentum and gradient in the same proportion as late ones. NS is
`newton_schulz`, in which the scale of D is lost; 0.2 sqrt(n) gives the step the size of AdamW's.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from torch import Tensor

from algorithms.common.codec import CODECS
from algorithms.common.cohort import Cohort, Kept, is_matrix
from algorithms.common.matrix_optimizer import Group, MatrixOptimizer, Params, require
from algorithms.lordo.moments import LowRank, kept_low_rank
from algorithms.lordo.newton_schulz import newton_schulz_all
from algorithms.lordo.optimizer import add_product, as_moments
from algorithms.lordo.projection import oriented

log = logging.getLogger(__name__)

STEP_SIZE = 0.2
"""Root mean square of a step's entries over lr, about AdamW's (2502.16982, section 2.2)."""


class _Orthogonal(MatrixOptimizer):
    """The step that both share, and momentum in `.grad`.

    Where the state has `carried`, in the weight's shape, that is no further memory: it is the
    weight's `.grad` from the first step on. `zero_grad` of the optimizer leaves it; that of the
    model would lose it. Such a weight moves in every step, also without a new gradient.
    """

    def _move(self, cohort: Cohort, directions: list[Tensor], group: Group) -> None:
        """The step along D `[B, rows, cols]` for each shape, times anything."""
        updates = newton_schulz_all(directions)
        lr = group["lr"]
        scales = [-lr * STEP_SIZE * math.sqrt(max(each.shape[1:])) for each in updates]
        cohort.apply(updates, scales, 1 - lr * group["weight_decay"])

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for cohort in self._cohorts:
            if cohort.step > 0 and "carried" in cohort.flat:
                _leave_in_grad(cohort)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch, except that what is carried stays."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if parameter.grad is None or ("carried" in state and state["step"] > 0):
                    continue
                if set_to_none:
                    parameter.grad = None
                else:
                    parameter.grad.zero_()


def _leave_in_grad(cohort: Cohort) -> None:
    for parameter, state in zip(cohort.parameters, cohort.state, strict=True):
        parameter.grad = state["carried"]


class Muon(_Orthogonal):
    """Momentum in full. Groups with `matrices: True` hold weights `[..., rows, cols]`, their
    leading dimensions as many matrices; other groups get AdamW.

    `momentum`: fp32 keeps it in the weight's dtype (`exp_avg`); grad keeps it in `.grad`
    (`carried`); int8 and int4 keep blocks of 64 with a scale (`exp_avg_blocks`, the bytes of
    `algorithms/common/codec.py`), and weights whose size is no multiple of 64 in their dtype, with
    one line in the log. Gradients should be clipped before `step`, with what they carry. Raises
    `InputError` for a value out of range.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 2e-2,
        betas: tuple[float, float] = (0.8, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        matrices: bool = False,
        momentum: str = "fp32",
    ) -> None:
        own = {"matrices": matrices, "momentum": momentum}
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay} | own
        )

    def _has_matrices(self, group: Group) -> bool:
        return bool(group["matrices"])

    def _check(self, group: Group) -> None:
        kinds = ("fp32", "grad", "int8", "int4")
        require("momentum", group["momentum"], group["momentum"] in kinds)
        if group["matrices"] and group["momentum"] == "grad":
            require("betas", group["betas"], group["betas"][0] > 0)  # the step is that of b A
        codec = CODECS.get(group["momentum"])
        if group["matrices"] and codec is not None:
            block = codec.block
            odd = [each for each in filter(is_matrix, group["params"]) if each.numel() % block]
            if odd:
                log.warning(
                    "%d weights do not fill blocks of %d: momentum uncoded", len(odd), block
                )

    def _kept(self, parameter: Tensor, group: Group) -> Kept:
        codec = CODECS.get(group["momentum"])
        if group["momentum"] == "grad":
            return {"carried": (parameter.shape, parameter.dtype)}
        if codec is None or parameter.numel() % codec.block:
            return {"exp_avg": (parameter.shape, parameter.dtype)}
        block = codec.encode(torch.zeros(codec.block)).numel()
        return {"exp_avg_blocks": ((parameter.numel() // codec.block * block,), torch.uint8)}

    def _update(self, cohort: Cohort, gradient: Tensor, group: Group) -> None:
        beta = group["betas"][0]
        if "carried" in cohort.flat:
            torch.mul(gradient, beta, out=cohort.flat["carried"])
            _leave_in_grad(cohort)
            self._move(cohort, cohort.stacked["carried"], group)
            return
        if "exp_avg" in cohort.flat:
            mean = cohort.flat["exp_avg"].lerp_(gradient, 1 - beta)
        else:
            codec, blocks = CODECS[group["momentum"]], cohort.flat["exp_avg_blocks"]
            mean = codec.decode(blocks, gradient.numel(), gradient.dtype)
            blocks.copy_(codec.encode(mean.lerp_(gradient, 1 - beta)))
        # D / (1-b)
        gradient.add_(mean, alpha=beta / ((1 - beta) * (1 - beta**cohort.step)))
        self._move(cohort, cohort.matrices(gradient), group)


class LowRankMuon(LowRank, _Orthogonal):
    """Momentum of r directions. Groups with a `rank` above 0 hold weights `[..., rows, cols]`,
    their leading dimensions as many matrices; other groups get AdamW.

    State: `projection` [..., m, r] and `exp_avg` [..., r, n], in the weight's dtype or with
    `momentum` bf16 in bfloat16. The projection is random until a `Sync` writes another into it. A
    rank above m becomes m, with one line in the log.

    `carry` is c above; with it the state has `carried`. Gradients should be clipped before `step`,
    with what they carry. Raises `InputError` for a value out of range.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 2e-2,
        betas: tuple[float, float] = (0.8, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        rank: int = 0,
        momentum: str = "fp32",
        carry: float = 0.0,
    ) -> None:
        own = {"rank": rank, "momentum": momentum, "carry": carry}
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay} | own
        )

    def _check(self, group: Group) -> None:
        super()._check(group)
        require("momentum", group["momentum"], group["momentum"] in ("fp32", "bf16"))
        require("carry", group["carry"], 0 <= group["carry"] < 1)

    def _kept(self, parameter: Tensor, group: Group) -> Kept:
        dtype = torch.bfloat16 if group["momentum"] == "bf16" else parameter.dtype
        kept = kept_low_rank(parameter, group["rank"], error=False)
        low = {name: (kept[name][0], dtype) for name in ("projection", "exp_avg")}
        return low | ({"carried": (parameter.shape, parameter.dtype)} if group["carry"] else {})

    def _update(self, cohort: Cohort, gradient: Tensor, group: Group) -> None:
        beta, carry = group["betas"][0], group["carry"]
        matrices = cohort.matrices(gradient)
        bases = [each.to(gradient.dtype) for each in cohort.stacked["projection"]]
        low = torch.cat(
            [
                torch.bmm(Q.mT, oriented(A)).flatten()  # g [B, r, n]
                for A, Q in zip(matrices, bases, strict=True)
            ]
        )
        kept = cohort.flat["exp_avg"]
        mean = kept.to(low.dtype).lerp_(low, 1 - beta)  # in place, unless kept in bfloat16
        kept.copy_(mean)
        # The part of D in span(Q), over the factor of R
        factor = (1 - carry**cohort.step) / (1 - carry)
        inside = torch.mul(low, (1 - beta) * factor)
        inside.add_(mean, alpha=factor * beta / (1 - beta**cohort.step))
        # Products are added in place, as copies of the gradient take longer than they do: D = A +
        # Q (inside - g), and in the end R = D - Q inside.
        _add_products(cohort, matrices, bases, low.neg_().add_(inside), 1.0)
        self._move(cohort, matrices, group)
        if carry:
            torch.mul(gradient, carry, out=cohort.flat["carried"])
            _add_products(cohort, cohort.stacked["carried"], bases, inside, -carry)
            _leave_in_grad(cohort)


def _add_products(
    cohort: Cohort, matrices: list[Tensor], bases: list[Tensor], low: Tensor, sign: float
) -> None:
    for A, Q, part in zip(matrices, bases, as_moments(cohort, low), strict=True):
        add_product(A, Q, part, sign)
