"""The arms that are compared, and where the search for each one's learning rate begins.

Names: `sync_` trains without delays, `_x4` with four times the delays of P = 8 (28 updates on the
first stage), `_staged` gives a baseline the permanent rate of each stage that ours has, `moe_`
trains a mixture of experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from algorithms.async_pipeline.config import PRESETS, StageOptimizerConfig
from algorithms.common.config import ModelConfig
from benchmarks.async_study.setting import Arm, Job, Setting
from benchmarks.study.queue import Result

FULL = Setting()
LONG = replace(FULL, updates=7000)
"""A thousand times the longest delay."""
MOE = replace(
    FULL,
    updates=1000,
    model=ModelConfig(
        family="qwen3_moe",
        hidden_size=32,
        intermediate_size=88,
        num_hidden_layers=8,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        extra={
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 44,
        },
    ),
)
"""Each token goes through as many weights as in `FULL`."""
SEARCHED = 1000
"""Updates of the runs that search a rate."""


@dataclass(frozen=True)
class Row:
    """An arm in its setting."""

    arm: Arm
    setting: Setting = FULL
    follows: str | None = None
    """The row whose rate it takes, where it is not searched."""

    def job(self, name: str, rate: int, seed: int) -> Job:
        """The run that is reported, at `GRID[rate]`."""
        arm, setting = at_rate(self.arm, rate), self.setting
        return Job(name=name, arm=arm, seed=seed, setting=setting, until=setting.updates)

    def trials(self, name: str, rate: int) -> list[Job]:
        """The run that tells whether `GRID[rate]` is good: seed 0, the first updates of the
        schedule, the validation split."""
        job = self.job(name, rate, 0)
        return [replace(job, until=min(job.until, SEARCHED), split="validation")]

    def loss(self, results: Sequence[Result]) -> float:
        """In the end of its trial; one that diverged is worse than all others."""
        [result] = results
        final: float | None = result["final"]
        return final if final is not None and math.isfinite(final) else math.inf


def _preset(name: str, *, staged: bool = False, **arm: Any) -> Arm:
    optimizer = PRESETS[name]
    if staged:
        optimizer = replace(optimizer, rate_power=PRESETS["ours"].rate_power)
    return Arm(optimizer=optimizer, **arm)


def rotated_with(optimizer: StageOptimizerConfig, **changes: Any) -> StageOptimizerConfig:
    """The same with other fields of its rotation."""
    assert optimizer.rotation is not None
    return replace(optimizer, rotation=replace(optimizer.rotation, **changes))


BASELINES = ("adamw", "pipedream_lr", "nesterov")
STAGED = ("adamw_staged", "nesterov_staged")
X4 = ("adamw_x4", "nesterov_x4")
"""Of PipeDream-LR, which is AdamW after its correction, there are no such rows."""

ROWS: dict[str, Row] = {
    "sync_adamw": Row(_preset("adamw", stages=1)),
    "sync_ours": Row(_preset("ours", stages=1)),
    **{name: Row(_preset(name)) for name in (*BASELINES, "paper", "ours")},
    **{name: Row(_preset(name.removesuffix("_staged"), staged=True)) for name in STAGED},
    **{name: Row(_preset(name.removesuffix("_x4"), stretch=4)) for name in (*X4, "ours_x4")},
    "adamw_no_stash": Row(_preset("adamw", stash=False), follows="adamw"),
    "ours_no_stash": Row(_preset("ours", stash=False), follows="ours"),
    "ours_stage_aware": Row(
        Arm(optimizer=rotated_with(PRESETS["ours"], refresh_budget="stage_aware")), follows="ours"
    ),
    "moe_sync_adamw": Row(_preset("adamw", stages=1), MOE),
    "moe_ours": Row(_preset("ours"), MOE),
    "sync_ours_long": Row(_preset("ours", stages=1), LONG, "sync_ours"),
    "ours_long": Row(_preset("ours"), LONG, "ours"),
    **{f"moe_{name}": Row(_preset(name), MOE, name) for name in (*BASELINES, "paper")},
}

QUICK = ("sync_adamw", "sync_ours", *BASELINES, "paper", "ours")

GRID = tuple(round(0.000125 * 2 ** (i / 2), 7) for i in range(18))
"""Learning rates, for every arm: steps of the square root of 2."""

RATES = {
    "sync_adamw": 9,
    "sync_ours": 11,
    "adamw": 5,
    "pipedream_lr": 6,
    "nesterov": 8,
    "paper": 7,
    "ours": 13,
    "adamw_staged": 7,
    "nesterov_staged": 9,
    "adamw_x4": 6,
    "nesterov_x4": 4,
    "ours_x4": 12,
    "moe_sync_adamw": 9,
    "moe_ours": 12,
}
"""Row -> index into `GRID` where its search begins, and which `--quick` takes."""


def at_rate(arm: Arm, index: int) -> Arm:
    """The arm with the learning rate `GRID[index]`."""
    settings = replace(arm.optimizer.optimizer, lr=GRID[index])
    return replace(arm, optimizer=replace(arm.optimizer, optimizer=settings))
