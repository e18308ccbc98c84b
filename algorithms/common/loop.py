"""The training loop that every data-parallel arm shares.

An arm is a `Method`: how gradients and weights of the ranks come together. The loop owns the rest:
batches, schedule, held-out evaluation, metrics, checkpoints, and a stop that all ranks agree on.
It makes the ranks meet only where the method does so anyway, and at steps that are logged,
evaluated or written. Data order and randomness are pure functions of (seed, step, rank), so a
checkpoint holds weights, optimizer and counters, and a resumed run repeats the uninterrupted one
bit for bit.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from algorithms.common import data, memory, metrics
from algorithms.common.comm import Comm
from algorithms.common.config import RunConfig, TrainingConfig
from algorithms.common.errors import NonFiniteError, Preempted
from algorithms.common.model import logits, parameter_count
from algorithms.common.run import TextRun
from algorithms.common.seeding import seed_step

log = logging.getLogger(__name__)

T = TypeVar("T")


class Guard(Protocol):
    """Calls the collectives of a step; one that does more tells which rank they wait for."""

    def __call__(self, step: int, work: Callable[[], T], /) -> T:
        """The result of `work`."""


def unguarded(step: int, work: Callable[[], T], /) -> T:
    """Just call `work`."""
    return work()


class Method(Protocol):
    """One way to bring the ranks' work together."""

    module: nn.Module
    """What the forward pass goes through; may wrap the model."""

    @property
    def optimizer(self) -> Optimizer:
        """Its state goes to checkpoints."""

    def prepare(self, tokens: Tensor) -> None:
        """Called once before the first step of every attempt; `tokens` has a microbatch's shape."""

    def microbatch(self, last: bool) -> AbstractContextManager[None]:
        """Surrounds forward and backward of one microbatch; `last` ends the step's accumulation."""

    def gradient_norm(self) -> Tensor:
        """Global L2 norm of the step's gradient before clipping, a scalar; clips it."""

    def meets(self, step: int) -> bool:
        """Whether `update` of this step waits for other ranks."""

    def update(self, step: int, lr: float) -> None:
        """Apply the gradient of `step`, and exchange what is due."""

    def flush(self, step: int) -> None:
        """Exchange what `step` has left open; called before evaluation and periodic checkpoints."""

    def synced(self) -> AbstractContextManager[None]:
        """Inside it the model has the same weights on every rank; entered after `flush`."""


@runtime_checkable
class OwnState(Protocol):
    """A `Method` whose ranks hold different weights or moments: each has its own checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """All that this rank holds, weights included."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""


def learning_rate(step: int, peak: float, config: RunConfig) -> float:
    """Rate of step 1..steps: linear warm-up, then a cosine to `final_lr_fraction` of the peak."""
    if step <= config.warmup_steps:
        return peak * step / config.warmup_steps
    progress = (step - config.warmup_steps) / (config.steps - config.warmup_steps)
    floor = config.final_lr_fraction
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


