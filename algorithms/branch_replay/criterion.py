"""An objective's config -> advantages of a group and the loss of its responses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from algorithms.branch_replay import objectives
from algorithms.branch_replay.config import ObjectiveConfig
from algorithms.branch_replay.objectives import Advantages, Ragged, Totals

Surrogate = Callable[[Ragged, Ragged, Any, Totals], Tensor]
Mean = Callable[[Ragged, Totals], Tensor]


class Criterion:
    """What `config` asks for; `max_tokens` is the most that a response may have."""

    def __init__(self, config: ObjectiveConfig, max_tokens: int) -> None:
        self.config = config
        low, high = config.clip
        dr_grpo = partial(objectives.dr_grpo, length=max_tokens, low=low, high=high)
        fixed = partial(objectives.sequence_sum, length=max_tokens)
        surrogates: dict[str, tuple[Surrogate, Mean]] = {
            "grpo": (partial(objectives.grpo, low=low, high=high), objectives.sequence_mean),
            "dr_grpo": (dr_grpo, fixed),
            "dapo": (partial(objectives.dapo, low=low, high=high), objectives.token_mean),
            "ppo": (partial(objectives.ppo, low=low, high=high), objectives.token_mean),
            "gspo": (partial(objectives.gspo, low=low, high=high), objectives.sequence_mean),
            "rloo": (_rloo, objectives.sequence_sum),
        }
        if not config.pairwise:
            self._surrogate, self._mean = surrogates[config.name]

    def advantages(self, rewards: Tensor) -> Tensor:
        """Of a group's rewards [responses]; of no use in pairs."""
        if self.config.name == "rloo":
            return objectives.rloo_advantages(rewards)
        return objectives.group_advantages(rewards, scale=self.config.name != "dr_grpo")

    def loss(
        self, new: Ragged, old: Ragged, ref: Ragged | None, advantages: Advantages, totals: Totals
    ) -> Tensor:
        """Of responses with their `advantages`: a sum over responses, so it may be taken of
        each alone. `ref`, the reference's log-probabilities, with a KL only."""
        loss = self._surrogate(new, old, advantages, totals)
        if self.config.kl:
            assert ref is not None
            terms = objectives.kl(new, ref, self.config.kl_kind)
            loss = loss + self.config.kl * self._mean(terms, totals)
        if self.config.entropy:
            terms = objectives.negative_entropy(new)
            loss = loss + self.config.entropy * self._mean(terms, totals)
        return loss

    def returns(self, rewards: Tensor, values: Ragged) -> tuple[list[Tensor], list[Tensor]]:
        """Advantages by token of responses with `rewards` [responses], and what their values should
        have been; `values` without a graph."""
        config = self.config
        pairs = zip(rewards.tolist(), values, strict=True)
        advantages = [objectives.gae(r, v, config.gamma, config.gae_lambda) for r, v in pairs]
        return advantages, [a + v for a, v in zip(advantages, values, strict=True)]

    def value_loss(self, values: Ragged, returns: Ragged, totals: Totals) -> Tensor:
        """Of `value` above 0: likewise a sum over responses."""
        return self.config.value * objectives.value_error(values, returns, totals)

    def pair_loss(self, new: Ragged, ref: Ragged, pairs: Tensor, total: int) -> Tensor:
        """Of `dpo` and `ipo`: pairs int64 [pairs, 2] of responses, of `total` in the update."""
        of_pairs = objectives.dpo if self.config.name == "dpo" else objectives.ipo
        return of_pairs(new, ref, pairs, total, beta=self.config.beta)

    def ratios(self, new: Ragged, old: Ragged) -> Tensor:
        """What the clip looks at: of all tokens, or for `gspo` of all sequences, flat."""
        logs = [a - b for a, b in zip(new, old, strict=True) if len(a)]
        if self.config.name == "gspo":
            logs = [log.mean()[None] for log in logs]
        return torch.cat(logs).exp() if logs else torch.zeros(0)


def _rloo(new: Ragged, old: Ragged, advantages: Tensor, totals: Totals) -> Tensor:
    return objectives.rloo(new, advantages, totals)
