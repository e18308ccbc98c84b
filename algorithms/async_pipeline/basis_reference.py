"""Basis rotation once more, slow and plain: one matrix at a time, straight from the formulas.

The twin of `basis_rotation.py`: it keeps the momentum in the original space, finds each product
anew, and has no blocks. Tests compare their values in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class RotatedMatrix:
    """State of one matrix `[m, n]`, and how it is updated. Which bases there are is said by
    `left` and `right`; `f` is the interval of refreshes."""

    beta1: float
    beta2: float
    eps: float
    nu: float
    delta: float
    source: str
    f: int
    left: bool
    right: bool
    t: int = 0
    M: Tensor = field(default_factory=lambda: torch.zeros(()))
    V: Tensor = field(default_factory=lambda: torch.zeros(()))
    U: Tensor | None = None
    Vr: Tensor | None = None
    L: Tensor = field(default_factory=lambda: torch.zeros(()))
    R: Tensor = field(default_factory=lambda: torch.zeros(()))

    def step(
        self, W: Tensor, G: Tensor, lr: float, decay: float, given: tuple[Tensor | None, ...] = ()
    ) -> Tensor:
        """W after an update with the gradient G. `given` are the first U and Vr: of a matrix that
        is not square some of their columns are anybody's choice."""
        self.t += 1
        self.M = self.beta1 * self.M + (1 - self.beta1) * G
        self.L = self.beta2 * self.L + (1 - self.beta2) * G @ G.T
        self.R = self.beta2 * self.R + (1 - self.beta2) * G.T @ G
        if self.t == 1:
            self.U, self.Vr = given or self.first_bases()
        elif self.t % self.f == 0:
            self.refresh()
        Gr, Mr = self.rotated(G), self.rotated(self.M)
        self.V = self.beta2 * self.V + (1 - self.beta2) * Gr**2
        mean, variance = Mr / (1 - self.beta1**self.t), self.V / (1 - self.beta2**self.t)
        rotates = self.left or self.right
        floor = self.delta * math.sqrt(float(variance.mean())) if rotates else 0.0
        N = (1 - self.nu) * Gr + self.nu * mean
        D = N / (variance.sqrt() + self.eps + floor)
        if self.U is not None:
            D = self.U @ D
        if self.Vr is not None:
            D = D @ self.Vr.T
        return W - lr * decay * W - lr * D

    def rotated(self, X: Tensor) -> Tensor:
        """U^T X Vr."""
        if self.U is not None:
            X = self.U.T @ X
        return X if self.Vr is None else X @ self.Vr

    def first_bases(self) -> tuple[Tensor | None, Tensor | None]:
        """Eigenvectors of L and R, or singular vectors of M, the largest first."""
        if self.source == "second":
            U, Vr = (torch.linalg.eigh(C).eigenvectors.flip(1) for C in (self.L, self.R))
        else:
            U, _, Vh = torch.linalg.svd(self.M)
            Vr = Vh.T
        return (U if self.left else None), (Vr if self.right else None)

    def refresh(self) -> None:
        """One step of orthogonal iteration; V is sorted like the directions."""
        U, Vr = self.U, self.Vr
        rows, cols = self.V.shape
        if self.source == "second" or U is None or Vr is None:
            # A single basis of the momentum is that of M M^T or M^T M.
            L, R = (
                (self.L, self.R)
                if self.source == "second"
                else (self.M @ self.M.T, self.M.T @ self.M)
            )
            if U is not None:
                order = sorted(range(rows), key=lambda j: -float(U[:, j] @ L @ U[:, j]))
                self.V = self.V[order]
                self.U = torch.linalg.qr(L @ U[:, order]).Q
            if Vr is not None:
                order = sorted(range(cols), key=lambda j: -float(Vr[:, j] @ R @ Vr[:, j]))
                self.V = self.V[:, order]
                self.Vr = torch.linalg.qr(R @ Vr[:, order]).Q
            return
        M, k = self.M, min(rows, cols)

        def energy(j: int) -> float:
            return float((M @ Vr[:, j]).norm() ** 2 + (M.T @ U[:, j]).norm() ** 2)

        order = sorted(range(k), key=lambda j: -energy(j))
        self.V = self.V[order + list(range(k, rows))][:, order + list(range(k, cols))]
        self.U = torch.linalg.qr(torch.cat([M @ Vr[:, order], U[:, k:]], dim=1)).Q
        self.Vr = torch.linalg.qr(torch.cat([M.T @ U[:, order], Vr[:, k:]], dim=1)).Q
