"""Log-probabilities from hidden states, a chunk of tokens at a time.

The head is the model's own forward with its trunk replaced, so that soft-capping, multipliers and
casts of any family apply. In pass 2 the loss is linear in the log-probabilities, so each chunk is
differentiated at once and its logits are dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from algorithms.branch_replay.path import accumulator


class _Given:
    """A trunk's output that has hidden states and nothing else."""

    def __init__(self, hidden: Tensor | None) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor | None:
        return self.last_hidden_state if index == 0 else None

    def __getattr__(self, name: str) -> None:
        return None  # whatever else a head would pass on


class Head:
    """The vocabulary head of `model`, at most `chunk` tokens at once."""

    def __init__(self, model: Any, chunk: int) -> None:
        self.model = model
        self.chunk = chunk
        self._hidden: Tensor | None = None

    def zeros(self, tokens: int, like: Tensor) -> Tensor:
        """Room for what `tokens` tokens are scored, in the accumulator's dtype of `like`."""
        return torch.zeros(tokens, dtype=accumulator(like.dtype), device=like.device)

    def log_probs(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Of `targets` [tokens] after `hidden` [tokens, width]; float32 or float64, no gradient."""
        with torch.no_grad(), self._without_trunk():
            parts = [self._log_probs(hidden[c], targets[c]) for c in self._chunks(len(targets))]
        return torch.cat(parts)

    def logits(self, hidden: Tensor) -> Tensor:
        """After `hidden` [rows, width]: [rows, vocabulary], float32 or float64, no gradient."""
        with torch.no_grad(), self._without_trunk():
            return self._logits(hidden)

    def backward(
        self, hidden: Tensor, targets: Tensor, coefficients: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Differentiate sum(coefficients * log_probs): the head's parameters get their gradient,
        returned are the log-probabilities [tokens] and the cotangent of `hidden`."""
        cotangent = torch.empty_like(hidden)
        parts = []
        with torch.enable_grad(), self._without_trunk():
            for c in self._chunks(len(targets)):
                leaf = hidden[c].detach().requires_grad_()
                log_probs = self._log_probs(leaf, targets[c])
                torch.autograd.backward([log_probs], [coefficients[c].to(log_probs.dtype)])
                assert leaf.grad is not None
                cotangent[c] = leaf.grad
                parts.append(log_probs.detach())
        return torch.cat(parts), cotangent

    def _logits(self, hidden: Tensor) -> Tensor:
        self._hidden = hidden[None]
        logits: Tensor = self.model(inputs_embeds=self._hidden, use_cache=False).logits[0]
        return logits.to(accumulator(logits.dtype))

    def _log_probs(self, hidden: Tensor, targets: Tensor) -> Tensor:
        logits = self._logits(hidden)
        taken = logits.gather(-1, targets[:, None])[:, 0]
        return taken - logits.logsumexp(-1)

    def _chunks(self, tokens: int) -> list[slice]:
        return [slice(i, i + self.chunk) for i in range(0, tokens, self.chunk)]

    @contextmanager
    def _without_trunk(self) -> Iterator[None]:
        trunk = self.model.base_model

        def given(*args: Any, **kwargs: Any) -> _Given:
            return _Given(self._hidden)

        # What a module's call tries first: hooks and a patched `forward` have run in the trunk.
        before = trunk._compiled_call_impl
        trunk._compiled_call_impl = given
        try:
            yield
        finally:
            trunk._compiled_call_impl = before
            self._hidden = None
