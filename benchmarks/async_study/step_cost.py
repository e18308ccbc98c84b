"""What an update costs with ours, over one with fused AdamW: the same stages, no delays.

One thread; seconds are those that the process had of its core, so that neither copies of old
weights nor other processes count. The two take turns, a whole period of refreshes at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from benchmarks.async_study.arms import ROWS, at_rate
from benchmarks.async_study.setting import Setting
from benchmarks.async_study.training import Run
from benchmarks.timing import interleaved, ratio

TURN = 20
"""Updates; a multiple of the interval between refreshes."""


def step_cost(
    rates: Mapping[str, int], setting: Setting, tokens: Path, turns: int
) -> dict[str, float | None]:
    """`step_cost_ratio` and its spread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        runs = {name: _contestant(name, rates[name], setting, tokens) for name in ("adamw", "ours")}
        seconds = interleaved(runs, turns)
    finally:
        torch.set_num_threads(threads)
    found = ratio(seconds["ours"], seconds["adamw"])
    return {"step_cost_ratio": found.median, "step_cost_ratio_spread": found.spread}


def _contestant(name: str, rate: int, setting: Setting, tokens: Path) -> Callable[[], float]:
    """Trains on and returns the seconds of a turn."""
    run = Run(at_rate(ROWS[name].arm, rate), setting, 0, tokens)
    run.delayed.delays = [0] * len(run.delayed.delays)

    def turn() -> float:
        begun = time.process_time()
        for _ in range(TURN):
            run.update()
        return time.process_time() - begun

    return turn
