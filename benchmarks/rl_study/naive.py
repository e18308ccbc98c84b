"""An update by full sequences: each response behind a prompt of its own, in one plain forward.

What training code without shared prefixes does, at its best here: one batch, all padding behind,
attention by the library's own kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence

from algorithms.branch_replay.collect import Rolled
from algorithms.branch_replay.criterion import Criterion
from algorithms.branch_replay.objectives import Totals


def learn(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    criterion: Criterion,
    rolled: Sequence[Rolled],
) -> None:
    """The optimizer step of one update, with gradients clipped at norm 1."""
    new = log_probs(model, rolled)
    groups = [group for item in rolled for group in item.groups]
    advantages = torch.cat([criterion.advantages(group.rewards) for group in groups])
    old = [part.detach() for part in new]
    optimizer.zero_grad()
    criterion.loss(new, old, None, advantages, Totals.of(new)).backward()  # type: ignore[no-untyped-call]
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def log_probs(model: torch.nn.Module, rolled: Sequence[Rolled]) -> list[Tensor]:
    """Of each response's tokens, with their graph."""
    sequences, ends = [], []
    for item in rolled:
        prompts = item.prompt.tokens.view(-1, item.prompt.tokens.shape[-1])
        for group in item.groups:
            prompt = prompts[group.question.behind or 0]
            for response in group.responses:
                sequences.append(torch.cat([prompt, group.question.tokens, response]))
                ends.append(len(response))
    padded = pad_sequence(sequences, batch_first=True)
    scores = model(input_ids=padded[:, :-1], use_cache=False).logits
    targets = padded[:, 1:]
    found: Tensor = scores.gather(-1, targets[..., None])[..., 0] - scores.logsumexp(-1)
    return [
        row[len(sequence) - 1 - n : len(sequence) - 1]
        for row, sequence, n in zip(found, sequences, ends, strict=True)
    ]
