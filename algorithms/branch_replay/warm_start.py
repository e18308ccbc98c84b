"""Supervised start on the lookup task: every key of a prompt is asked, in prompts that grow.

Without the curriculum a small decoder stays where it answers with any value of the prompt. It stops
early on purpose: a reader that RL can still make better.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from algorithms.branch_replay.lookup import ASK, BEGIN, END, LookupConfig, vocabulary
from algorithms.common.adamw import set_rate

Stage = tuple[int, int]
"""(records, filler)"""
OnStep = Callable[[int, float, float], None]
"""Told of a step, from 1, its loss and the share of right answers."""

BATCH = 32
WARMUP = 50
DECAY = 0.9
"""Of the running mean of the accuracy."""


def dense_batch(config: LookupConfig, stage: Stage, draw: random.Random) -> tuple[Tensor, Tensor]:
    """Sequences int64 [32, tokens] of a prompt and all of its questions with answers, and which
    tokens are answers, bool [tokens]."""
    places = {symbol: i for i, symbol in enumerate(vocabulary(config))}
    records, filler = stage
    batch = []
    for _ in range(BATCH):
        keys = draw.sample(range(config.keys), records)
        values = [[f"v{draw.randrange(config.values)}" for _ in range(2)] for _ in keys]
        parts = [[f"k{key}", *value] for key, value in zip(keys, values, strict=True)]
        for _ in range(filler):
            parts.insert(draw.randrange(len(parts) + 1), [f"f{draw.randrange(config.fillers)}"])
        asked = draw.sample(range(records), records)
        questions = [[ASK, f"k{keys[i]}", *values[i], END] for i in asked]
        symbols = [BEGIN, *(symbol for part in parts + questions for symbol in part)]
        batch.append([places[symbol] for symbol in symbols])
    answers = torch.zeros(len(batch[0]), dtype=torch.bool)
    answers[1 + 3 * records + filler :] = torch.tensor([False, False, True, True, True] * records)
    return torch.tensor(batch), answers


def warm_start(
    model: Any,
    config: LookupConfig,
    *,
    seed: int,
    stages: Sequence[Stage] = ((3, 0), (4, 0)),
    accuracy: float = 0.85,
    further: Stage = (6, 4),
    further_steps: int = 10,
    most_steps: int = 2000,
    lr: float = 3e-3,
    on_step: OnStep = lambda step, loss, right: None,
) -> int:
    """Train `model` in place through `stages`, each until answers are right this often (a running
    mean), then `further_steps` on `further`; the number of steps. Gives up after `most_steps`.
    `on_step` is told of each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    draw = random.Random(f"warm start/{seed}")
    step = 0
    for stage in stages:
        mean = 0.0
        while mean < accuracy and step < most_steps:
            batch = dense_batch(config, stage, draw)
            loss, right = _train(model, optimizer, batch, lr * min(1.0, (step + 1) / WARMUP))
            mean = DECAY * mean + (1 - DECAY) * right
            step += 1
            on_step(step, loss, right)
    for _ in range(further_steps):
        loss, right = _train(model, optimizer, dense_batch(config, further, draw), lr)
        step += 1
        on_step(step, loss, right)
    return step


def _train(
    model: Any, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor], lr: float
) -> tuple[float, float]:
    """One step; the loss, and the share of questions that were answered without a mistake."""
    sequences, answers = batch
    sequences = sequences.to(model.get_input_embeddings().weight.device)
    set_rate(optimizer, lr)
    logits = model(input_ids=sequences[:, :-1], use_cache=False).logits[:, answers[1:]]
    targets = sequences[:, 1:][:, answers[1:]]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    hits = (logits.argmax(-1) == targets).view(len(sequences), -1, 3)
    return float(loss.detach()), float(hits.all(-1).double().mean())
