"""An arm's config -> how its stages are trained.

Every stage's optimizer has the rate of the run's schedule, times what the arm's optimizer makes of
the stage's delay.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from algorithms.async_pipeline import baselines
from algorithms.async_pipeline.config import ArmConfig
from algorithms.async_pipeline.partition import by_hand, costs, partition
from algorithms.async_pipeline.pipeline import Pipeline
from algorithms.async_pipeline.simulated import Simulated
from algorithms.async_pipeline.stage import cut
from algorithms.async_pipeline.synchronous import Synchronous, placement
from algorithms.async_pipeline.trainers import Asynchronous, Flushed, OneProcess, Trainer
from algorithms.common.comm import Comm
from algorithms.common.config import SharedTrainingConfig
from algorithms.common.loop import learning_rate, token_loss


class Optimizers:
    """Makes the optimizer of each stage, and sets its rate before each update."""

    def __init__(self, arm: ArmConfig, training: SharedTrainingConfig) -> None:
        self.config, self.training = arm.optimizer, training
        self.delays = arm.update_delays
        self.stage_of: dict[Optimizer, int] = {}

    def build(self, named: list[tuple[str, nn.Parameter]], stage: int, stages: int) -> Optimizer:
        """A `Factory` of `update`."""
        made = baselines.build(named, self.config, stage=stage, stages=stages, delays=self.delays)
        self.stage_of[made] = stage
        return made

    def before_update(self, optimizer: Optimizer, update: int) -> None:
        """Set the rate of `update`, from 0."""
        lr = learning_rate(update + 1, self.config.optimizer.lr, self.training)
        delay = self.delays[self.stage_of[optimizer]]
        lr = baselines.rate(self.config, lr, delay=delay, update=update)
        for group in optimizer.param_groups:
            group["lr"] = lr


def build(model: nn.Module, arm: ArmConfig, comm: Comm, training: SharedTrainingConfig) -> Trainer:
    """This rank's part; it shares its weights with `model` and trains them in place.

    Raises `InputError` for a model that cannot be cut so.
    """
    length = training.sequence_length
    counts = _layers(model, arm, length)
    stages = cut(model, counts)
    optimizers = Optimizers(arm, training)
    shared: dict[str, Any] = {
        "clip_norm": arm.optimizer.optimizer.clip_norm,
        "before_update": optimizers.before_update,
    }
    if arm.executor == "simulator":
        return OneProcess(
            Simulated(
                stages,
                optimizers.build,
                token_loss,
                costs=costs(model, counts, length),
                delays=arm.microbatch_delays,
                stash=arm.stash != "none",
                accumulation=arm.microbatches,
                **shared,
            )
        )
    if arm.schedule == "async":
        pipeline = Pipeline(
            stages[comm.rank],
            optimizers.build,
            token_loss,
            comm,
            delays=arm.delays,
            stash=arm.stash,
            recompute=arm.recompute,
            accumulation=arm.microbatches,
            **shared,
        )
        return Asynchronous(pipeline, training.steps)
    own = [stages[index] for index in placement(arm.schedule, arm.stages)[comm.rank]]
    return Flushed(
        Synchronous(
            own,
            optimizers.build,
            token_loss,
            comm,
            schedule=arm.schedule,
            microbatches=arm.microbatches,
            **shared,
        )
    )


def _layers(model: Any, arm: ArmConfig, sequence_length: int) -> list[int]:
    """How many lie on each part. Raises `InputError` for a family that cannot be cut."""
    try:
        if arm.layers is None:
            return partition(model, arm.parts, sequence_length)
        return by_hand(arm.layers, len(model.base_model.layers), arm.parts)
    except AttributeError:
        cut(model, [len(getattr(model.base_model, "layers", ()))])  # says what the family lacks
        raise
