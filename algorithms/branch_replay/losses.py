"""Losses on log-probabilities, and their derivatives by them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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
    together: Callable[[Sequence[int], Branches], Tensor] | None = None
    """The sum of the terms of some branches at once, where that is cheaper than one by one."""

    def __post_init__(self) -> None:
        require_callable("PerBranch", self.term)

    def one(self, i: int, log_probs: Tensor) -> Tensor:
        """The term of branch i, a tensor []; raises `InputError` for one without a derivative."""
        term = require_scalar(f"PerBranch: term {i}", self.term(i, log_probs))
        if len(log_probs) and log_probs.requires_grad:
            require_graph(f"PerBranch: term {i}", term)
        return term.reshape(())

    def some(self, chosen: Sequence[int], branches: Branches) -> Tensor:
        """The sum of the terms of branches `chosen`, a tensor []; raises `InputError` as above."""
        if self.together is not None:
            return require_scalar("PerBranch", self.together(chosen, branches)).reshape(())
        terms = [self.one(i, log_probs) for i, log_probs in zip(chosen, branches, strict=True)]
        return torch.stack(terms).sum() if terms else torch.zeros(())

    def __call__(self, branches: Branches) -> Tensor:
        return self.some(range(len(branches)), branches)


def derivative(loss_fn: Callable[[Tensor], Tensor], log_probs: Tensor) -> tuple[float, Tensor]:
    """The loss and its derivative by each of `log_probs`.

    Raises `InputError` unless `loss_fn` returns a scalar that depends on `log_probs`, where there
    are any, and on nothing else that needs a gradient; `NonFiniteError` for inf or NaN.
    """
    leaf = log_probs.detach().clone().requires_grad_()
    found = None
    with torch.enable_grad():  # the caller may have turned it off
        loss = require_scalar("loss_fn", loss_fn(leaf))
        if len(leaf):
            require_graph("loss_fn", loss)
        if loss.requires_grad:
            _refuse_others(loss, leaf)
            (found,) = torch.autograd.grad(loss.reshape(()), leaf, allow_unused=True)
    if found is None:
        found = torch.zeros_like(leaf)
    value = float(loss.detach())
    if not math.isfinite(value) or not bool(torch.isfinite(found).all()):
        raise NonFiniteError(f"the loss of the branches is {value}, or its derivative not finite")
    return value, found


def require_callable(name: str, function: object) -> None:
    """Raise `InputError` unless it can be called."""
    if not callable(function):
        raise InputError(f"{name}: must be a function, not a {type(function).__name__}")


def require_scalar(name: str, value: object) -> Tensor:
    """`value`; raises `InputError` unless it is a real tensor of one element."""
    if not isinstance(value, Tensor):
        raise InputError(f"{name}: must return a scalar tensor, not a {type(value).__name__}")
    if value.numel() != 1 or value.is_complex():
        kind = f"{value.dtype} {list(value.shape)}"
        raise InputError(f"{name}: must return a scalar tensor, not {kind}")
    return value


def require_graph(name: str, loss: Tensor) -> None:
    """Raise `InputError` for a loss of scored tokens that autograd knows no derivative of."""
    if not loss.requires_grad:
        raise InputError(
            f"{name}: does not depend on the log-probabilities, or was detached from them; for no "
            "gradient multiply them by 0"
        )


def _refuse_others(loss: Tensor, leaf: Tensor) -> None:
    """Raise `InputError` if `loss` depends on a tensor that needs a gradient besides `leaf`: only
    log-probabilities are differentiated, so that part would be lost."""
    others = [loss] if loss.grad_fn is None else []
    nodes: list[Any] = [loss.grad_fn] if loss.grad_fn is not None else []
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if type(node).__name__ == "AccumulateGrad":  # a leaf
            others.append(node.variable)
        below = {n for n, _ in node.next_functions if n is not None} - seen
        seen |= below
        nodes.extend(below)
    for other in others:
        if other is not leaf:
            raise InputError(
                f"loss_fn: depends on a tensor {list(other.shape)} that needs a gradient, besides "
                "the log-probabilities; differentiate that part by a backward of your own"
            )
