"""One run of one arm of `post_train`: updates, held-out evaluation, rows, checkpoints.

The prompts of an update are a function of the seed and the step, what is sampled to them of both
and the prompt: a checkpoint holds weights, optimizer and counters, and a resumed run repeats the
uninterrupted one bit for bit. While captured prompts are older than the weights (`refresh_every`)
no checkpoint is written: one that is due, and a stop, wait for the end of that phase.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from algorithms.branch_replay.collect import Rolled
from algorithms.branch_replay.evaluation import Evaluation
from algorithms.branch_replay.job_config import COMPLETIONS, ROLLOUTS, PostTrainingConfig
from algorithms.branch_replay.learner import Learner
from algorithms.branch_replay.prompts import Prompt
from algorithms.branch_replay.rollout_log import RolloutLog
from algorithms.common import memory, metrics
from algorithms.common.adamw import set_rate
from algorithms.common.comm import Comm
from algorithms.common.data import epoch_order
from algorithms.common.errors import InputError, Preempted
from algorithms.common.loop import learning_rate
from algorithms.common.model import parameter_count
from algorithms.common.run import Run

log = logging.getLogger(__name__)


class Training(Run):
    """One rank's; `run` trains to the end or raises.

    `source` are prompts to sample responses to, or rollouts to learn from as they are given.
    """

    def __init__(
        self,
        config: PostTrainingConfig,
        *,
        learner: Learner,
        peak_lr: float,
        source: Sequence[Prompt] | Sequence[Rolled],
        evaluation: Evaluation,
        run_dir: Path,
        comm: Comm,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(config, run_dir=run_dir, comm=comm)
        self.config: PostTrainingConfig = config
        self.learner = learner
        self.peak_lr = peak_lr
        self.source = source
        self.evaluation = evaluation
        self.stop_requested = stop_requested
        self.tokens = 0
        if len(source) < config.prompts:
            raise InputError(
                f"post_train.training.prompts: an update takes {config.prompts} prompts, there are "
                f"{len(source)} to learn from"
            )

    def run(self) -> dict[str, Any]:
        """Train to the last step. Returns the two halves of result.json, `quality` and `timing`.

        Raises `NonFiniteError` before a bad step reaches the weights, `Preempted` after a stop.
        """
        config, comm = self.config, self.comm
        model, optimizer = self.learner.model, self.learner.optimizer
        resumed, noted = self.checkpoints.load(model, optimizer)
        rows = None
        rollouts = RolloutLog(self.run_dir / ROLLOUTS / f"rank_{self.rank}.jsonl", resumed)
        if comm.rank == 0:
            rows = metrics.MetricsLog(self.run_dir / "metrics.jsonl", resumed if noted else -1)
            metrics.cut_back(self.run_dir / COMPLETIONS, resumed if noted else -1)
            log.info("training from step %d of %d", resumed, config.steps)
        self.elapsed_before = comm.broadcast_object(rows.elapsed if rows else None, src=0)
        if noted:
            comm.load_state_dict(noted["comm"])
            loss, start, held_out = noted["loss"], noted["start"], noted["held_out"]
            self.tokens, self.throughput.seconds_in_all = noted["tokens"], noted["busy"]
        else:
            loss, start = 0.0, self._evaluate(0)
            held_out = start
            if rows:
                rows.append(self._beginning(start))
        due = False
        for step in range(resumed + 1, config.steps + 1):
            begun, before = time.perf_counter(), self.tokens
            lr = learning_rate(step, self.peak_lr, config)
            set_rate(optimizer, lr)
            rolled = self._rolled(step)
            update = self.learner.learn(rolled)
            rollouts.append(step, rolled)
            stop = self._count(rolled)
            loss = update["train/loss"]
            self.throughput.add(self.tokens - before, time.perf_counter() - begun)
            evaluated = self._due(step, config.eval_every)
            if evaluated or self._due(step, config.log_every):
                row = self._row(step, loss, update["grad_norm"], lr) | update
                if evaluated:
                    held_out = self._evaluate(step)
                    row |= held_out
                if rows:
                    rows.append(row)
                    log.info(_sentence(row, config.steps))
            due = due or self._due(step, config.checkpoint_every) or stop
            if due and (self.learner.resumable(step - 1) or step == config.steps):
                self.checkpoints.save(step, model, optimizer, self._noted(loss, start, held_out))
                due = False
                if stop and step < config.steps:
                    raise Preempted(f"stopped after step {step}; its checkpoint is written")
        result = self._result(loss, held_out)
        result["quality"]["reward_start"] = start["reward/heldout"]
        return result

    def _noted(self, loss: float, start: Any, held_out: Any) -> dict[str, Any]:
        """What a checkpoint holds beside weights and optimizer; plain, equal on all ranks."""
        return {
            "comm": self.comm.state_dict(),
            "loss": loss,
            "start": start,
            "held_out": held_out,
            "tokens": self.tokens,
            "busy": self.throughput.seconds_in_all,
        }

    # An update

    def _rolled(self, step: int) -> list[Rolled]:
        """What this rank learns from in `step`."""
        mine = self._mine(step - 1)
        given = [item for item in mine if isinstance(item, Rolled)]
        prompts = [item for item in mine if isinstance(item, Prompt)]
        return given or self.learner.sample(prompts, step - 1)

    def _mine(self, index: int) -> list[Prompt | Rolled]:
        """This rank's part of update `index`: whole updates of an order drawn for each epoch."""
        index //= self.learner.settings.replay.refresh_every
        count = self.config.prompts
        epoch, part = divmod(index, len(self.source) // count)
        order = epoch_order(self.config.seed, epoch, len(self.source))
        chosen = order[part * count : (part + 1) * count].tolist()
        return [self.source[i] for i in chosen[self.rank :: self.world_size]]

    def _count(self, rolled: Sequence[Rolled]) -> bool:
        """Add up the tokens of all ranks; whether any of them was asked to stop."""
        mine = sum(map(_tokens, rolled)), self.stop_requested()
        sums = torch.tensor(mine, dtype=torch.int64, device=self.comm.device)
        self.comm.all_reduce(sums, tag="control")
        tokens, stops = sums.tolist()
        self.tokens += tokens
        return bool(stops)

    # Evaluation

    def _evaluate(self, step: int) -> dict[str, float]:
        found, shown = self.evaluation.run(self.learner.replay)
        if self.rank == 0:
            with (self.run_dir / COMPLETIONS).open("a", encoding="utf-8") as file:
                file.writelines(json.dumps({"step": step} | row) + "\n" for row in shown)
            log.info("step %d  held-out reward %.4f", step, found["reward/heldout"])
        return found

    def _beginning(self, start: dict[str, float]) -> dict[str, Any]:
        """The row of step 0."""
        elapsed = self._elapsed()
        clock = {"time": time.time(), "elapsed": elapsed, **self._hours(elapsed)}
        return {"step": 0, "tokens": 0, **clock, **start}

    # What `Run` asks

    def _tokens(self, steps: int) -> int:
        return self.tokens

    def _optimizer_bytes(self) -> int:
        return memory.optimizer_bytes(self.learner.optimizer)

    def _parameters(self) -> int:
        return parameter_count(self.learner.model)


def _tokens(item: Rolled) -> int:
    """Of the prompt, its questions and all responses, each once."""
    questions = sum(len(group.question.tokens) for group in item.groups)
    return item.prompt.tokens.numel() + questions + sum(map(len, item.responses))


def _sentence(row: dict[str, Any], steps: int) -> str:
    return (
        f"step {row['step']}/{steps}  reward {row['reward/mean']:.4f}  loss "
        f"{row['train/loss']:.4f}  lr {row['lr']:.2e}  grad norm {row['grad_norm']:.3f}  "
        f"{row['tokens_per_s']:,.0f} tokens/s"
    )
