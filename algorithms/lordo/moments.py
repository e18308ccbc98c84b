"""What optimizers with low-rank moments share: which weights have them, shapes, first values.

A weight is `[..., rows, cols]`; its leading dimensions count as matrices of their own. With m the
shorter side and n the longer, its state is Q `[..., m, r]`, u and v `[..., r, n]`.
"""

from __future__ import annotations

import logging
import math

from torch import Tensor

from algorithms.common.cohort import Kept, is_matrix
from algorithms.common.matrix_optimizer import Group, MatrixOptimizer, require
from algorithms.lordo.projection import random_orthonormal

log = logging.getLogger(__name__)


class LowRank(MatrixOptimizer):
    """Groups with a `rank` above 0 have matrices; their state begins with a random projection, the
    same for all matrices of a shape and on every worker."""

    def _has_matrices(self, group: Group) -> bool:
        return bool(group["rank"] > 0)

    def _check(self, group: Group) -> None:
        """Has one line in the log for each shape whose shorter side is below the rank."""
        rank = group["rank"]
        require("rank", rank, rank >= 0)
        shapes = {tuple(each.shape[-2:]) for each in group["params"] if is_matrix(each)}
        for shape in sorted(shapes):
            if rank > min(shape):
                log.warning("rank %d is cut to %d for weights %s", rank, min(shape), shape)

    def _begin(self, state: dict[str, Tensor]) -> None:
        begin_basis(state["projection"], seed=0)


def kept_low_rank(parameter: Tensor, rank: int, error: bool) -> Kept:
    """Shapes and dtypes of a matrix's low-rank state."""
    *lead, rows, cols = parameter.shape
    short, long = min(rows, cols), max(rows, cols)
    rank = min(rank, short)
    shapes: dict[str, tuple[int, ...]] = {
        "projection": (*lead, short, rank),
        "exp_avg": (*lead, rank, long),
        "exp_avg_sq": (*lead, rank, long),
    }
    if error:
        shapes["error"] = (*lead, rows, cols)
    return {name: (shape, parameter.dtype) for name, shape in shapes.items()}


def begin_basis(basis: Tensor, seed: int) -> None:
    """Fill `[..., side, r]` with random orthonormal columns."""
    *lead, side, rank = basis.shape
    drawn = random_orthonormal(math.prod(lead), side, rank, seed, like=basis)
    basis.copy_(drawn.view_as(basis))
