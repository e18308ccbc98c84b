"""One run: a pipeline's delay simulated exactly, with a held-out curve."""

from __future__ import annotations

import time
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers.utils import logging

from algorithms.async_pipeline import baselines, stage
from algorithms.async_pipeline.reference import Delayed
from algorithms.common import model as models
from algorithms.common.errors import NonFiniteError
from algorithms.common.loop import learning_rate, token_loss
from benchmarks.async_study.setting import Arm, Job, Setting
from benchmarks.study import streams
from benchmarks.study.queue import Result

LAST = 3
"""Points of the curve whose mean is the final loss."""

logging.set_verbosity_error()  # a token equal to the padding's is no mistake: nothing is padded

_load = lru_cache(maxsize=2)(streams.load)


class Run:
    """A model in training; `update` trains on the next microbatch."""

    def __init__(self, arm: Arm, setting: Setting, seed: int, tokens: Path) -> None:
        self.arm, self.setting, self.seed = arm, setting, seed
        self.streams = _load(tokens, 1, "in_turn")
        self.model = new_model(setting, seed)
        layers = setting.model.num_hidden_layers
        counts = [layers // arm.stages] * arm.stages
        stages = stage.cut(self.model, counts)
        self.delayed = Delayed(
            stages,
            self._optimizer,
            token_loss,
            delays=arm.delays,
            stash=arm.stash,
            clip_norm=1.0,
        )
        self.done = 0
        """Updates so far."""

    def _optimizer(self, named: list[tuple[str, nn.Parameter]], k: int, stages: int) -> Optimizer:
        return baselines.build(
            named, self.arm.optimizer, stage=k, stages=stages, delays=self.arm.delays
        )

    def update(self) -> None:
        """At each stage's rate. Raises `NonFiniteError` before a bad gradient reaches weights."""
        config = self.arm.optimizer
        training = self.setting.training(self.seed)
        lr = learning_rate(self.done + 1, config.optimizer.lr, training)
        for optimizer, delay in zip(self.delayed.optimizers, self.arm.delays, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = baselines.rate(config, lr, delay=delay, update=self.done)
        rows = self.batch(self.done)
        self.delayed.microbatch(rows[:, :-1], rows[:, 1:])
        self.done += 1

    def batch(self, step: int) -> Tensor:
        """The rows of microbatch 0, 1, ..., equal for all arms: int64 `[sequences, length + 1]`."""
        return streams.batch(
            self.streams.train[0],
            seed=self.seed,
            step=step,
            sequences=self.setting.sequences,
            length=self.setting.length,
        )

    def held_out(self, split: str) -> Tensor:
        """int64 `[sequences, length + 1]` of `validation` or `test`."""
        stream = {"validation": self.streams.validation, "test": self.streams.test}[split]
        return streams.spread(stream, self.setting.held_out, self.setting.length)


def train(job: Job, tokens: Path) -> Result:
    """Run `job` on the streams in the file `tokens`. `curve` holds updates and losses; it ends
    early, and `final` is None, where the run diverged."""
    begun = time.process_time()
    run = Run(job.arm, job.setting, job.seed, tokens)
    rows = run.held_out(job.split)
    curve: list[tuple[int, float]] = [(0, loss(run.model, rows))]
    ended = True
    try:
        while run.done < job.until:
            run.update()
            if run.done % job.setting.evaluate_every == 0:
                curve.append((run.done, loss(run.model, rows)))
    except NonFiniteError:
        ended = False
    last = [value for _, value in curve[-LAST:]]
    return {
        "curve": curve,
        "final": sum(last) / len(last) if ended else None,
        "seconds": time.process_time() - begun,
    }


def new_model(setting: Setting, seed: int) -> nn.Module:
    """Fresh weights, the same for the same seed."""
    return models.build(
        setting.model, vocab_size=streams.VOCABULARY, end_of_text=streams.END, seed=seed
    )


@torch.no_grad()
def loss(model: nn.Module, rows: Tensor) -> float:
    """Mean in nats per byte over all tokens of `rows`, int64 `[sequences, tokens + 1]`."""
    model.eval()
    value = token_loss(models.logits(model, rows[:, :-1]), rows[:, 1:]).item()
    model.train()
    return value
