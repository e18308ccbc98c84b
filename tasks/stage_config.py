"""Configs of the stages that have arms; see `tasks/config.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from algorithms.async_pipeline import config as async_pipeline
from algorithms.branch_replay import job_config as branch_replay
from algorithms.common.config import (
    Config,
    ModelConfig,
    RunConfig,
    SharedTrainingConfig,
    TrainingConfig,
    require,
)
from algorithms.lordo import config as lordo
from tasks.data_config import require_names


@dataclass(frozen=True, kw_only=True)
class StageConfig(Config):
    """A stage with arms: they learn from the same data and are evaluated alike."""

    training: RunConfig
    arms: dict[str, Any]
    """What `experiment` trains."""
    study: dict[str, Any] = field(default_factory=dict)
    """Further arms: `experiment --study` trains them too."""

    def __post_init__(self) -> None:
        require(bool(self.arms), "arms", "must name at least one arm")
        require_names(self.arms, "arms")
        require_names(self.study, "study")
        for name in self.study:
            require(name not in self.arms, f"study.{name}", "arms has one of that name")

    @property
    def all_arms(self) -> dict[str, Any]:
        """`arms`, then those of `study`."""
        return self.arms | self.study


@dataclass(frozen=True, kw_only=True)
class LordoConfig(StageConfig):
    """Stage `pretrain_lordo`: data-parallel."""

    training: TrainingConfig
    arms: dict[str, lordo.ArmConfig]
    study: dict[str, lordo.ArmConfig] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class AsyncConfig(StageConfig):
    """Stage `pretrain_async`: through a pipeline, on CPUs."""

    training: SharedTrainingConfig
    model: ModelConfig
    """In params.yaml only what differs from the top-level `model`."""
    arms: dict[str, async_pipeline.ArmConfig]
    study: dict[str, async_pipeline.ArmConfig] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        for group in ("arms", "study"):
            for name, arm in getattr(self, group).items():
                arm.check_batch(self.training.global_batch, f"{group}.{name}.microbatches")


@dataclass(frozen=True, kw_only=True)
class PolicyConfig(Config):
    """Stage `policy`: what the arms of `post_train` start from, and refer to."""

    model: ModelConfig
    """Built by its sizes, or loaded from `path`, such as models/pretrain_lordo/ddp."""
    seed: int = 0
    """Of the initial weights and of what a warm start is shown."""
    warm_start: branch_replay.WarmStartConfig | None = None
    """A supervised start on the prompts of `prompts.lookup`; None: the model as it is."""


@dataclass(frozen=True, kw_only=True)
class PostTrainConfig(StageConfig):
    """Stage `post_train`: reinforcement learning by branch replay, from one policy."""

    policy: PolicyConfig
    training: branch_replay.PostTrainingConfig
    arms: dict[str, branch_replay.ArmConfig]
    study: dict[str, branch_replay.ArmConfig] = field(default_factory=dict)
