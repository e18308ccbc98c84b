"""What every training loop keeps and says: the rows of metrics.jsonl, the halves of result.json.

Names are the same in every arm of every stage, so that pages line them up. Seconds are wall time,
hours of devices are ranks times wall time, over all attempts.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch

from algorithms.common import data, memory, metrics
from algorithms.common.checkpoint import Checkpoints
from algorithms.common.comm import Comm
from algorithms.common.config import RunConfig, SharedTrainingConfig


class Run:
    """One run on one rank: its checkpoints, its clock. Loops derive from it."""

    def __init__(self, config: RunConfig, *, run_dir: Path, comm: Comm) -> None:
        self.config = config
        self.run_dir = run_dir
        self.comm = comm
        self.rank, self.world_size = comm.rank, comm.world_size
        self.checkpoints = Checkpoints(run_dir / "checkpoints", config.keep_checkpoints, comm)
        self.started = time.perf_counter()
        self.elapsed_before = 0.0
        self.throughput = metrics.Throughput()

    # What a loop says of itself

    def _tokens(self, steps: int) -> int:
        """That the first `steps` steps learned from."""
        raise NotImplementedError

    def _optimizer_bytes(self) -> int:
        """Of one rank's optimizer state."""
        raise NotImplementedError

    def _parameters(self) -> int:
        """Of the whole model."""
        raise NotImplementedError

    # What loops that count otherwise replace

    def _sent(self) -> dict[str, Any]:
        """Bytes moved so far, under their metric names."""
        return self.comm.metrics()

    def _hours(self, elapsed: float) -> dict[str, float]:
        hours = elapsed * self.world_size / 3600
        on_gpu = self.comm.device.type == "cuda"
        return {"device_hours": hours, "gpu_hours": hours if on_gpu else 0.0}

    def _speed(self, rate: float) -> dict[str, float]:
        return {"tokens_per_s": rate}

    def _peak_bytes(self) -> int:
        """The largest over ranks."""
        peak = torch.tensor(memory.peak_bytes(self.comm.device), device=self.comm.device)
        self.comm.all_reduce(peak, tag="control", op="max")
        return int(peak.item())

    # What they share

    def _due(self, step: int, every: int) -> bool:
        return step % every == 0 or step == self.config.steps

    def _elapsed(self) -> float:
        return self.elapsed_before + time.perf_counter() - self.started

    def _row(self, step: int, loss: float, norm: float, lr: float) -> dict[str, Any]:
        """What metrics.jsonl says of `step`; the peak is the largest over ranks."""
        elapsed = self._elapsed()
        return {
            "step": step,
            "time": time.time(),
            "elapsed": elapsed,
            "tokens": self._tokens(step),
            "train/loss": loss,
            "lr": lr,
            "grad_norm": norm,
            **self._speed(self.throughput.take()),
            **self._hours(elapsed),
            **self._sent(),
            "memory/peak_bytes": self._peak_bytes(),
            "memory/optimizer_bytes": self._optimizer_bytes(),
        }

    def _result(self, loss: float, held_out: dict[str, float]) -> dict[str, Any]:
        """The two halves of result.json: what repeats exactly, and what does not."""
        elapsed = self._elapsed()
        counted = self._sent()
        quality = {
            **{name.replace("/", "_"): value for name, value in held_out.items()},
            "train_loss": loss,
            "steps": self.config.steps,
            "tokens": self._tokens(self.config.steps),
            "parameters": self._parameters(),
            "payload_bytes": counted["comm/payload_bytes"],
            "wire_bytes": counted["comm/wire_bytes"],
        }
        timing = {
            "seconds": elapsed,
            **self._hours(elapsed),
            **self._speed(self._tokens(self.config.steps) / self.throughput.seconds_in_all),
            "peak_bytes": self._peak_bytes(),
            "optimizer_bytes": self._optimizer_bytes(),
        }
        return {"quality": quality, "timing": timing}


class TextRun(Run):
    """A run on token shards, evaluated on the held-out ones."""

    def __init__(
        self, config: SharedTrainingConfig, *, tokens_dir: Path, run_dir: Path, comm: Comm
    ) -> None:
        super().__init__(config, run_dir=run_dir, comm=comm)
        self.config: SharedTrainingConfig = config
        self.train = data.TokenShards(tokens_dir, "train")
        self.held_out = data.TokenShards(tokens_dir, "val")
        self.train.require(config.global_batch, config.sequence_length)
        self.held_out.require(config.eval_sequences, config.sequence_length)
        self.token_bytes = data.token_bytes(tokens_dir).to(comm.device)

    def _tokens(self, steps: int) -> int:
        return steps * self.config.global_batch * self.config.sequence_length

    def _figures(self, nats: float, count: float, size: float) -> dict[str, float]:
        """Loss per token, perplexity and bits per byte of held-out text, from sums over it:
        of the loss, of tokens, of the tokens' bytes."""
        return {
            "val/loss": nats / count,
            "val/perplexity": math.exp(min(nats / count, 700.0)),
            "val/bits_per_byte": nats / math.log(2) / (size * self.held_out.bytes_factor),
        }
