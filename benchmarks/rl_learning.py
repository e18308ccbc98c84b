"""Reinforcement learning by branch replay on a small reader: what the prompt's gradient is worth.

    python -m benchmarks.rl_learning [--quick] [--json PATH]

A llama of 2 layers and width 64 answers questions about 6 records in a prompt of 64 tokens. It has
learned by supervision to read shorter prompts; each run begins at that warm start and goes on by
reward alone (1 for the whole answer, else 0), on prompts that it has never seen, 32 in an update
with 8 responses to each. `heldout_` figures are the share of right answers sampled at temperature 1
to 512 prompts of no other use, 4 to each.

Arms differ in the gradient: `exact`, `response_only` (the prompt's state is a constant, what
LongStraw computes), `truncated` (its last 16 tokens are not) and `naive` (as exact, by one plain
forward over all full sequences; its rollouts are the others'). Learning rates are searched on one
grid by the validation prompts, for exact and response_only by all seeds. Finished runs are kept
below `runs/benchmarks/rl/`, where the picture `curves.png` is drawn. The quick form has one seed
and the rates of the last full run.

Seconds are those that a process of one thread had of its core in updates; evaluation does not
count.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import Figures, run
from benchmarks.rl_study import figures, picture
from benchmarks.rl_study.arms import GRID, RATES, ROWS, Row
from benchmarks.rl_study.training import train
from benchmarks.study.plan import Study, needed, outcome
from benchmarks.study.queue import Results, run_jobs
from tasks.paths import RUNS

WHOLE = Study(rows=ROWS, rates=RATES, grid=GRID, seeds=3, search=True)
SMALL = Study(rows=ROWS, rates=RATES, grid=GRID, seeds=1, search=False)


def main(argv: Sequence[str]) -> int:
    """Command line; returns the exit code."""
    return run("rl_learning", (__doc__ or "").splitlines()[0], measure, argv)


def measure(quick: bool) -> Figures:
    """All figures."""
    folder = RUNS / "benchmarks" / "rl"
    folder.mkdir(parents=True, exist_ok=True)
    return measure_study(SMALL if quick else WHOLE, folder)


def measure_study(study: Study[Row], folder: Path) -> Figures:
    """All figures of a study; its runs, warm starts and picture are kept in `folder`."""
    results = Results(folder, train)
    print("learning rates:", " ".join(f"{rate:g}" for rate in GRID), flush=True)
    run_jobs(lambda: needed(study, results.find), folder, results)
    rates, seeds = outcome(study, results.find)
    picture.draw(seeds).savefig(folder / "curves.png", metadata={"Software": None})
    return {
        **figures.summary(seeds),
        **figures.each_row(seeds, study.rows),
        **{f"{name}.lr": GRID[rate] for name, rate in rates.items()},
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
