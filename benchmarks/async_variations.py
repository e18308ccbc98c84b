"""What each ingredient of preset `ours` is worth, and how it does elsewhere; one seed a row.

    python -m benchmarks.async_variations [--quick] [--json PATH]

The setting of `benchmarks.async_pipeline` with a schedule of 1,000 updates. A row changes one thing
of `ours`, at the delays of P = 8 or at four times those, or sets it and rivals before wider models.
A row has the best final loss, on the validation split, of the rates that it names; `gap` is that
less the loss of the first row of its block, in nats per byte. With one seed, gaps under about .02
are noise. Finished runs are kept with those of `benchmarks.async_pipeline`. The quick form has the
first block only.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from algorithms.async_pipeline.config import PRESETS
from algorithms.common.config import ModelConfig
from benchmarks.async_study.arms import RATES, ROWS, at_rate, rotated_with
from benchmarks.async_study.setting import LLAMA, Arm, Job, Setting
from benchmarks.async_study.training import train
from benchmarks.report import Figures, run
from benchmarks.study import streams
from benchmarks.study.queue import Result, Results, run_jobs
from tasks.config import load_params
from tasks.paths import RUNS

OURS = PRESETS["ours"]
SHORT = Setting(updates=1000)


def _wide(width: int, heads: int, updates: int) -> Setting:
    model: ModelConfig = replace(
        LLAMA,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_attention_heads=heads,
        num_key_value_heads=heads,
    )
    return replace(SHORT, model=model, updates=updates)


WIDTH_64 = _wide(64, 4, 500)
LARGE = _wide(224, 7, 200)
"""Five million parameters."""


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    arm: Arm
    rates: tuple[int, ...]
    """Indices into `GRID`."""
    setting: Setting = SHORT

    def jobs(self, name: str) -> list[Job]:
        """A run for each rate."""
        return [
            Job(
                name=name,
                arm=at_rate(self.arm, rate),
                seed=0,
                setting=self.setting,
                until=self.setting.updates,
                split="validation",
            )
            for rate in self.rates
        ]


def _ours(**rotation: Any) -> Arm:
    return Arm(optimizer=rotated_with(OURS, **rotation))


def _beta(**betas: float) -> Arm:
    return Arm(optimizer=replace(OURS, optimizer=replace(OURS.optimizer, **betas)))


def _power(p: float, **arm: Any) -> Arm:
    return Arm(optimizer=replace(OURS, rate_power=p), **arm)


def _at(rate: int, arms: Mapping[str, Arm]) -> dict[str, Row]:
    return {name: Row(arm, (rate,)) for name, arm in arms.items()}


def _rivals(setting: Setting, *steps: int) -> dict[str, Row]:
    """At rates so many steps of the grid above their own."""
    return {
        name: Row(ROWS[name].arm, tuple(RATES[name] + step for step in steps), setting)
        for name in ("sync_adamw", "nesterov", "paper", "ours")
    }


BLOCKS: dict[str, dict[str, Row]] = {
    "ingredient": _at(
        RATES["ours"],
        {
            "ours": Arm(optimizer=OURS),
            "nu_50": _ours(nu=0.5),
            "nu_85": _ours(nu=0.85),
            "nu_100": _ours(nu=1.0),
            "p_0": _power(0.0),
            "p_50": _power(0.5),
            "p_100": _power(1.0),
            "every_3": _ours(refresh_every=3),
            "every_30": _ours(refresh_every=30),
            "blocks_4": _ours(refresh_blocks=4),
            "stage_aware": _ours(refresh_budget="stage_aware"),
            "reversed": _ours(refresh_budget="reversed"),
            "unilateral": _ours(geometry="unilateral"),
            "first": _ours(source="first"),
            "vocabulary_adamw": _ours(vocabulary="adamw"),
            "beta2_999": _beta(beta2=0.999),
            "not_rotated": _ours(geometry="unilateral", max_side=1),
            "no_stash": Arm(optimizer=OURS, stash=False),
        },
    ),
    "delay_28": _at(
        RATES["ours_x4"],
        {
            "ours": _power(0.75, stretch=4),
            "p_50": _power(0.5, stretch=4),
            "p_100": _power(1.0, stretch=4),
        },
    ),
    "width_64": _rivals(WIDTH_64, -3, -1),
    "5m": _rivals(LARGE, -6, -4),
}
"""Block -> row -> what is run. The first row is that which others are set against."""


def main(argv: Sequence[str]) -> int:
    """Command line; returns the exit code."""
    return run("async_variations", (__doc__ or "").splitlines()[0], measure, argv)


def measure(quick: bool) -> Figures:
    """All figures; the corpus is made or found below runs/."""
    folder = RUNS / "benchmarks" / "async"
    folder.mkdir(parents=True, exist_ok=True)
    tokens = streams.prepare(load_params().corpus, folder)
    blocks = dict(list(BLOCKS.items())[:1]) if quick else BLOCKS
    results = Results(folder, train)
    jobs = [
        job
        for block, rows in blocks.items()
        for name, row in rows.items()
        for job in row.jobs(f"{block}.{name}")
    ]
    run_jobs(lambda: jobs, tokens, results)
    return figures(BLOCKS, results.find)


def figures(
    blocks: Mapping[str, Mapping[str, Row]], lookup: Callable[[Job], Result | None]
) -> Figures:
    """`BLOCK.ROW.` with loss, gap and rate; null for what was not run or diverged."""
    found: dict[str, float | None] = {}
    for block, rows in blocks.items():
        base: float | None = None
        for name, row in rows.items():
            prefix = f"{block}.{name}"
            job, loss = _best(row.jobs(prefix), lookup)
            base = loss if name == next(iter(rows)) else base
            found |= {
                f"{prefix}.loss": loss,
                f"{prefix}.gap": loss - base if loss is not None and base is not None else None,
                f"{prefix}.lr": job.arm.optimizer.optimizer.lr if loss is not None else None,
            }
    return found


def _best(jobs: Sequence[Job], lookup: Callable[[Job], Result | None]) -> tuple[Job, float | None]:
    """Of what diverged or was not run, the first, without a loss."""
    losses = [(lookup(job) or {}).get("final") for job in jobs]
    job, loss = min(
        zip(jobs, losses, strict=True),
        key=lambda each: math.inf if each[1] is None else each[1],
    )
    return job, loss


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
