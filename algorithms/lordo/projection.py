"""Projections of matrices onto r directions, and how Adam's moments follow a new projection.

LoRDO (2602.04396) keeps moments in the span of Q `[m, r]`, orthonormal columns on the shorter side
m <= n of a weight; the source leaves open how Q is found. `top_r` offers the leading left singular
vectors, one warm power iteration, or columns of a fixed cosine basis (DCT-AdamW, 2505.17967).
`rotate` is LDAdam's (2410.16103). Everything is batched: B matrices of one shape at a time.

Signs follow a convention, so equal input gives equal bits on equal machines; across machines see
`algorithms/lordo/agreement.py`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from algorithms.lordo.config import Compute


def oriented(matrices: Tensor) -> Tensor:
    """`[..., rows, cols]` as `[..., m, n]` with m <= n: a view, transposed where it is tall."""
    return matrices.mT if matrices.shape[-2] > matrices.shape[-1] else matrices


def usable(matrices: Tensor) -> Tensor:
    """Which of `[B, m, n]` have directions: bool `[B]`.

    False where an entry is not finite, and where all are so small that their squares underflow.
    """
    return _are_usable(matrices.abs().amax(dim=(1, 2)))


def _are_usable(largest: Tensor) -> Tensor:
    smallest = math.sqrt(torch.finfo(largest.dtype).tiny)
    return (largest >= smallest) & largest.isfinite()


def top_r(
    matrices: Tensor, rank: int, compute: Compute = "svd", previous: Tensor | None = None
) -> Tensor:
    """Leading directions Q `[B, m, r]` of matrices `[B, m, n]`, r <= m <= n, in their dtype.

    svd: the left singular vectors of the r largest singular values, in descending order.
    power: the orthonormalised D D^T Q of the previous Q (of a fixed random one without it).
    dct: the r columns of the orthonormal cosine basis that hold most of D, in order of frequency.
    A matrix that is not `usable` keeps its previous Q (without one: the first r unit vectors).
    """
    batch, short, _ = matrices.shape
    largest = matrices.abs().amax(dim=(1, 2), keepdim=True)
    good = _are_usable(largest)
    # Scaled to a largest entry of 1, so that no product over- or underflows.
    scaled = torch.where(good, matrices / torch.where(good, largest, 1), 0)
    if compute == "svd":
        found = _leading(scaled, rank)
    elif compute == "power":
        start = previous
        if start is None:
            start = random_orthonormal(batch, short, rank, 0, like=matrices)
        found = orthonormal(scaled @ (scaled.mT @ start))
    else:
        found = _leading_frequencies(scaled, rank)
    if previous is None:
        previous = torch.eye(short, rank, dtype=matrices.dtype, device=matrices.device)
    return torch.where(good, _signed(found), previous).contiguous()


def _leading(matrices: Tensor, rank: int) -> Tensor:
    """Through the small Gram matrix, which takes a third of an SVD's time for m = n / 4; in float64
    because it squares the singular values."""
    wide = matrices.double()
    vectors: Tensor = torch.linalg.eigh(wide @ wide.mT).eigenvectors
    return vectors[..., -rank:].flip(-1).to(matrices.dtype)


def _leading_frequencies(matrices: Tensor, rank: int) -> Tensor:
    basis = cosine_basis(matrices.shape[1], like=matrices)
    energy = (basis.T @ matrices).square().sum(dim=2)  # [B, m]
    chosen = energy.topk(rank, dim=1).indices.sort(dim=1).values
    return basis.T[chosen].mT


def cosine_basis(size: int, *, like: Tensor) -> Tensor:
    """The orthonormal DCT-II `[size, size]`; column k is the cosine of frequency k."""
    points = torch.arange(size, dtype=torch.float64) + 0.5
    basis = torch.cos(torch.outer(points, torch.arange(size)) * (math.pi / size))
    basis *= math.sqrt(2 / size)
    basis[:, 0] = 1 / math.sqrt(size)
    return basis.to(like)


def random_orthonormal(batch: int, short: int, rank: int, seed: int, *, like: Tensor) -> Tensor:
    """Random orthonormal columns `[batch, short, rank]` in dtype and device of `like`.

    A pure function of sizes and `seed`, drawn on the CPU. QR of such a matrix is well conditioned,
    so even another LAPACK gives the same up to rounding.
    """
    generator = torch.Generator().manual_seed(seed % 2**63)
    drawn = torch.randn(batch, short, rank, generator=generator, dtype=torch.float64)
    return _signed(torch.linalg.qr(drawn).Q).to(like)


def orthonormal(columns: Tensor) -> Tensor:
    """Q of the QR factorisation of `[..., m, r]`; float32 for types that have none."""
    wide = columns if columns.dtype == torch.float64 else columns.float()
    basis: Tensor = torch.linalg.qr(wide).Q
    return basis.to(columns.dtype)


def _signed(columns: Tensor) -> Tensor:
    """Each column `[..., m, r]` times the sign that makes its largest entry positive."""
    largest = columns.abs().argmax(dim=-2, keepdim=True)
    return columns * columns.gather(-2, largest).sign()


def overlap(new: Tensor, old: Tensor) -> Tensor:
    """||new^T old||^2 / r of `[B, m, r]`: float64 `[B]`, 1 where both span one space, r/m by
    chance."""
    return (new.double().mT @ old.double()).square().sum(dim=(1, 2)) / new.shape[2]


def rotate(
    first: Tensor,
    second: Tensor,
    turn: Tensor,
    correction1: Tensor | float,
    correction2: Tensor | float,
) -> tuple[Tensor, Tensor]:
    """Moments u, v `[B, r, n]` in the basis that `turn` R = Qnew^T Qold `[B, r, r]` leads to.

    With û = u / c1 and v̂ = v / c2, where c = 1 - beta^t (`[B, 1, 1]` or one number, not 0):
    u <- R u and v <- c2 |(R∘R)(v̂ - û²) + (R û)²|: the variance turns as if directions were
    uncorrelated in the old basis. v̂ < û² happens early and after averages at different periods;
    without the absolute value it would leave negative entries.
    """
    mean = first / correction1
    variance = second / correction2 - mean.square()
    turned = turn.square() @ variance + (turn @ mean).square()
    return turn @ first, turned.abs() * correction2
