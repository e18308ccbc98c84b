"""Random groups of branches, their GRPO loss, and its gradient by full sequences."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from algorithms.branch_replay.losses import PerBranch

CLIP = 0.2


@dataclass(frozen=True)
class Group:
    """A prompt int64 [tokens], its responses of equal length, and an advantage for each."""

    prompt: Tensor
    responses: list[Tensor]
    advantages: Tensor

    @property
    def loss(self) -> PerBranch:
        """GRPO's clipped objective, taken on-policy: old log-probabilities are the present ones."""

        def term(i: int, log_probs: Tensor) -> Tensor:
            ratio = (log_probs - log_probs.detach()).exp()
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            a = self.advantages[i].to(ratio.dtype)
            return -torch.minimum(ratio * a, clipped * a).mean() / len(self.responses)

        return PerBranch(term)

    def take(self, branches: int) -> Group:
        """The same group with its first branches only."""
        return Group(self.prompt, self.responses[:branches], self.advantages[:branches])


def random_group(vocabulary: int, prompt: int, response: int, branches: int) -> Group:
    """Sizes in tokens. Token 0 stands at position 0 and nowhere else."""
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> Tensor:
        return torch.randint(1, vocabulary, (count,), generator=generator)

    opening = tokens(prompt)
    opening[0] = 0
    rewards = torch.rand(branches, generator=generator)
    advantages = (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-6)
    return Group(opening, [tokens(response) for _ in range(branches)], advantages)


def naive_step(model: Any, group: Group, at_once: int = 1) -> None:
    """Add the gradient of the group's loss to .grad, so many full sequences at a time.

    The model's own attention, the head on response positions only, no checkpointing.
    """
    for first in range(0, len(group.responses), at_once):
        responses = torch.stack(group.responses[first : first + at_once])
        prompts = group.prompt.expand(len(responses), -1)
        inputs = torch.cat([prompts, responses[:, :-1]], dim=1)
        output = model(input_ids=inputs, use_cache=False, logits_to_keep=responses.shape[1])
        log_probs = log_probs_of(output.logits, responses)
        terms = [group.loss.term(first + i, row) for i, row in enumerate(log_probs)]
        torch.autograd.backward([torch.stack(terms).sum()])


def log_probs_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Of `targets` [..., tokens] under `logits` [..., tokens, vocabulary], at least float32."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits.gather(-1, targets[..., None])[..., 0] - logits.logsumexp(-1)


def take_gradients(model: Any) -> list[Tensor]:
    """Float64 copies of all gradients, zeros where there is none; clears them."""
    gradients = []
    for parameter in model.parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradients.append(grad.double())
        parameter.grad = None
    return gradients


def relative_l2(gradients: list[Tensor], truth: list[Tensor]) -> float:
    """Over all parameters together."""
    apart = sum(float((a - b).square().sum()) for a, b in zip(gradients, truth, strict=True))
    return math.sqrt(apart / sum(float(b.square().sum()) for b in truth))


def pin_to_one_core() -> None:
    """This process and those it starts, from now on."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
