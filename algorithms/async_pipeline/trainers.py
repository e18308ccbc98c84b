"""The three ways to train an arm's stages, with the same calls: ranks that never flush, ranks under
torch's synchronous schedules, and all stages in one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from algorithms.async_pipeline import resume
from algorithms.async_pipeline.pipeline import Batches, Pipeline
from algorithms.async_pipeline.simulated import Simulated
from algorithms.async_pipeline.stage import gather
from algorithms.async_pipeline.synchronous import Synchronous
from algorithms.async_pipeline.trace import Event
from algorithms.async_pipeline.update import Loss
from algorithms.common.checkpoint import Checkpoints
from algorithms.common.comm import Comm


class Trainer(Protocol):
    """All ranks make the same calls in the same order."""

    @property
    def stages(self) -> Sequence[nn.Module]:
        """Those of this rank."""

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """Theirs."""

    @property
    def updates(self) -> int:
        """Made so far."""

    def run(self, batches: Batches, until: int) -> list[float]:
        """Train until `until` updates are made in all; losses of the microbatches since the last
        call, on every rank."""

    def evaluate(self, batches: Batches, count: int, metric: Loss) -> list[float]:
        """`metric` of each of `count` batches, on every rank."""

    def norms(self) -> list[float]:
        """L2 norms before clipping of the last update's gradients, by stage of this rank."""

    def traces(self) -> list[list[Event]] | None:
        """On rank 0 what each rank did since the last call; None elsewhere, and where all that is
        known is a model."""

    def save(self, checkpoints: Checkpoints, extra: dict[str, Any]) -> None:
        """Write all ranks' state; `extra` holds plain values, equal on all ranks."""

    def load(self, checkpoints: Checkpoints) -> dict[str, Any]:
        """Restore the newest sound checkpoint; its `extra`, {} without one."""


class Asynchronous:
    """`Pipeline`, which drains at update `steps`."""

    def __init__(self, pipeline: Pipeline, steps: int) -> None:
        self.pipeline, self.steps = pipeline, steps
        self.stages = [pipeline.stage]
        self.optimizers = [pipeline.optimizer]

    @property
    def updates(self) -> int:
        return self.pipeline.updates

    def run(self, batches: Batches, until: int) -> list[float]:
        return self.pipeline.run(batches, until, drain_at=self.steps)

    def evaluate(self, batches: Batches, count: int, metric: Loss) -> list[float]:
        return self.pipeline.evaluate(batches, count, metric)

    def norms(self) -> list[float]:
        return self.pipeline.norms[-1:]

    def traces(self) -> list[list[Event]] | None:
        return self.pipeline.traces()

    def save(self, checkpoints: Checkpoints, extra: dict[str, Any]) -> None:
        resume.save(checkpoints, self.pipeline, extra)

    def load(self, checkpoints: Checkpoints) -> dict[str, Any]:
        return resume.load(checkpoints, self.pipeline)


class Flushed:
    """`Synchronous`."""

    def __init__(self, pipeline: Synchronous) -> None:
        self.pipeline = pipeline
        self.stages, self.optimizers = pipeline.stages, pipeline.optimizers

    @property
    def updates(self) -> int:
        return self.pipeline.updates

    def run(self, batches: Batches, until: int) -> list[float]:
        return self.pipeline.run(batches, until)

    def evaluate(self, batches: Batches, count: int, metric: Loss) -> list[float]:
        return self.pipeline.evaluate(batches, count, metric)

    def norms(self) -> list[float]:
        return [norms[-1] for norms in self.pipeline.norms]

    def traces(self) -> list[list[Event]] | None:
        return self.pipeline.traces()

    def save(self, checkpoints: Checkpoints, extra: dict[str, Any]) -> None:
        own = {"stages": [resume.stage_state(*pair) for pair in self._pairs()]}
        checkpoints.save_own(self.updates, own, extra)

    def load(self, checkpoints: Checkpoints) -> dict[str, Any]:
        step, own, extra = checkpoints.load_own()
        for pair, saved in zip(self._pairs(), own.get("stages", ()), strict=False):
            resume.load_stage(*pair, saved, checkpoints.folder)
        self.pipeline.updates = step
        return extra

    def _pairs(self) -> list[tuple[dict[str, nn.Parameter], Optimizer]]:
        return list(zip(self.pipeline.weights, self.optimizers, strict=True))


class OneProcess:
    """`Simulated`, on a single rank."""

    def __init__(self, simulated: Simulated) -> None:
        self.simulated = simulated
        self.stages, self.optimizers = simulated.delayed.stages, simulated.delayed.optimizers

    @property
    def updates(self) -> int:
        return self.simulated.updates

    def run(self, batches: Batches, until: int) -> list[float]:
        return self.simulated.run(batches, until)

    def evaluate(self, batches: Batches, count: int, metric: Loss) -> list[float]:
        return self.simulated.evaluate(batches, count, metric)

    def norms(self) -> list[float]:
        return self.simulated.delayed.norms

    def traces(self) -> list[list[Event]] | None:
        return None

    def save(self, checkpoints: Checkpoints, extra: dict[str, Any]) -> None:
        checkpoints.save_own(self.updates, self.simulated.state_dict(), extra)

    def load(self, checkpoints: Checkpoints) -> dict[str, Any]:
        _, own, extra = checkpoints.load_own()
        if own:
            self.simulated.load_state_dict(own, checkpoints.folder)
        return extra


def gather_all(trainer: Trainer, comm: Comm) -> list[dict[str, Tensor]] | None:
    """On rank 0 the weights of every stage of every rank, elsewhere None."""
    parts = [gather(stage, comm) for stage in trainer.stages]
    return [each for part in parts for each in part or []] if comm.rank == 0 else None
