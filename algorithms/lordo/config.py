"""Configs of stage `pretrain_lordo`; see `algorithms/common/config.py` for the shared parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from algorithms.common.config import Config, ModelConfig, OptimizerConfig, TrainingConfig


@dataclass(frozen=True, kw_only=True)
class ArmConfig(Config):
    """One way to train data-parallel; arms of a stage share tokens and evaluation."""

    method: Literal["ddp"] = "ddp"
    """ddp: AdamW on gradients averaged over all ranks at every step."""
    optimizer: OptimizerConfig


@dataclass(frozen=True, kw_only=True)
class JobConfig(Config):
    """The whole config.json of `tasks.jobs.pretrain_lordo`."""

    stage: str
    """Name of the DVC stage, `pretrain_lordo`."""
    arm_name: str
    job_id: str
    """Hash of everything that decides the result; names the run directory."""
    tokens_dir: str
    """Folder that `tasks/tokens.py` wrote, absolute."""
    model: ModelConfig
    training: TrainingConfig
    arm: ArmConfig