def token_loss(scores: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy in nats of `scores` `[batch, tokens, vocab]` for int64 `targets`
    `[batch, tokens]`, in float32 whatever the scores are: a scalar, the mean or sum over tokens."""
    return F.cross_entropy(scores.float().flatten(0, 1), targets.flatten(), reduction=reduction)


class Loop(TextRun):
    """One run of one arm on one rank; `run` trains to the end or raises."""

    def __init__(
        self,
        config: TrainingConfig,
        *,
        peak_lr: float,
        model: nn.Module,
        method: Method,
        tokens_dir: Path,
        run_dir: Path,
        comm: Comm,
        stop_requested: Callable[[], bool] = lambda: False,
        guard: Guard = unguarded,
    ) -> None:
        super().__init__(config, tokens_dir=tokens_dir, run_dir=run_dir, comm=comm)
        self.config: TrainingConfig = config
        self.peak_lr = peak_lr
        self.model = model
        self.method = method
        self.stop_requested = stop_requested
        self.guard = guard

    def run(self) -> dict[str, Any]:
        """Train to the last step. Returns the two halves of result.json, `quality` and `timing`.

        Raises `NonFiniteError` before a bad step reaches the weights, `Preempted` after a stop.
        """
        config, comm = self.config, self.comm
        noted = self._noted(0.0, {})
        self.method.prepare(self._microbatches(0)[0])
        resumed, saved = self._restore()
        noted |= saved
        rows = None
        if comm.rank == 0:
            rows = metrics.MetricsLog(self.run_dir / "metrics.jsonl", resumed)
            log.info("training from step %d of %d", resumed, config.steps)
        self.elapsed_before = comm.broadcast_object(rows.elapsed if rows else None, src=0)
        comm.load_state_dict(noted["comm"])  # start-up exchanges are not the method's: not counted
        loss, held_out = noted["loss"], noted["held_out"]
        self.throughput.seconds_in_all = noted["busy"]
        self.method.module.train()  # a loaded model is in evaluation mode
        for step in range(resumed + 1, config.steps + 1):
            begun = time.perf_counter()
            loss, norm, lr, stopping = self._step(step)
            self.throughput.add(self._tokens(1), time.perf_counter() - begun)
            evaluated = self._due(step, config.eval_every)
            if evaluated or self._due(step, config.log_every):
                row = self._row(step, loss, norm, lr)
                if evaluated:
                    held_out = self.evaluate(step)
                    row |= held_out
                if rows:
                    rows.append(row)
                    log.info(metrics.sentence(row, config.steps))
            periodic = self._due(step, config.checkpoint_every)
            if periodic:
                self.method.flush(step)
            if stopping or periodic:  # a stop changes nothing: what is open stays open
                self._save(step, self._noted(loss, held_out))
            if stopping and step < config.steps:
                raise Preempted(f"stopped after step {step}; its checkpoint is written")
        return self._result(loss, held_out)

    def _noted(self, loss: float, held_out: dict[str, float]) -> dict[str, Any]:
        """What a checkpoint holds beside the method's state; plain values, equal on all ranks."""
        return {
            "comm": self.comm.state_dict(),
            "loss": loss,
            "held_out": held_out,
            "busy": self.throughput.seconds_in_all,
        }

    def _restore(self) -> tuple[int, dict[str, Any]]:
        """The step of the newest checkpoint, restored, and what `_save` noted beside it."""
        if not isinstance(self.method, OwnState):
            return self.checkpoints.load(self.model, self.method.optimizer)
        step, own, noted = self.checkpoints.load_own()
        if own:
            self.method.load_state_dict(own)
        return step, noted

    def _save(self, step: int, noted: dict[str, Any]) -> None:
        if isinstance(self.method, OwnState):
            self.checkpoints.save_own(step, self.method.state_dict(), noted)
        else:
            self.checkpoints.save(step, self.model, self.method.optimizer, noted)

    def evaluate(self, step: int) -> dict[str, float]:
        """Loss in nats per token, perplexity and bits per byte on the fixed held-out set."""
        self.method.flush(step)
        self.model.eval()
        totals = torch.zeros(3, dtype=torch.float64, device=self.comm.device)  # nats, tokens, bytes
        batches = data.evaluation_batches(
            self.held_out,
            sequences=self.config.eval_sequences,
            length=self.config.sequence_length,
            batch_size=self.config.global_batch
            // (self.comm.world_size * self.config.accumulation),
            rank=self.comm.rank,
            world_size=self.comm.world_size,
        )
        with torch.no_grad(), self.method.synced():
            for batch in batches:
                tokens = batch.to(self.comm.device)
                totals[0] += self._loss(self.model, tokens, "sum")
                totals[1] += tokens[:, 1:].numel()
                totals[2] += self.token_bytes[tokens[:, 1:]].sum()
        self.model.train()
        self.guard(step, lambda: self.comm.all_reduce(totals, tag="evaluation"))
        return self._figures(*totals.tolist())

    def _step(self, step: int) -> tuple[float, float, float, bool]:
        """One optimizer step: loss, gradient norm, learning rate, and whether to stop after it."""
        total, norm, microbatches = self._gradient(step)
        lr = learning_rate(step, self.peak_lr, self.config)
        stopping = False
        if self._meets(step):
            asked = torch.full_like(total, self.stop_requested())
            size = self.comm.world_size
            control = torch.stack((total / size, norm / size, asked, (~norm.isfinite()).float()))
            self.guard(step, lambda: self.comm.all_reduce(control, tag="control"))
            total, norm, stops, bad = control.unbind()
            if bad:
                raise NonFiniteError(self._diagnose(step, microbatches))
            stopping = bool(stops)
        else:
            self._require_finite(step, norm, microbatches)
        self.method.update(step, lr)
        return total.item(), norm.item(), lr, stopping

    def _gradient(self, step: int) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Of `step`, into `.grad`: this rank's loss, the gradient's norm, the microbatches."""
        seed_step(self.config.seed, step, self.rank)
        microbatches = self._microbatches(step - 1)
        total = torch.zeros((), device=self.comm.device)
        for index, tokens in enumerate(microbatches):
            with self.method.microbatch(last=index == len(microbatches) - 1):
                loss = self._loss(self.method.module, tokens) / len(microbatches)
                # An infinite loss can have a finite gradient; NaN reaches the norm on every rank.
                (loss * torch.where(torch.isfinite(loss), 1.0, torch.nan)).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total, self.method.gradient_norm(), microbatches

    def _require_finite(self, step: int, norm: Tensor, microbatches: list[Tensor]) -> None:
        """For a step at which ranks do not meet: the others learn of it from the launcher."""
        if not norm.isfinite():
            finding = self._finding(microbatches) or "the gradient's norm overflows float32"
            raise NonFiniteError(f"step {step}: rank {self.rank}: {finding}")

    def _meets(self, step: int) -> bool:
        """Whether the ranks exchange their losses and wishes at `step`."""
        config = self.config
        every = (config.log_every, config.eval_every, config.checkpoint_every)
        return self.method.meets(step) or any(self._due(step, each) for each in every)

    def _microbatches(self, index: int) -> list[Tensor]:
        """This rank's part of global batch `index`, int64 `[batch, tokens + 1]` each."""
        batch = data.batch(
            self.train,
            seed=self.config.seed,
            step=index,
            rank=self.rank,
            world_size=self.world_size,
            global_batch=self.config.global_batch,
            length=self.config.sequence_length,
        )
        return list(batch.to(self.comm.device).chunk(self.config.accumulation))

    def _loss(self, module: nn.Module, tokens: Tensor, reduction: str = "mean") -> Tensor:
        """`token_loss` of a batch `[batch, tokens + 1]`, the forward pass in bf16 where asked."""
        in_bf16 = self.config.precision == "bf16"
        with torch.autocast(self.comm.device.type, dtype=torch.bfloat16, enabled=in_bf16):
            scores = logits(module, tokens[:, :-1])
        return token_loss(scores, tokens[:, 1:], reduction)

    def _diagnose(self, step: int, microbatches: list[Tensor]) -> str:
        """Which rank and parameter went wrong."""
        gathered = self.comm.gather_objects(self._finding(microbatches))
        everyone: list[str] = self.comm.broadcast_object(gathered, src=0)
        for rank, text in enumerate(everyone):
            if text:
                return f"step {step}: rank {rank}: {text}"
        return f"step {step}: the sum of all ranks' gradients overflows float32"

    def _finding(self, microbatches: list[Tensor]) -> str:
        """What of this rank is not finite, or nothing; redoes the step's backward on its own."""
        findings = []
        self.model.zero_grad(set_to_none=True)
        for tokens in microbatches:
            loss = self._loss(self.model, tokens)
            if not torch.isfinite(loss):
                findings = [f"loss is {loss.item()}"]
                loss = loss * torch.nan
            loss.backward()  # type: ignore[no-untyped-call]
        bad = [
            name
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None and not torch.isfinite(parameter.grad).all()
        ]
        weights = [n for n, p in self.model.named_parameters() if not torch.isfinite(p).all()]
        if weights:
            findings.append(f"parameter {weights[0]} is not finite")
        elif bad:
            findings.append(f"gradient of {bad[0]} is not finite")
        return ", ".join(findings)

    def _optimizer_bytes(self) -> int:
        return memory.optimizer_bytes(self.method.optimizer)

    def _parameters(self) -> int:
        return parameter_count(self.model)
