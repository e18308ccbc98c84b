"""What is minimised: functions of responses' log-probabilities, each with its paper's formula.

A response's log-probabilities are a tensor [tokens], so there is no padding and no mask: which
tokens count follows from lengths, never from a token's value. Symbols: responses i of T_i tokens,
lp the log-probabilities now, old those at sampling, ref those of the reference, A advantages,
rho = exp(lp - old).

Every loss is a sum over tokens (or responses, or pairs) over a count of the whole update, given as
`Totals`. So the losses of its parts, whatever micro-batches or ranks they lie on, add up to that of
the whole; gradients of ranks are summed, not averaged. Departs from the papers in signs (these are
losses) and in cutting log-ratios at +-20, as verl does, before they overflow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

Ragged = Sequence[Tensor]
"""A tensor [tokens] of each response; some may be empty."""

Advantages = Tensor | Ragged
"""One of each response, [responses], or one of each token."""

LOG_RATIO_LIMIT = 20.0
STD_EPSILON = 1e-4


@dataclass(frozen=True)
class Totals:
    """Counts of a whole update: all prompts, micro-batches and ranks."""

    responses: int
    tokens: int

    @classmethod
    def of(cls, parts: Ragged) -> Totals:
        """Where `parts` is the whole update."""
        return cls(len(parts), sum(map(len, parts)))


# Means: how terms of tokens become one loss.


def token_mean(terms: Ragged, totals: Totals) -> Tensor:
    """sum_i sum_t terms / sum_i T_i: every token counts alike (DAPO, 2503.14476, eq. 12)."""
    return _total(terms) / max(totals.tokens, 1)


def sequence_mean(terms: Ragged, totals: Totals) -> Tensor:
    """1/N sum_i 1/T_i sum_t terms: every response counts alike (GRPO, 2402.03300, eq. 3)."""
    flat, lengths = _flat(terms), _lengths(terms)
    weights = lengths.to(flat).clamp(min=1).reciprocal().repeat_interleave(lengths.to(flat.device))
    return (flat * weights).sum() / max(totals.responses, 1)


def sequence_sum(terms: Ragged, totals: Totals, length: int = 1) -> Tensor:
    """1/N sum_i 1/length sum_t terms, `length` a constant (Dr. GRPO, 2503.20783, section 3.2)."""
    return _total(terms) / max(totals.responses, 1) / length


# Advantages of a group: the responses to one prompt.


def group_advantages(rewards: Tensor, *, scale: bool = True) -> Tensor:
    """A_i = (r_i - mean r) / (std r + 1e-4) of rewards [responses] (GRPO, 2402.03300, 4.1.2).

    Dr. GRPO takes no `scale`. The deviation is that of a sample (n - 1). Equal rewards, also those
    of one response alone, give zeros exactly: a mean would leave its rounding, and 1e-4 below it.
    """
    if len(rewards) == 0 or bool((rewards == rewards[0]).all()):
        return torch.zeros_like(rewards)
    centred = rewards - rewards.mean()
    return centred / (rewards.std() + STD_EPSILON) if scale else centred


def rloo_advantages(rewards: Tensor) -> Tensor:
    """A_i = r_i - mean of the others' (RLOO, 2402.14740), which is G/(G-1) (r_i - mean r).

    One response has no others: its advantage is 0.
    """
    return group_advantages(rewards, scale=False) * (len(rewards) / max(len(rewards) - 1, 1))


def gae(reward: float, values: Tensor, gamma: float = 1.0, decay: float = 1.0) -> Tensor:
    """A_t = sum_k (gamma decay)^k delta_(t+k), delta_t = r_t + gamma V_(t+1) - V_t, of `values`
    [tokens] of one response (1506.02438, eq. 16, whose lambda is `decay`).

    The reward comes with the last token, behind which nothing is worth anything; that a response
    was cut off makes no difference. Both 1: A_t = reward - V_t.
    """
    v = [*values.tolist(), 0.0]
    advantages, later = [0.0] * len(values), 0.0
    for t in reversed(range(len(values))):
        earned = reward if t == len(values) - 1 else 0.0
        later = earned + gamma * v[t + 1] - v[t] + gamma * decay * later
        advantages[t] = later
    return values.new_tensor(advantages)


# Policy gradients.


def clipped(
    new: Ragged, old: Ragged, advantages: Advantages, low: float, high: float
) -> list[Tensor]:
    """Terms -min(rho A, clip(rho, 1 - low, 1 + high) A) by token (PPO, 1707.06347, eq. 7)."""
    lengths = _lengths(new)
    ratio = _log_ratio(_flat(new), _flat(old)).exp()
    if isinstance(advantages, Tensor):
        advantage = advantages.to(ratio).repeat_interleave(lengths.to(ratio.device))
    else:
        advantage = _flat(advantages).to(ratio)
    cut = ratio.clamp(1 - low, 1 + high)
    return _ragged(-torch.minimum(ratio * advantage, cut * advantage), lengths)


def ppo(
    new: Ragged,
    old: Ragged,
    advantages: Advantages,
    totals: Totals,
    low: float = 0.2,
    high: float = 0.2,
) -> Tensor:
    """-E_t min(rho A, clip(rho, 1 - low, 1 + high) A), a mean over tokens (1707.06347, eq. 7).

    A is that of `gae` by token; without a value function the group's, one per response.
    """
    return token_mean(clipped(new, old, advantages, low, high), totals)


def grpo(
    new: Ragged,
    old: Ragged,
    advantages: Tensor,
    totals: Totals,
    low: float = 0.2,
    high: float = 0.2,
) -> Tensor:
    """-1/N sum_i 1/T_i sum_t min(rho A_i, clip(rho, 1 - low, 1 + high) A_i) (2402.03300, eq. 3).

    Its KL term is `sequence_mean(kl(...))`.
    """
    return sequence_mean(clipped(new, old, advantages, low, high), totals)


def dr_grpo(
    new: Ragged,
    old: Ragged,
    advantages: Tensor,
    totals: Totals,
    length: int,
    low: float = 0.2,
    high: float = 0.2,
) -> Tensor:
    """GRPO with a constant `length`, the most tokens a response may have, in place of T_i
    (2503.20783, section 3.2); its advantages have no scale."""
    return sequence_sum(clipped(new, old, advantages, low, high), totals, length)


def dapo(
    new: Ragged,
    old: Ragged,
    advantages: Tensor,
    totals: Totals,
    low: float = 0.2,
    high: float = 0.28,
) -> Tensor:
    """-1/sum_i T_i sum_i sum_t min(rho A_i, clip(rho, 1 - low, 1 + high) A_i), with more room
    above than below (2503.14476, eq. 12)."""
    return token_mean(clipped(new, old, advantages, low, high), totals)


def gspo(
    new: Ragged,
    old: Ragged,
    advantages: Tensor,
    totals: Totals,
    low: float = 3e-4,
    high: float = 4e-4,
) -> Tensor:
    """-1/N sum_i min(s_i A_i, clip(s_i, 1 - low, 1 + high) A_i) with the ratio of the sequence,
    s_i = exp(1/T_i sum_t (lp - old)) (2507.18071, eq. 5 and 7). An empty response has s_i = 1,
    which no weight moves."""
    means = _each_sum([_log_ratio(a, b) / max(len(a), 1) for a, b in zip(new, old, strict=True)])
    ratios = means.exp()
    advantages = advantages.to(ratios)
    cut = ratios.clamp(1 - low, 1 + high)
    return -torch.minimum(ratios * advantages, cut * advantages).sum() / max(totals.responses, 1)


def rloo(new: Ragged, advantages: Tensor, totals: Totals) -> Tensor:
    """-1/N sum_i A_i sum_t lp, whose gradient is REINFORCE's (2402.14740).

    On-policy only: there is no ratio.
    """
    terms = [-advantage * lp for lp, advantage in zip(new, advantages, strict=True)]
    return sequence_sum(terms, totals)


def value_error(values: Ragged, returns: Ragged, totals: Totals) -> Tensor:
    """E_t (V_t - R_t)^2, a mean over tokens (1707.06347, eq. 9); R = A + V of the first step.

    Departs from common code: no clip, which the paper does not have.
    """
    pairs = zip(values, returns, strict=True)
    return token_mean([(v - r).square() for v, r in pairs], totals)


# Preferences.


def winning_pairs(rewards: Tensor) -> Tensor:
    """All pairs of a group of unequal reward: int64 [pairs, 2], the winner first."""
    return (rewards[:, None] > rewards[None, :]).nonzero()


def margins(new: Ragged, ref: Ragged, pairs: Tensor) -> Tensor:
    """h = sum_t (lp - ref) of the winner minus the same of the loser, [pairs]."""
    sums = _each_sum([a - b for a, b in zip(new, ref, strict=True)])
    return sums[pairs[:, 0]] - sums[pairs[:, 1]]


def dpo(new: Ragged, ref: Ragged, pairs: Tensor, total: int, beta: float = 0.1) -> Tensor:
    """-1/n sum log sigmoid(beta h) over pairs [pairs, 2] (2305.18290, eq. 7); n = `total`, the
    pairs of the whole update."""
    return -logsigmoid(beta * margins(new, ref, pairs)).sum() / max(total, 1)


def ipo(new: Ragged, ref: Ragged, pairs: Tensor, total: int, beta: float = 0.1) -> Tensor:
    """1/n sum (h - 1/(2 beta))^2 over pairs (2310.12036, eq. 17, whose tau is `beta`)."""
    return (margins(new, ref, pairs) - 0.5 / beta).square().sum() / max(total, 1)


# Penalties: terms by token, for the mean that goes with the objective.


def kl(new: Ragged, ref: Ragged, kind: str = "k3") -> list[Tensor]:
    """Estimates by token of KL(policy, reference) from the policy's own samples (Schulman 2020).

    k1 = lp - ref; k2 = (lp - ref)^2 / 2; k3 = exp(ref - lp) - (ref - lp) - 1. As a loss on-policy,
    k2 has the gradient of the KL in expectation, k3 that of the KL the other way round, and k1 none
    at all: it belongs in the reward.
    """
    lp, r = _flat(new), _flat(ref)
    if kind == "k1":
        terms = lp - r
    elif kind == "k2":
        terms = (lp - r).square() / 2
    else:
        terms = _log_ratio(r, lp).exp() - (r - lp) - 1
    return _ragged(terms, _lengths(new))


def entropy(new: Ragged) -> list[Tensor]:
    """-lp by token: its mean over own samples estimates the entropy. A number to report: as a loss
    its gradient is none in expectation, see `negative_entropy`."""
    return [-lp for lp in new]


def negative_entropy(new: Ragged) -> list[Tensor]:
    """lp^2 / 2 by token: on-policy its gradient is in expectation that of the entropy of the
    token's distribution, negated: sum_v p log p has the gradient E[log p . grad log p], as
    E[grad log p] = 0. Its value means nothing."""
    return [lp.square() / 2 for lp in new]


def _log_ratio(new: Tensor, old: Tensor) -> Tensor:
    return (new - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _total(terms: Ragged) -> Tensor:
    return _flat(terms).sum()


def _lengths(parts: Ragged) -> Tensor:
    return torch.tensor([len(part) for part in parts], dtype=torch.long)


def _flat(parts: Ragged) -> Tensor:
    """One after the other: what is done by token takes few large steps, not many small ones."""
    return torch.cat(list(parts)) if len(parts) else torch.zeros(0)


def _ragged(flat: Tensor, lengths: Tensor) -> list[Tensor]:
    """Back."""
    return list(torch.split(flat, lengths.tolist()))


def _each_sum(terms: Ragged) -> Tensor:
    """Of each response, [responses]."""
    return torch.stack([part.sum() for part in terms]) if len(terms) else torch.zeros(0)
