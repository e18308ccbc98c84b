"""The objectives once more, token by token in scalars, as their papers write them.

Every function takes a whole update: lists of responses, each a list of scalar tensors. Reference
of `objectives.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Scalars = Sequence[Sequence[Tensor]]
Term = Callable[[int, int], Tensor]


def group_advantages(rewards: list[float], scale: bool = True) -> list[float]:
    """(r_i - mean) / (std + 1e-4), std with n - 1; 0 where all are equal."""
    n = len(rewards)
    if len(set(rewards)) <= 1:
        return [0.0] * n
    mean = sum(rewards) / n
    std = (sum((r - mean) ** 2 for r in rewards) / (n - 1)) ** 0.5
    return [(r - mean) / (std + 1e-4 if scale else 1.0) for r in rewards]


def rloo_advantages(rewards: list[float]) -> list[float]:
    """r_i less the mean of all others; 0 for one alone."""
    others = [[r for j, r in enumerate(rewards) if j != i] for i in range(len(rewards))]
    return [r - sum(o) / len(o) if o else 0.0 for r, o in zip(rewards, others, strict=True)]


def gae(reward: float, values: list[float], gamma: float, decay: float) -> list[float]:
    """The sum of all later temporal differences, written out for each token."""
    n = len(values)
    v = [*values, 0.0]
    deltas = [(reward if t == n - 1 else 0.0) + gamma * v[t + 1] - v[t] for t in range(n)]
    return [sum((gamma * decay) ** k * deltas[t + k] for k in range(n - t)) for t in range(n)]


def clip_term(
    new: Scalars, old: Scalars, a: Sequence[float | list[float]], low: float, high: float
) -> Term:
    """The negative clipped surrogate of token t of response i, whose advantage is its own or one of
    each token."""

    def term(i: int, t: int) -> Tensor:
        of_response = a[i]
        advantage = of_response[t] if isinstance(of_response, list) else of_response
        return _surrogate((new[i][t] - old[i][t]).exp(), advantage, low, high)

    return term


def kl_term(new: Scalars, ref: Scalars, kind: str) -> Term:
    """The estimate k1, k2 or k3 of token t of response i."""

    def term(i: int, t: int) -> Tensor:
        log_ratio = ref[i][t] - new[i][t]
        if kind == "k3":
            return log_ratio.exp() - 1 - log_ratio
        return -log_ratio if kind == "k1" else 0.5 * log_ratio**2

    return term


def token_mean(like: Scalars, term: Term) -> Tensor:
    """Over all tokens."""
    terms = [term(i, t) for i, part in enumerate(like) for t in range(len(part))]
    return _sum(terms) / len(terms)


def sequence_mean(like: Scalars, term: Term) -> Tensor:
    """Over responses, of the mean over a response's tokens."""
    means = [_sum([term(i, t) for t in range(len(p))]) / max(len(p), 1) for i, p in enumerate(like)]
    return _sum(means) / len(like)


def sequence_sum(like: Scalars, term: Term, length: int = 1) -> Tensor:
    """Over responses, of the sum over a response's tokens by a constant length."""
    return _sum([term(i, t) / length for i, p in enumerate(like) for t in range(len(p))]) / len(
        like
    )


def gspo(new: Scalars, old: Scalars, a: list[float], low: float, high: float) -> Tensor:
    """One clipped ratio a response: the geometric mean of its tokens'."""
    terms = []
    for i, (x, y) in enumerate(zip(new, old, strict=True)):
        ratio = (_sum([p - q for p, q in zip(x, y, strict=True)]) / max(len(x), 1)).exp()
        terms.append(_surrogate(ratio, a[i], low, high))
    return _sum(terms) / len(terms)


def preference(
    new: Scalars, ref: Scalars, rewards: list[float], beta: float, identity: bool
) -> Tensor:
    """DPO, or IPO with `identity`, over all pairs of unequal reward of one group."""
    terms = []
    for i, x in enumerate(rewards):
        for j, y in enumerate(rewards):
            if x > y:
                h = _log_ratio(new[i], ref[i]) - _log_ratio(new[j], ref[j])
                loss = (h - 1 / (2 * beta)) ** 2 if identity else (1 + (-beta * h).exp()).log()
                terms.append(loss)
    return _sum(terms) / len(terms)


def _surrogate(ratio: Tensor, a: float, low: float, high: float) -> Tensor:
    if a > 0 and ratio > 1 + high:
        return torch.tensor(-(1 + high) * a, dtype=ratio.dtype)
    if a < 0 and ratio < 1 - low:
        return torch.tensor(-(1 - low) * a, dtype=ratio.dtype)
    return -ratio * a


def _log_ratio(new: Sequence[Tensor], ref: Sequence[Tensor]) -> Tensor:
    return _sum([x - y for x, y in zip(new, ref, strict=True)])


def _sum(terms: Sequence[Tensor]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for term in terms:
        total = total + term
    return total
