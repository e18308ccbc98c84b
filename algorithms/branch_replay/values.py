"""Values: what reward a state still promises, from the hidden state before its next token.

The baseline of PPO (1707.06347, eq. 9). A linear layer beside the vocabulary head, so values come
out of the same replay as log-probabilities, and their gradient goes into the same trunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from algorithms.branch_replay.head import Head
from algorithms.branch_replay.path import accumulator
from algorithms.common.errors import InputError


def add_value_head(model: Any) -> nn.Linear:
    """Make `model.value_head`: one number from a hidden state, 0 at first. It is trained, kept and
    saved as a part of the model; after `add_lora`, which would freeze it."""
    weight: Tensor = model.get_output_embeddings().weight
    head = nn.Linear(weight.shape[1], 1, dtype=accumulator(weight.dtype), device=weight.device)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    model.value_head = head
    return head


class ValuedHead(Head):
    """Scores of two columns: log-probabilities of targets and values before them, [tokens, 2]."""

    def __init__(self, model: Any, chunk: int, value_head: Any) -> None:
        super().__init__(model, chunk)
        if all(module is not value_head for module in model.modules()):
            raise InputError("value_head: must be a part of the model, see add_value_head")
        self.value_head = value_head

    def zeros(self, tokens: int, like: Tensor) -> Tensor:
        return super().zeros(tokens, like)[:, None].repeat(1, 2)

    def _log_probs(self, hidden: Tensor, targets: Tensor) -> Tensor:
        log_probs = super()._log_probs(hidden, targets)
        return torch.stack([log_probs, values(self.value_head, hidden).to(log_probs.dtype)], -1)


def values(value_head: Any, hidden: Tensor) -> Tensor:
    """[tokens] of `hidden` [tokens, width]."""
    found: Tensor = value_head(hidden.to(value_head.weight.dtype))
    return found[:, 0]
