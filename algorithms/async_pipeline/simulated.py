"""A pipeline in one process, for as many stages as one likes: its losses are those of real ranks,
its times are modelled.

`reference` trains; here are what a run needs beside it: evaluation, checkpoints, and the times that
a pipeline would have had. These come from the compute that the simulation measured, shared out over
the stages by the cost model, and from `modelled`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn

from algorithms.async_pipeline import modelled
from algorithms.async_pipeline.pipeline import Batches
from algorithms.async_pipeline.reference import Delayed
from algorithms.async_pipeline.resume import load_stage, stage_state
from algorithms.async_pipeline.trace import Event
from algorithms.async_pipeline.update import BeforeUpdate, Factory, Loss


class Simulated:
    """All stages of an asynchronous pipeline, one after the other."""

    def __init__(
        self,
        stages: Sequence[nn.Module],
        optimizer: Factory,
        loss: Loss,
        *,
        costs: Sequence[int],
        delays: Sequence[int],
        stash: bool,
        accumulation: int,
        clip_norm: float,
        before_update: BeforeUpdate,
    ) -> None:
        """Trains `stages` in place; `costs` are their shares of the compute, in any unit. Other
        arguments are those of `Delayed`."""
        self.delayed = Delayed(
            stages,
            optimizer,
            loss,
            delays=delays,
            stash=stash,
            accumulation=accumulation,
            clip_norm=clip_norm,
            before_update=before_update,
        )
        self.loss = loss
        self.costs = costs
        self.shares = [cost / sum(costs) for cost in costs]
        self.span = self._span()
        self.seconds = 0.0
        """Compute of all microbatches so far."""

    @property
    def updates(self) -> int:
        return self.delayed.microbatches // self.delayed.accumulation

    def run(self, batches: Batches, until: int) -> list[float]:
        """Train until `until` updates are made in all; the loss of each microbatch."""
        begun = perf_counter()
        losses = []
        for index in range(self.delayed.microbatches, until * self.delayed.accumulation):
            losses.append(self.delayed.microbatch(*batches(index)).item())
        self.seconds += perf_counter() - begun
        return losses

    def evaluate(self, batches: Batches, count: int, metric: Loss | None = None) -> list[float]:
        """`metric` (by default the loss) of each of `count` batches at the present weights."""
        values = []
        with torch.no_grad():
            for index in range(count):
                hidden, targets = batches(index)
                for stage in self.delayed.stages:
                    hidden = stage(hidden)
                values.append((metric or self.loss)(hidden, targets).item())
        return values

    def timeline(self, microbatches: int) -> list[list[Event]]:
        """The modelled events of a pipeline that makes so many."""
        each = self._seconds_each()
        compute = [each * share for share in self.shares]
        delays, accumulation = self.delayed.delays, self.delayed.accumulation
        return modelled.timeline(delays, microbatches, compute, accumulation)

    def busy(self, microbatches: int) -> tuple[float, float]:
        """Of all stages of that pipeline: seconds of compute, and of the run. Costs what is new
        since the last call; `microbatches` must not fall."""
        each = self._seconds_each()
        run = len(self.costs) * self.span.of(microbatches) / (3 * sum(self.costs))
        return each * microbatches, each * run

    def _seconds_each(self) -> float:
        return self.seconds / max(1, self.delayed.microbatches)

    def _span(self) -> modelled.Span:
        return modelled.Span(self.delayed.delays, self.costs, self.delayed.accumulation)

    def state_dict(self) -> dict[str, Any]:
        """All that it holds, old weights included."""
        delayed = self.delayed
        return {
            "stages": [
                stage_state(weights, optimizer)
                for weights, optimizer in zip(delayed.weights, delayed.optimizers, strict=True)
            ],
            "history": [[dict(old) for old in history] for history in delayed.history],
            "microbatches": delayed.microbatches,
            "seconds": self.seconds,
        }

    def load_state_dict(self, state: dict[str, Any], folder: Path) -> None:
        """Restore what `state_dict` gave. Raises `InputError` that names `folder`, where it comes
        from, for another model or optimizer."""
        delayed = self.delayed
        for weights, optimizer, saved in zip(
            delayed.weights, delayed.optimizers, state["stages"], strict=True
        ):
            load_stage(weights, optimizer, saved, folder)
        delayed.history = [
            deque(
                ({name: old.requires_grad_() for name, old in each.items()} for each in history),
                maxlen=delay + 1,
            )
            for history, delay in zip(state["history"], delayed.delays, strict=True)
        ]
        delayed.microbatches, self.seconds = state["microbatches"], state["seconds"]
        self.span = self._span()
