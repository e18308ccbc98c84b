"""How far rotation aligns the coordinates of each stage with its curvature, early in a run."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from pathlib import Path

from algorithms.async_pipeline.misalignment import misalignment
from algorithms.common.loop import token_loss
from benchmarks.async_study.arms import SEARCHED, Row
from benchmarks.async_study.setting import Job
from benchmarks.async_study.training import Run
from benchmarks.study.figures import Figure, add
from benchmarks.study.queue import Result, Results, run_jobs

DRAWS = 31
SEQUENCES = 64
"""Of the validation split, over which the Hessian's loss is taken."""

DIAGNOSED = tuple(
    f"misalignment_{key}{ending}"
    for key in ("ratio", "original", "rotated")
    for ending in ("", "_spread")
)
"""The figures."""


def diagnose(job: Job, tokens: Path) -> Result:
    """Train as `job` says, then measure the misalignment of every stage."""
    begun = time.process_time()
    run = Run(job.arm, job.setting, job.seed, tokens)
    while run.done < job.until:
        run.update()
    rows = run.held_out("validation")[:SEQUENCES]
    found = misalignment(
        run.delayed.stages,
        token_loss,
        [(rows[:, :-1], rows[:, 1:])],
        run.delayed.optimizers,
        draws=DRAWS,
        seed=job.seed,
    )
    return {
        "original": [each.original for each in found],
        "rotated": [each.rotated for each in found],
        "final": statistics.fmean(each.ratio for each in found),
        "seconds": time.process_time() - begun,
    }


def misaligned(
    row: Row, rate: int, seeds: int, tokens: Path, folder: Path
) -> dict[str, float | None]:
    """`misalignment_ratio`: rotated over original, the mean over stages; and the two themselves."""
    until = min(SEARCHED, row.setting.updates)
    jobs = [
        replace(row.job("ours, misalignment", rate, seed), until=until, split="validation")
        for seed in range(seeds)
    ]
    results = Results(folder, diagnose)
    run_jobs(lambda: jobs, tokens, results)
    found: dict[str, float | None] = {}
    measured = [{"ours": result} for result in map(results.find, jobs) if result is not None]
    add(found, "misalignment_ratio", lambda seed: seed["ours"]["final"], measured)
    for key in ("original", "rotated"):
        add(found, f"misalignment_{key}", _mean(key), measured)
    return found


def _mean(key: str) -> Figure:
    return lambda seed: statistics.fmean(seed["ours"][key])
