"""What is kept of a weight with low-rank moments: shapes, first values, and which weights have any.

A weight is `[..., rows, cols]`; its leading dimensions count as matrices of their own. With m the
shorter side and n the longer, its state is Q `[..., m, r]`, u and v `[..., r, n]`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from algorithms.lordo.cohort import Kept
from algorithms.lordo.projection import random_orthonormal

log = logging.getLogger(__name__)


def is_matrix(parameter: Tensor) -> bool:
    """Whether a weight has matrices to project: 0-d, 1-D and empty ones have none."""
    return parameter.dim() >= 2 and parameter.numel() > 0


def say_what_is_cut(group: Mapping[str, Any]) -> None:
    """One line in the log for each shape whose shorter side is below the group's rank."""
    rank = group["rank"]
    shapes = {tuple(each.shape[-2:]) for each in group["params"] if is_matrix(each)}
    for shape in sorted(shapes):
        if rank > min(shape):
            log.warning("rank %d is cut to %d for weights %s", rank, min(shape), shape)


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


def begin_low_rank(state: dict[str, Tensor]) -> None:
    """A random projection, the same for all matrices of a shape and on every worker."""
    basis = state["projection"]
    *lead, short, rank = basis.shape
    drawn = random_orthonormal(math.prod(lead), short, rank, 0, like=basis)
    basis.copy_(drawn.view_as(basis))
