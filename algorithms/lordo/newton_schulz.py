"""Newton-Schulz: every singular value of a matrix brought near 1, with matrix products only.

Source: Muon (Jordan et al., 2024, kellerjordan.github.io/posts/muon; arXiv 2502.16982), steps
X <- a X + b (X X^T) X + c (X X^T)^2 X from X / ||X||_F on. Muon takes its quintic five times. We
take four quintics, each the best for what the ones before it leave, found as in Polar Express
(2505.16932): a step less, and values end between 0.77 and 1.20 where Muon's end between 0.68 and
1.21.

Two ways to the same numbers. In bfloat16 each step is applied to X, as in Muon. In float32 and
float64 all steps are taken on the m x m Gram matrix: the steps are polynomials in A = X X^T, they
commute, so A <- S A S with S = a I + b A + c A^2 follows the Gram matrix of X, and the product P of
all S is applied to X once. That is less work from n = 1.4 m on, and matrices of one m and any n
share their products. Roundings of A are amplified as small singular values are, so float32
ends within 3e-4 of exact arithmetic; bfloat16 would not be usable.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Quintics = Sequence[tuple[float, float, float]]
"""a, b and c of each step."""

MUON = ((3.4445, -4.7750, 2.0315),) * 5

POLAR = (
    (8.3007, -24.0375, 17.4661),
    (4.0034, -2.9228, 0.5419),
    (3.4709, -2.5494, 0.5002),
    (2.4901, -1.8343, 0.4368),
)
"""Minimax for singular values in [0.003, 1] of the norm; all but the last for x / 1.01, so that no
rounding takes a value to where the next polynomial grows."""

MARGIN = 1.01
"""Iterations begin at X / (1.01 ||X||), for the same reason."""

SMALLEST = 1e-15
"""Norms below it are taken for this one; their squares would be lost in float32."""


def newton_schulz(X: Tensor, quintics: Quintics = POLAR, bf16: bool | None = None) -> Tensor:
    """`X` [B, m, n] with its singular values brought near 1; same shape and dtype.

    A matrix of zeros stays one. A matrix with inf or NaN comes out as NaN throughout, and the
    others of the batch are as they would be without it. Norms above 1e19 are infinite in float32:
    NaN or zeros. `bf16`: compute in bfloat16; by default on CUDA only.
    """
    return newton_schulz_all([X], quintics, bf16)[0]


def newton_schulz_all(
    batches: Sequence[Tensor], quintics: Quintics = POLAR, bf16: bool | None = None
) -> list[Tensor]:
    """`newton_schulz` of each [B, m, n]; those of the same short side share their products."""
    wide = [X if X.shape[1] <= X.shape[2] else X.mT for X in batches]
    found: list[Tensor] = [X.new_empty(0) for X in wide]
    together: dict[int, list[int]] = {}
    for i, X in enumerate(wide):
        if X.is_cuda if bf16 is None else bf16:
            Y = _on_matrix(X.to(torch.bfloat16), quintics).to(X.dtype)
            found[i] = Y if X is batches[i] else Y.mT.contiguous()
        else:
            together.setdefault(X.shape[1], []).append(i)
    for same in together.values():
        sizes = [len(wide[i]) for i in same]
        grams = torch.cat([wide[i] @ wide[i].mT for i in same])
        factors = torch.split(_on_gram(grams, quintics), sizes)
        for i, P in zip(same, factors, strict=True):
            # In the layout of the batch: a transposed copy takes longer than the product.
            found[i] = P @ batches[i] if wide[i] is batches[i] else batches[i] @ P.mT
    return found


def _on_matrix(X: Tensor, quintics: Quintics) -> Tensor:
    """[B, m, n], m <= n: all steps on X."""
    norm = torch.linalg.vector_norm(X, dim=(1, 2), keepdim=True, dtype=torch.float32)
    X = X / (norm.clamp(min=SMALLEST) * MARGIN).to(X.dtype)
    for a, b, c in quintics:
        A = X @ X.mT
        X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return X


def _on_gram(A: Tensor, quintics: Quintics) -> Tensor:
    """P [B, m, m] for A = X X^T [B, m, m], so that P X is what the steps make of X. Overwrites A;
    all products go to memory that is there already."""
    square = A.diagonal(dim1=1, dim2=2).sum(dim=1)[:, None, None].clamp_(min=SMALLEST**2)
    square *= MARGIN**2
    A /= square
    S, P, spare = torch.empty_like(A), torch.empty_like(A), torch.empty_like(A)
    for step, (a, b, c) in enumerate(quintics):
        torch.baddbmm(A, A, A, beta=b, alpha=c, out=S)
        S.diagonal(dim1=1, dim2=2).add_(a)
        if step < len(quintics) - 1:
            torch.bmm(S, A, out=spare)
            torch.bmm(spare, S, out=A)
        if step == 0:
            S, P = P, S
        else:
            torch.bmm(S, P, out=spare)
            P, spare = spare, P
    return P.mul_(square.rsqrt_())
