"""One run of one arm of `pretrain_async`: the same rows, evaluation and result as all other arms.

Stages pause only where a row, an evaluation or a checkpoint is due; there they agree on a stop.
Microbatches under way at a pause stay under way, and into checkpoints. Batches are a function of
seed and update, so a resumed run repeats the uninterrupted one bit for bit.

Bytes are means over ranks, since stages send different amounts. A simulated pipeline has no times
of its own: its rows hold `modelled_` ones in their place, under names of their own.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from algorithms.async_pipeline import trace
from algorithms.async_pipeline.config import ArmConfig
from algorithms.async_pipeline.trace import Event
from algorithms.async_pipeline.trainers import OneProcess, Trainer
from algorithms.common import data, memory, metrics
from algorithms.common.comm import Comm
from algorithms.common.config import SharedTrainingConfig
from algorithms.common.errors import Preempted
from algorithms.common.files import read_json, write_json
from algorithms.common.loop import learning_rate, token_loss
from algorithms.common.meter import CONTROL
from algorithms.common.run import TextRun

log = logging.getLogger(__name__)

TRACE = "trace.json"
"""Beside metrics.jsonl: a few updates, for the picture."""


class Training(TextRun):
    """One rank's; `run` trains to the end or raises."""

    def __init__(
        self,
        config: SharedTrainingConfig,
        arm: ArmConfig,
        *,
        trainer: Trainer,
        parameters: int,
        tokens_dir: Path,
        run_dir: Path,
        comm: Comm,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(config, tokens_dir=tokens_dir, run_dir=run_dir, comm=comm)
        self.arm = arm
        self.trainer = trainer
        self.simulated = trainer.simulated if isinstance(trainer, OneProcess) else None
        self.parameters = parameters
        self.stop_requested = stop_requested
        self.busy = [0.0, 0.0]
        """Seconds of all ranks since the last row: of compute, and of the run."""
        self.busy_in_all = [0.0, 0.0]

    def run(self) -> dict[str, Any]:
        """Train to the last step. Returns the two halves of result.json, `quality` and `timing`.

        Raises `NonFiniteError` before a bad update reaches its weights, `Preempted` after a stop.
        """
        config, comm = self.config, self.comm
        noted = self._noted(0.0, {}) | self.trainer.load(self.checkpoints)
        step = self.trainer.updates
        rowed = max(step // every * every for every in (config.log_every, config.eval_every))
        rows = None
        if comm.rank == 0:
            rows = metrics.MetricsLog(self.run_dir / "metrics.jsonl", step)
            log.info("training from step %d of %d", step, config.steps)
        self.elapsed_before = comm.broadcast_object(rows.elapsed if rows else None, src=0)
        comm.load_state_dict(noted["comm"][comm.rank])
        loss, held_out = noted["loss"], noted["held_out"]
        self.throughput.seconds_in_all, self.busy_in_all = noted["busy"], noted["pipeline"]
        for until in self._pauses(step):
            begun = time.perf_counter()
            losses = self.trainer.run(self._microbatch, until)
            self.throughput.add(self._tokens(until - step), time.perf_counter() - begun)
            self._watch(step, until)
            step = until
            loss = math.fsum(losses[-self.arm.microbatches :]) / self.arm.microbatches
            evaluated = self._due(step, config.eval_every)
            if evaluated or self._due(step, config.log_every):
                lr = learning_rate(step, self.arm.optimizer.optimizer.lr, config)
                row = self._row(step, loss, self._norm(), lr) | self._pipeline(rowed, step)
                rowed = step
                if evaluated:
                    held_out = self.evaluate()
                    row |= held_out
                if rows:
                    rows.append(row)
                    log.info(metrics.sentence(row, config.steps))
            stopping = self._stopping()
            if stopping or self._due(step, config.checkpoint_every):
                self.trainer.save(self.checkpoints, self._noted(loss, held_out))
            if stopping and step < config.steps:
                raise Preempted(f"stopped after step {step}; its checkpoint is written")
        return self._finished(loss, held_out)

    def evaluate(self) -> dict[str, float]:
        """Loss in nats per token, perplexity and bits per byte on the fixed held-out set."""
        size = self.config.global_batch // self.arm.microbatches
        batches = list(
            data.evaluation_batches(
                self.held_out,
                sequences=self.config.eval_sequences,
                length=self.config.sequence_length,
                batch_size=size,
                rank=0,
                world_size=1,
            )
        )
        whole = len(batches) - (len(batches[-1]) < size)
        nats = 0.0
        for group in (batches[:whole], batches[whole:]):  # messages of a call have one shape
            if group:
                pairs = [self._pair(tokens) for tokens in group]
                nats += math.fsum(self.trainer.evaluate(pairs.__getitem__, len(group), _sum_loss))
        targets = torch.cat([tokens[:, 1:] for tokens in batches])
        return self._figures(nats, targets.numel(), float(self.token_bytes[targets].sum()))

    # Steps

    def _pauses(self, step: int) -> Iterator[int]:
        """The steps after `step` at which something is due."""
        every = (self.config.log_every, self.config.eval_every, self.config.checkpoint_every)
        for each in range(step + 1, self.config.steps + 1):
            if any(self._due(each, one) for one in every):
                yield each

    def _microbatch(self, index: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, int64 `[batch, tokens]`, of microbatch `index` of the run."""
        update, part = divmod(index, self.arm.microbatches)
        tokens = data.batch(
            self.train,
            seed=self.config.seed,
            step=update,
            rank=part,
            world_size=self.arm.microbatches,
            global_batch=self.config.global_batch,
            length=self.config.sequence_length,
        )
        return self._pair(tokens)

    def _pair(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        tokens = tokens.to(self.comm.device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def _stopping(self) -> bool:
        """Whether any rank was asked to stop."""
        asked = torch.tensor(float(self.stop_requested()), device=self.comm.device)
        self.comm.all_reduce(asked, tag=CONTROL, op="max")
        return bool(asked)

    def _norm(self) -> float:
        """Over the whole model, of the last update's gradient before clipping."""
        squares = sum(norm**2 for norm in self.trainer.norms())
        total = torch.tensor(squares, dtype=torch.float64, device=self.comm.device)
        self.comm.all_reduce(total, tag=CONTROL)
        return math.sqrt(total.item())

    def _noted(self, loss: float, held_out: dict[str, float]) -> dict[str, Any]:
        """What a checkpoint holds beside the trainer's state; plain values, equal on all ranks."""
        mine = self.comm.state_dict()  # before the exchange that follows
        counters = self.comm.broadcast_object(self.comm.gather_objects(mine), src=0)
        return {
            "comm": counters,
            "loss": loss,
            "held_out": held_out,
            "busy": self.throughput.seconds_in_all,
            "pipeline": self.comm.broadcast_object(self.busy_in_all, src=0),
        }

    # How busy the pipeline was

    def _watch(self, first: int, until: int) -> None:
        """Add up what stages did in updates `first`..`until`-1, and keep some of it."""
        traces = self.trainer.traces()
        if traces is None:
            return
        compute = sum(trace.seconds(events, *trace.COMPUTE) for events in traces)
        for sums in (self.busy, self.busy_in_all):
            sums[0] += compute
            sums[1] += len(traces) * trace.span(traces)
        a = self.arm.microbatches
        write_json(self.run_dir / TRACE, _excerpt(traces, first * a, until * a))

    def _pipeline(self, first: int, step: int) -> dict[str, float]:
        """Of a row: the updates after `first`, up to `step`."""
        row = {"staleness/mean": self._staleness(first, step)}
        if self.simulated is not None:
            return row | _utilised(
                "pipeline/modelled_", *self.simulated.busy(step * self.arm.microbatches)
            )
        row |= _utilised("pipeline/", *self.busy) if self.rank == 0 else {}
        self.busy = [0.0, 0.0]
        return row

    def _staleness(self, first: int, until: int) -> float:
        """Updates by which weights of gradients were older than the newest: mean over stages and
        the microbatches of updates `first`..`until`-1."""
        a, delays = self.arm.microbatches, self.arm.microbatch_delays
        indices = range(first * a, until * a)
        if self.arm.schedule != "async":
            return 0.0
        total = sum(m // a - max(0, m - delay) // a for delay in delays for m in indices)
        return total / (len(delays) * len(indices))

    # What `TextRun` asks

    def _parameters(self) -> int:
        return self.parameters

    def _optimizer_bytes(self) -> int:
        """Of the rank that has most; in a simulation, of that stage."""
        sizes = [memory.optimizer_bytes(optimizer) for optimizer in self.trainer.optimizers]
        mine = sum(sizes) if self.simulated is None else max(sizes)
        largest = torch.tensor(mine, device=self.comm.device)
        self.comm.all_reduce(largest, tag=CONTROL, op="max")
        return int(largest.item())

    def _sent(self) -> dict[str, int]:
        """Means over ranks."""
        everyone = self.comm.broadcast_object(self.comm.gather_objects(self.comm.metrics()), src=0)
        names = dict.fromkeys(name for one in everyone for name in one)
        return {
            name: round(sum(one.get(name, 0) for one in everyone) / len(everyone)) for name in names
        }

    def _hours(self, elapsed: float) -> dict[str, float]:
        if self.simulated is None:
            return super()._hours(elapsed)
        _, seconds = self.simulated.busy(self.trainer.updates * self.arm.microbatches)
        return {"modelled_device_hours": seconds / 3600}

    def _speed(self, rate: float) -> dict[str, float]:
        return super()._speed(rate) if self.simulated is None else {}

    def _finished(self, loss: float, held_out: dict[str, float]) -> dict[str, Any]:
        """`_result`, and what only pipelines have."""
        steps = self.config.steps
        result = self._result(loss, held_out)
        result["quality"] |= {"stages": self.arm.stages, "staleness": self._staleness(0, steps)}
        timing = result["timing"]
        if self.simulated is not None:
            timing["simulated"] = True
            microbatches = steps * self.arm.microbatches
            timing |= _utilised("modelled_", *self.simulated.busy(microbatches))
            stages = self.simulated.timeline(microbatches)
            timing["trace"] = _excerpt(stages, 0, microbatches)
        elif self.rank == 0:
            timing |= _utilised("", *self.busy_in_all)
            timing["trace"] = read_json(self.run_dir / TRACE)
        return result


def _sum_loss(scores: Tensor, targets: Tensor) -> Tensor:
    return token_loss(scores, targets, "sum")


def _utilised(prefix: str, compute: float, run: float) -> dict[str, float]:
    share = compute / run
    return {f"{prefix}utilisation": share, f"{prefix}bubble_pct": 100.0 * (1.0 - share)}


def _excerpt(stages: Sequence[Sequence[Event]], first: int, stop: int) -> list[list[list[Any]]]:
    """By stage `[kind, microbatch, start, end]` in seconds from 0: of 4 P microbatches of
    `first`..`stop`-1, the last but P."""
    count = len(stages)
    end = max(first + 1, stop - count)
    begin = max(first, end - 4 * count)
    inside = [
        event
        for events in stages
        for event in events
        if event.kind in ("forward", "backward") and begin <= event.index < end
    ]
    start, last = min(event.start for event in inside), max(event.end for event in inside)
    return [
        [
            [event.kind, event.index, *(round(t - start, 6) for t in (event.start, event.end))]
            for event in events
            if event.end > start and event.start < last
        ]
        for events in stages
    ]
