"""LoRDO and its rivals on a small model: perplexity against bytes and state, M = 4 workers.

    python -m benchmarks.lordo [--quick] [--json PATH]

All arms train a byte-level GPT-2 on the same batches of the corpus of params.yaml, on stacked
workers in one process (`algorithms/lordo/stacked.py`); the setting and the arms stand in
`lordo_study/setting.py` and `arms.py`. Every arm's learning rate is searched on one grid with seed
0 and the validation split, the test split is reported over three seeds. Finished runs are kept
below `runs/benchmarks/lordo/`. The quick form takes half the steps, one seed, the rates of the last
full run, and some of the arms; figures of the others are null.

"Ours" is `lordo_ns`; the paper's arm `lordo_global` has the same figures behind `paper.`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from algorithms.common.model import parameter_count
from benchmarks.lordo_study import figures
from benchmarks.lordo_study.arms import (
    ARMS,
    FOLLOWS,
    GRID,
    OUR_EVERY,
    PAPER_EVERY,
    QUICK,
    RATES,
)
from benchmarks.lordo_study.overhead import overheads
from benchmarks.lordo_study.search import Study, needed, outcome
from benchmarks.lordo_study.setting import Setting
from benchmarks.lordo_study.training import new_model, train
from benchmarks.report import Figures, run
from benchmarks.study import streams
from benchmarks.study.queue import Results, run_jobs
from tasks.config import load_params
from tasks.paths import RUNS

FULL = Study(setting=Setting(), arms=ARMS, rates=RATES, follows=FOLLOWS, seeds=3, search=True)
SMALL = Study(
    setting=Setting(steps=640),
    arms={name: ARMS[name] for name in QUICK},
    rates=RATES,
    follows=FOLLOWS,
    seeds=1,
    search=False,
)


def main(argv: Sequence[str]) -> int:
    """Command line; returns the exit code."""
    return run("lordo", (__doc__ or "").splitlines()[0], measure, argv)


def measure(quick: bool) -> Figures:
    """All figures; the corpus is made or found below runs/."""
    folder = RUNS / "benchmarks" / "lordo"
    folder.mkdir(parents=True, exist_ok=True)
    tokens = streams.prepare(load_params().corpus, folder)
    return measure_study(SMALL if quick else FULL, tokens, folder, cycles=1 if quick else 4)


def measure_study(study: Study, tokens: Path, folder: Path, cycles: int) -> Figures:
    """All figures of a study; `cycles` of the timing."""
    results = Results(folder, train)
    print("learning rates:", " ".join(f"{rate:g}" for rate in GRID), flush=True)
    run_jobs(lambda: needed(study, results.find), tokens, results)
    rates, seeds = outcome(study, results.find)
    prefixes = {"ddp.": "ddp", "": figures.OURS, "paper.": figures.PAPER}
    timed = {prefix: study.job(name, rates[name], 0).arm for prefix, name in prefixes.items()}
    shares = overheads(study.setting, timed, tokens, cycles)
    model = new_model(study.setting, 0)
    return {
        "parameters": parameter_count(model),
        "low_rank_parameters": seeds[0][figures.OURS]["low_rank_parameters"],
        "every": OUR_EVERY,
        "paper.every": PAPER_EVERY,
        **figures.named_arms(seeds),
        **figures.each_arm(seeds, list(ARMS)),
        **{f"{name}.lr": GRID[rates[name]] if name in rates else None for name in ARMS},
        **shares,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
