"""Asynchronous pipelines on a small model: updates that each optimizer needs, P = 8 stages.

    python -m benchmarks.async_pipeline [--quick] [--json PATH]

All arms train a byte-level llama (`moe_`: a mixture of experts) on the same batches of the corpus
of params.yaml, in the exact simulation of a pipeline's delays
(`algorithms/async_pipeline/reference.py`); the setting and the arms stand in
`async_study/setting.py` and `arms.py`. Learning rates are searched on one grid with seed 0, the
first 1,000 updates and the validation split, but for rows that take another's; the test split is
reported over three seeds. Targets are the held-out losses of synchronous AdamW at 25, 50, 75 and
100 % of its updates, and a figure is the worst over all four; `ROW.updates_to_25` and so on are the
table. Finished runs are kept below `runs/benchmarks/async/`. The quick form has P = 1 and 8 only,
1,500 updates, one seed and the rates of the last full run; the other figures are null.

"Ours" is the preset `ours` for all figures without the name of a row.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from algorithms.common.model import parameter_count
from benchmarks.async_study import figures
from benchmarks.async_study.arms import FULL, GRID, MOE, QUICK, RATES, ROWS, Row
from benchmarks.async_study.diagnosis import DIAGNOSED, misaligned
from benchmarks.async_study.step_cost import step_cost
from benchmarks.async_study.training import new_model, train
from benchmarks.report import Figures, run
from benchmarks.study import streams
from benchmarks.study.plan import Study, needed, outcome
from benchmarks.study.queue import Results, run_jobs
from tasks.config import load_params
from tasks.paths import RUNS

WHOLE = Study(rows=ROWS, rates=RATES, grid=GRID, seeds=3, search=True)
SMALL = Study(
    rows={name: replace(ROWS[name], setting=replace(FULL, updates=1500)) for name in QUICK},
    rates=RATES,
    grid=GRID,
    seeds=1,
    search=False,
)


def main(argv: Sequence[str]) -> int:
    """Command line; returns the exit code."""
    return run("async_pipeline", (__doc__ or "").splitlines()[0], measure, argv)


def measure(quick: bool) -> Figures:
    """All figures; the corpus is made or found below runs/."""
    folder = RUNS / "benchmarks" / "async"
    folder.mkdir(parents=True, exist_ok=True)
    tokens = streams.prepare(load_params().corpus, folder)
    return measure_study(SMALL if quick else WHOLE, tokens, folder, turns=5 if quick else 20)


def measure_study(study: Study[Row], tokens: Path, folder: Path, turns: int) -> Figures:
    """All figures of a study; `turns` of the timing."""
    results = Results(folder, train)
    print("learning rates:", " ".join(f"{rate:g}" for rate in GRID), flush=True)
    run_jobs(lambda: needed(study, results.find), tokens, results)
    rates, seeds = outcome(study, results.find)
    aligned: dict[str, float | None] = dict.fromkeys(DIAGNOSED)
    if study.search:
        aligned = misaligned(study.rows["ours"], rates["ours"], study.seeds, tokens, folder)
    cost = step_cost(rates, study.rows["ours"].setting, tokens, turns)
    summary = figures.summary(seeds)
    return {
        "parameters": parameter_count(new_model(FULL, 0)),
        "moe_parameters": parameter_count(new_model(MOE, 0)),
        **summary,
        **cost,
        **aligned,
        "device_hours_vs_best_async_pct": device_hours(summary, cost),
        **figures.each_row(seeds, ROWS),
        **{f"{name}.lr": GRID[rates[name]] if name in rates else None for name in ROWS},
    }


def device_hours(
    summary: Mapping[str, float | None], cost: Mapping[str, float | None]
) -> float | None:
    """By how many per cent ours takes fewer than the best asynchronous baseline, modelled: the
    ratio of updates times that of the cost of an update."""
    fewer, per_update = summary["fewer_than_best_baseline_pct"], cost["step_cost_ratio"]
    if fewer is None or per_update is None:
        return None
    return 100 - (100 - fewer) * per_update


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
