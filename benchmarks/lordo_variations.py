"""What each ingredient of `lordo_ns` is worth, and how it does elsewhere; one seed a row.

    python -m benchmarks.lordo_variations [--quick] [--json PATH]

The setting of `benchmarks.lordo` at half its steps. A row changes one thing of `lordo_ns`, or is
one of the paper's two arms with another rank, or sets all workers before other data, batches or a
model of five million parameters, there with rivals. A row is tried at the rates it names;
validation chooses, test is reported. `gap_pct` is against the first row of its block. With one
seed, differences under about two per cent are noise. Finished runs are kept with those of
`benchmarks.lordo`. The quick form has the first block only.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from algorithms.common.config import ModelConfig
from algorithms.lordo.config import ArmConfig
from benchmarks.lordo_study.arms import ARMS, OUR_EVERY, RATES, at_rate
from benchmarks.lordo_study.search import Lookup
from benchmarks.lordo_study.setting import GPT2, Job, Setting
from benchmarks.lordo_study.training import train
from benchmarks.report import Figures, run
from benchmarks.study import streams
from benchmarks.study.queue import Result, Results, run_jobs
from tasks.config import load_params
from tasks.paths import RUNS

OURS = ARMS["lordo_ns"]
HALF = Setting(steps=640)
LARGE: ModelConfig = replace(
    GPT2, hidden_size=256, intermediate_size=1024, num_hidden_layers=7, num_attention_heads=8,
    num_key_value_heads=8,
)  # fmt: skip
"""5.6 million parameters."""


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    arm: ArmConfig
    rates: tuple[int, ...]
    """Indices into `GRID`."""
    setting: Setting = HALF

    def jobs(self, name: str) -> list[Job]:
        return [
            Job(name=name, arm=at_rate(self.arm, rate), seed=0, setting=self.setting)
            for rate in self.rates
        ]


def _ours(low_rank: Mapping[str, Any] | None = None, **sync: Any) -> ArmConfig:
    """`lordo_ns` with other fields of its two parts."""
    assert OURS.low_rank is not None and OURS.sync is not None
    return replace(
        OURS, low_rank=replace(OURS.low_rank, **(low_rank or {})), sync=replace(OURS.sync, **sync)
    )


def _of_rank(arm: ArmConfig, rank: int) -> ArmConfig:
    assert arm.low_rank is not None
    return replace(arm, low_rank=replace(arm.low_rank, rank=rank))


def _beta1(value: float) -> ArmConfig:
    return replace(OURS, optimizer=replace(OURS.optimizer, beta1=value))


def _rows(arms: Mapping[str, ArmConfig]) -> dict[str, Row]:
    return {name: Row(arm, (RATES["lordo_ns"],)) for name, arm in arms.items()}


def _rivals(names: Sequence[str], setting: Setting, *steps: int) -> dict[str, Row]:
    """Named arms in another setting, at rates so many steps of the grid above their own."""
    return {
        name: Row(ARMS[name], tuple(RATES[name] + step for step in steps or (0,)), setting)
        for name in names
    }


def _every(names: Sequence[str], every: int, setting: Setting) -> dict[str, Row]:
    rows = {}
    for name in names:
        arm = ARMS[name]
        if arm.sync is not None:
            arm = replace(arm, sync=replace(arm.sync, every=every))
        rows[name] = Row(arm, tuple(RATES[name] + step for step in (-2, -1, 0, 1)), setting)
    return rows


BLOCKS: dict[str, dict[str, Row]] = {
    "ingredient": _rows(
        {
            "lordo_ns": OURS,
            "every_8": _ours(every=8),
            "every_32": _ours(every=32),
            "rank_4": _ours({"rank": 4}),
            "rank_16": _ours({"rank": 16}),
            "carry_0": _ours({"carry": 0.0}),
            "carry_80": _ours({"carry": 0.8}),
            "refreshed": _ours({"projection": "global"}),
            "random": _ours({"projection": "random"}),
            "sign": _ours(wire="sign"),
            "int4": _ours(wire="int4"),
            "no_residual": _ours(residual="none"),
            "outer_0": _ours(outer="average", outer_momentum=0.0, outer_state="fp32"),
            "delay_4": _ours(delay=4),
            "beta1_90": _beta1(0.9),
        }
    ),
    "paper_rank": {
        f"{name}_{rank}": Row(
            _of_rank(ARMS[name], rank), tuple(RATES[name] + step for step in steps)
        )
        for rank in (2, 8, 32)
        for name, steps in (("lordo_local", (-2, 0, 2)), ("lordo_global", (-4, -2, 0)))
    },
    "sorted": _rivals(
        ("ddp", "des_loc", "lordo_global", "lordo_ns", "muloco"), replace(HALF, dealing="sorted")
    ),
    "batch_x4": _every(
        ("ddp", "lordo_ns", "muloco", "muon_ddp"),
        OUR_EVERY // 4,
        replace(HALF, sequences=4 * HALF.sequences, steps=HALF.steps // 4),
    ),
    "5m": {
        **_rivals(("ddp",), replace(HALF, model=LARGE, steps=128), -2, 0, 2),
        **_rivals(("lordo_ns", "muloco"), replace(HALF, model=LARGE, steps=128), -2, 0),
    },
}
"""Block -> row -> what is run. The first row is that which others are set against."""


def main(argv: Sequence[str]) -> int:
    """Command line; returns the exit code."""
    return run("lordo_variations", (__doc__ or "").splitlines()[0], measure, argv)


def measure(quick: bool) -> Figures:
    """All figures; the corpus is made or found below runs/."""
    folder = RUNS / "benchmarks" / "lordo"
    folder.mkdir(parents=True, exist_ok=True)
    tokens = streams.prepare(load_params().corpus, folder)
    blocks = dict(list(BLOCKS.items())[:1]) if quick else BLOCKS
    results = Results(folder, train)
    jobs = [job for name, row in _named(blocks) for job in row.jobs(name)]
    run_jobs(lambda: jobs, tokens, results)
    return figures(BLOCKS, results.find)


def figures(blocks: Mapping[str, Mapping[str, Row]], lookup: Lookup) -> Figures:
    """`BLOCK.ROW.` with perplexity, gap, rate and bytes; null for what was not run or diverged."""
    found: dict[str, float | None] = {}
    for block, rows in blocks.items():
        base: float | None = None
        for name, row in rows.items():
            prefix = f"{block}.{name}"
            job, result = _best(row.jobs(prefix), lookup)
            perplexity = result.get("test_perplexity")
            base = perplexity if name == next(iter(rows)) else base
            found |= {
                f"{prefix}.perplexity": perplexity,
                f"{prefix}.gap_pct": 100 * (perplexity / base - 1) if perplexity and base else None,
                f"{prefix}.lr": job.arm.optimizer.lr if perplexity else None,
                f"{prefix}.payload_bytes_per_step": result.get("payload_bytes_per_step"),
                f"{prefix}.state_bytes": result.get("state_bytes"),
            }
    return found


def _named(blocks: Mapping[str, Mapping[str, Row]]) -> Iterator[tuple[str, Row]]:
    for block, rows in blocks.items():
        for name, row in rows.items():
            yield f"{block}.{name}", row


def _best(jobs: Sequence[Job], lookup: Lookup) -> tuple[Job, Result]:
    """By validation; of what diverged or was not run, the first with an empty result."""
    done = [(job, lookup(job) or {}) for job in jobs]
    return min(done, key=lambda each: each[1].get("validation_perplexity") or math.inf)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
