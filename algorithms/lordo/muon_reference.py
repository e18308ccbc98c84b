"""The slow twin of `muon.py` and `newton_schulz.py`: one matrix at a time, formulas as written."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from algorithms.lordo.newton_schulz import POLAR, Quintics


def orthogonalise(X: Tensor, quintics: Quintics = POLAR) -> Tensor:
    """The iteration on one matrix [m, n] of any orientation."""
    if X.shape[0] > X.shape[1]:
        return orthogonalise(X.T, quintics).T
    norm = X.norm()
    if norm == 0:
        return torch.zeros_like(X)
    X = X / (1.01 * norm)
    for a, b, c in quintics:
        A = X @ X.T
        X = a * X + b * A @ X + c * A @ A @ X
    return X


class MatrixReference:
    """Momentum of one matrix [rows, cols]; low-rank when it is given a projection Q [m, r]. The
    share `carry` of the gradient, outside Q, is added to the next one."""

    def __init__(self, beta: float, carry: float = 0.0, Q: Tensor | None = None) -> None:
        self.beta = beta
        self.Q = Q
        self.carry = carry
        self.carried: Tensor | None = None
        self.u: Tensor | None = None
        self.t = 0

    def step(self, W: Tensor, G: Tensor, lr: float, weight_decay: float) -> Tensor:
        """The weight after the step."""
        if W.shape[0] > W.shape[1]:
            return self.step(W.T, G.T, lr, weight_decay).T
        b, c, Q = self.beta, self.carry, self.Q
        self.t += 1
        A = G if self.carried is None else self.carried + G
        g = A if Q is None else Q.T @ A
        self.u = (1 - b) * g if self.u is None else b * self.u + (1 - b) * g
        low = b * self.u / (1 - b**self.t) + (1 - b) * g
        R = A if Q is None else A - Q @ g
        D = low if Q is None else Q @ low + (1 - c) / (1 - c**self.t) * R
        self.carried = c * R
        size = 0.2 * math.sqrt(W.shape[1])
        return (1 - lr * weight_decay) * W - lr * size * orthogonalise(D)


class AdamWReference:
    """AdamW of one weight."""

    def __init__(self, betas: tuple[float, float], eps: float) -> None:
        self.betas = betas
        self.eps = eps
        self.u = self.v = torch.zeros(())
        self.t = 0

    def step(self, W: Tensor, G: Tensor, lr: float, weight_decay: float) -> Tensor:
        """The weight after the step."""
        b1, b2 = self.betas
        self.t += 1
        self.u = b1 * self.u + (1 - b1) * G
        self.v = b2 * self.v + (1 - b2) * G * G
        mean, variance = self.u / (1 - b1**self.t), self.v / (1 - b2**self.t)
        return (1 - lr * weight_decay) * W - lr * mean / (variance.sqrt() + self.eps)
