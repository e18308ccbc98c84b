"""The training loop of an arm whose workers may die, stall and come back.

Workers train by themselves and meet as `Loop` has them meet: every K_x steps, and where weights are
evaluated or written. But all collectives of a meeting are a round of `Elastic`: it counts for all
members or for none, and ranks that are lost do not take part. As long as none is lost, weights and
evaluations are those of `Loop`, bit for bit.

A meeting has up to two rounds, the sync and the evaluation of what it gave. What is due is a
function of the step and of the state that a joining worker gets, so it falls into step with the
others wherever it is let in.

The lowest member leads: it writes rows of metrics.jsonl (one a meeting at most, `workers` says how
many took part), checkpoints, and what `publish` writes at the end. A checkpoint is that worker's
state after a round, and all begin from it: unlike `Loop`, a resumed run does not repeat what the
other workers' moments would have given. A stop waits for the next round.

`tokens` counts what was planned; a lost worker's part of the data is left out.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from algorithms.common import metrics
from algorithms.common.checkpoint import Checkpoints
from algorithms.common.comm import Comm
from algorithms.common.config import TrainingConfig
from algorithms.common.errors import Preempted
from algorithms.common.loop import Loop, learning_rate
from algorithms.common.meter import Meter
from algorithms.common.model import weights_sha256
from algorithms.lordo.board import Board
from algorithms.lordo.elastic import Elastic, Turn
from algorithms.lordo.elastic_local import Averaged, ElasticLocal

log = logging.getLogger(__name__)

T = TypeVar("T")

KEPT_ROWS = 2
"""Newest rows that every worker keeps, in case a leader dies before it has written them."""
REJOIN = "rejoin"
"""Tag of what `Elastic` hands over."""


class Outcome(NamedTuple):
    """What the members of a sync found together."""

    averaged: Averaged
    control: Tensor
    """Mean loss and mean gradient norm."""
    peak: int
    """Largest memory of a member, bytes."""
    workers: int


class _Over(Exception):
    """The run ended without this worker."""


class ElasticLoop(Loop):
    """One worker's run; a `Worker` of `algorithms/lordo/elastic.py`.

    `board` knows all ranks of the launch, `comm` speaks to the present members. `publish` writes
    what the run leaves behind; the leader calls it while the others wait. If it dies, the next one
    does.
    """

    def __init__(
        self,
        config: TrainingConfig,
        *,
        peak_lr: float,
        model: nn.Module,
        method: ElasticLocal,
        tokens_dir: Path,
        run_dir: Path,
        comm: Comm,
        board: Board,
        publish: Callable[[dict[str, Any]], None],
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(
            config,
            peak_lr=peak_lr,
            model=model,
            method=method,
            tokens_dir=tokens_dir,
            run_dir=run_dir,
            comm=comm,
            stop_requested=stop_requested,
        )
        self.local = method
        self.board = board
        self.publish = publish
        self.rank, self.world_size = board.rank, board.world_size
        self.elastic = Elastic(board, self, comm)
        alone = Comm(None, comm.device)
        self.checkpoints = Checkpoints(run_dir / "checkpoints", config.keep_checkpoints, alone)
        self.loss, self.norm, self.lr, self.peak = 0.0, 0.0, 0.0, 0
        self.measured: dict[str, float] = {}
        """By the last evaluation."""
        self.evaluated = self.saved = 0
        """The last step at which weights were."""
        self.recent: list[dict[str, Any]] = []
        self.rows: metrics.MetricsLog | None = None
        """Of the leader."""
        self.written = 0
        """Step of the last row that is the leader's to write no more."""

    def run(self) -> dict[str, Any]:
        """Train to the last step; the result, or nothing if the others ended before.

        Raises as `Loop` does, and what `Elastic` raises.
        """
        step, own, _ = self.checkpoints.load_own()
        if own:
            self.load_state(own)
        path = self.run_dir / "metrics.jsonl"
        self.elapsed_before = max((row["elapsed"] for row in metrics.read_rows(path)), default=0.0)
        counters = self.comm.state_dict()
        turn = self.elastic.join(step)
        if not turn.rejoined and not turn.over:  # all begin with what this worker has
            self.comm.load_state_dict(counters)  # as in `Loop`, a start is not the method's
            metrics.MetricsLog(path, turn.step)  # drops rows that are redone
        self.method.module.train()
        try:
            return self._train(self._go_on(turn))
        except _Over:
            log.info("rank %d: the run has ended without it", self.rank)
            return {}

    def _train(self, step: int) -> dict[str, Any]:
        config, membership = self.config, self.elastic.membership
        log.info("training from step %d of %d", step, config.steps)
        while True:
            if self._owes(step, config.eval_every, self.evaluated):
                turn = self._round(step, self.evaluate, self._take_evaluation)
                step = self._go_on(turn)
                continue
            self._write_rows(step)
            if step >= config.steps:
                break
            if self._owes(step, config.checkpoint_every, self.saved):
                membership.once(partial(self._save_alone, step))
                self.saved = step
            step = self._step_and_meet(step + 1)
        result = self._result(self.loss, self.measured)

        def finish() -> None:
            if self.saved < step:
                self._save_alone(step)
            self.publish(result)

        membership.once(finish)
        membership.end()
        with self.method.synced():
            log.info("rank %d ends with weights %s", self.rank, weights_sha256(self.model))
        return result

    def _owes(self, step: int, every: int, done: int) -> bool:
        """Whether something that is done every so many steps is due and has not been done."""
        return step > done and self._due(step, every)

    def _step_and_meet(self, step: int) -> int:
        """Train `step`, and sync where it is due; the step to go on from."""
        begun, sync = time.perf_counter(), self.local.sync
        total, norm, microbatches = self._gradient(step)
        self._require_finite(step, norm, microbatches)
        if sync.awaits_first_gradient:
            first = sync.first_gradient()
            turn = self._round(
                step - 1, lambda at: self.local.average(at + 1, first), self.local.take
            )
            done = self._go_on(turn)
            if turn.rejoined:
                return done  # the state is another worker's, the gradient was not
        self.loss, self.norm = total.item(), norm.item()
        self.lr = learning_rate(step, self.peak_lr, self.config)
        self.local.descend(self.lr)
        self.board.beat()
        buffers = sync.contributions(step)
        if not buffers and self._meets(step):
            buffers = sync.flush(step)
        self.throughput.add(self._tokens(1), time.perf_counter() - begun)
        if not buffers:
            return step
        begun = time.perf_counter()
        turn = self._round(step, partial(self._exchange_round, buffers), self._apply_round)
        self.throughput.add(0, time.perf_counter() - begun)
        return self._go_on(turn)

    def _meets(self, step: int) -> bool:
        every = (self.config.eval_every, self.config.checkpoint_every)
        return any(self._due(step, each) for each in every)

    def _round(
        self, step: int, exchange: Callable[[int], T], apply: Callable[[int, T], None]
    ) -> Turn:
        """One round of the members, `step` being done."""
        return self.elastic.sync(step, exchange, apply, self.stop_requested())

    def _go_on(self, turn: Turn) -> int:
        """The step to go on from."""
        if turn.over:
            raise _Over
        if turn.rejoined:
            log.info("rank %d goes on after step %d with the others' state", self.rank, turn.step)
        if turn.stop:
            self.elastic.membership.once(lambda: self._save_alone(turn.step))
            self.elastic.membership.end()
            raise Preempted(f"stopped after step {turn.step}; its checkpoint is written")
        return turn.step

    def _exchange_round(self, buffers: Mapping[str, Tensor], step: int) -> Outcome:
        averaged = self.local.average(step, buffers)
        size = self.comm.world_size
        control = torch.tensor([self.loss / size, self.norm / size], device=self.comm.device)
        self.comm.all_reduce(control, tag="control")
        return Outcome(averaged, control, super()._peak_bytes(), size)

    def _apply_round(self, step: int, outcome: Outcome) -> None:
        self.local.take(step, outcome.averaged)
        self.loss, self.norm = outcome.control.tolist()
        self.peak = outcome.peak
        every = self.config.log_every
        last = self.recent[-1]["step"] if self.recent else 0
        if step // every > last // every or self._due(step, self.config.eval_every):
            row = self._row(step, self.loss, self.norm, self.lr) | {"workers": outcome.workers}
            self.recent = [*self.recent, row][-KEPT_ROWS:]

    def _take_evaluation(self, step: int, measured: dict[str, float]) -> None:
        self.measured, self.evaluated = measured, step
        self.recent[-1] |= measured

    def _write_rows(self, step: int) -> None:
        """Write what is new, if this worker leads."""
        if not self.recent or self.recent[-1]["step"] <= self.written:
            return
        if not self.elastic.membership.leads:
            self.rows = None
        else:
            if self.rows is None:  # it leads from now on
                self.rows = metrics.MetricsLog(self.run_dir / "metrics.jsonl", step)
                there = metrics.read_rows(self.rows.path)
                self.written = there[-1]["step"] if there else 0
            for row in self.recent:
                if row["step"] > self.written:
                    self.rows.append(row)
                    log.info(metrics.sentence(row, self.config.steps))
        self.written = self.recent[-1]["step"]

    def _save_alone(self, step: int) -> None:
        self.saved = step
        self.checkpoints.save_own(step, self.state(), {})

    # A `Worker` of `Elastic`

    def regroup(self) -> None:
        self.local.regroup()

    def state(self) -> dict[str, Any]:
        """All of it, of a checkpoint too."""
        return {
            "method": self.local.global_state(),
            "comm": self.comm.state_dict(),
            "starts": not self.elastic.membership.decision.holders,
            "elapsed": self._elapsed(),
            "busy": self.throughput.seconds_in_all,
            "metrics": {name: getattr(self, name) for name in ("loss", "norm", "lr", "peak")},
            "measured": self.measured,
            "evaluated": self.evaluated,
            "saved": self.saved,
            "recent": self.recent,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        received = Meter()
        if not state["starts"] and REJOIN in self.comm.counters:
            received.counters[REJOIN] = self.comm.counters[REJOIN]
        self.local.load_global_state(state["method"])
        self.comm.load_state_dict(state["comm"])
        self.comm.add(received)
        self.elapsed_before, self.started = state["elapsed"], time.perf_counter()
        self.throughput.seconds_in_all = state["busy"]
        for name, value in state["metrics"].items():
            setattr(self, name, value)
        self.measured, self.recent = state["measured"], state["recent"]
        self.evaluated, self.saved = state["evaluated"], state["saved"]

    # What `Loop` does elsewhere by collectives of its own

    def _loss(self, module: nn.Module, tokens: Tensor, reduction: str = "mean") -> Tensor:
        self.board.beat()
        return super()._loss(module, tokens, reduction)

    def _peak_bytes(self) -> int:
        return self.peak
