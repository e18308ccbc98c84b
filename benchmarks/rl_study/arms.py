"""The rows that are compared, and where the search for each one's learning rate begins."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from algorithms.branch_replay.config import ObjectiveConfig
from algorithms.branch_replay.lookup import LookupConfig
from benchmarks.rl_study.setting import Arm, Job, Setting, Start
from benchmarks.study.queue import Result

GRID = (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
"""Learning rates, for every row."""

FULL = Setting()
TO_060 = replace(FULL, until=100)
"""As far as it takes to .60."""
HALF = replace(FULL, updates=160)
SHORT = replace(FULL, updates=80)
LONG = replace(FULL, prompts=64, updates=600, evaluate_every=50)
GOOD = replace(
    FULL,
    start=Start(stages=((3, 0), (4, 0), (6, 4), (6, 43)), further=(6, 107), steps=600),
    task=LookupConfig(filler=107),
    prompts=16,
    updates=160,
)
"""A reader that has converged, on prompts of 128 tokens."""


@dataclass(frozen=True)
class Row:
    """An arm in its setting."""

    arm: Arm
    setting: Setting = FULL
    follows: str | None = None
    """The row whose rate it takes, where it is not searched."""
    searched: int = 1
    """Seeds that a rate is chosen by."""

    def job(self, name: str, rate: int, seed: int) -> Job:
        """A run at `GRID[rate]`."""
        arm = replace(self.arm, lr=GRID[rate])
        return Job(name=name, arm=arm, setting=self.setting, seed=seed)

    def trials(self, name: str, rate: int) -> list[Job]:
        """The runs that tell whether `GRID[rate]` is good: those that are reported, which look at
        the validation prompts too."""
        return [self.job(name, rate, seed) for seed in range(self.searched)]

    def loss(self, results: Sequence[Result]) -> float:
        """The share of wrong answers to the validation prompts."""
        return statistics.fmean(1 - result["validation"] for result in results)


def _row(mode: Any, objective: str = "grpo", setting: Setting = FULL, **changes: Any) -> Row:
    settings = {k: v for k, v in changes.items() if k in ("follows", "searched")}
    arm = {k: v for k, v in changes.items() if k not in settings}
    chosen = ObjectiveConfig(name=objective, **({"beta": 0.3} if objective == "dpo" else {}))  # type: ignore[arg-type]
    return Row(Arm(lr=GRID[0], mode=mode, objective=chosen, **arm), setting, **settings)


MODES = ("exact", "response_only")

ROWS: dict[str, Row] = {
    "exact": _row("exact", searched=3, compared=True),
    "response_only": _row("response_only", searched=3, compared=True),
    "truncated": _row("truncated"),
    "naive": _row("naive", setting=TO_060, follows="exact"),
    **{f"ppo_{mode}": _row(mode, "ppo", HALF, follows=mode, inner_epochs=2) for mode in MODES},
    **{f"dpo_{mode}": _row(mode, "dpo", HALF) for mode in MODES},
    "reuse_1": _row("response_only", setting=HALF, follows="response_only"),
    **{
        f"reuse_{steps}": _row(
            "response_only", setting=HALF, follows="response_only", reuse=steps, recapture=False
        )
        for steps in (2, 4, 8)
    },
    "recaptured_8": _row("response_only", setting=HALF, follows="response_only", reuse=8),
    "shuffled": _row("exact", setting=SHORT, follows="exact", shuffled=True),
    **{f"good_reader_{mode}": _row(mode, setting=GOOD) for mode in MODES},
    "best": _row("exact", setting=LONG, follows="exact", reward=0.6),
}

RATES = {
    "exact": 2,
    "response_only": 2,
    "truncated": 2,
    "dpo_exact": 2,
    "dpo_response_only": 2,
    "good_reader_exact": 2,
    "good_reader_response_only": 2,
}
"""Row -> index into `GRID` where its search begins, and which `--quick` takes."""
