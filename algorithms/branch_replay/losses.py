"""Losses on log-probabilities, and their derivatives by them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from algorithms.common.errors import InputError, NonFiniteError

Branches = list[Tensor]
"""Log-probabilities of each branch of a tree, left to right: [tokens] of the scored nodes on its
path."""


@dataclass(frozen=True)
class PerBranch:
    """A loss that is the sum of `term(i, log_probs)` over branches i.

    Clipped ratios with known advantages and denominators are of this kind. Such a loss needs no
    pass of its own to find its derivative, so branches run once instead of twice; there are then
    no two passes to compare.
    """

    term: Callable[[int, Tensor], Tensor]

    def __call__(self, branches: Branches) -> Tensor:
        terms = [self.term(i, log_probs).reshape(()) for i, log_probs in enumerate(branches)]
        return torch.stack(terms).sum() if terms else torch.zeros(())


def derivative(loss_fn: Callable[[Tensor], Tensor], log_probs: Tensor) -> tuple[float, Tensor]:
    """The loss and its derivative by each of `log_probs`.

    Raises `InputError` unless `loss_fn` returns a scalar, `NonFiniteError` for inf or NaN.
    """
    leaf = log_probs.detach().clone().requires_grad_()
    with torch.enable_grad():
        loss = loss_fn(leaf)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise InputError("loss_fn: must return a scalar tensor")
    value = float(loss.detach())
    if not loss.requires_grad:  # no token is scored, or the loss is a constant
        found = None
    else:
        (found,) = torch.autograd.grad(loss.reshape(()), leaf, allow_unused=True)
    if found is None:
        found = torch.zeros_like(leaf)
    if not bool(torch.isfinite(loss)) or not bool(torch.isfinite(found).all()):
        raise NonFiniteError(f"the loss of the branches is {value}, or its derivative not finite")
    return value, found
