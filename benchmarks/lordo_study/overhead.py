"""What the optimizer and the sync take of a training step of one worker.

One thread; the seconds are those that the process had of its core. Arms take turns: a round is a
whole period of each, so that it holds one sync, and as many rounds as give every kind of sync its
share. The wire itself is not in it: nothing is sent, but encoded and decoded as if it were.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from algorithms.lordo.config import ArmConfig
from algorithms.lordo.stacked import build
from benchmarks.lordo_study.arms import EVERY
from benchmarks.lordo_study.setting import Job, Setting
from benchmarks.lordo_study.training import batches, new_model
from benchmarks.study import streams
from benchmarks.timing import interleaved, measured

CYCLE = 6
"""Rounds after which all periods have come equally often: second moments have the longest, 6 K."""


def overheads(
    setting: Setting, arms: Mapping[str, ArmConfig], tokens: Path, cycles: int
) -> dict[str, float]:
    """`step_overhead_pct` of each arm behind its prefix, per cent of its step."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        contestants = {prefix: _contestant(setting, arm, tokens) for prefix, arm in arms.items()}
        shares = interleaved(contestants, cycles * CYCLE)
    finally:
        torch.set_num_threads(threads)
    figures = {}
    for prefix, values in shares.items():
        figures[f"{prefix}step_overhead_pct"] = statistics.fmean(values)
        figures[f"{prefix}step_overhead_pct_spread"] = measured(values).spread
    return figures


def _contestant(setting: Setting, arm: ArmConfig, tokens: Path) -> Callable[[], float]:
    """Trains one worker for one period more each time; returns what it measured, in per cent."""
    alone = replace(setting, workers=1)
    job = Job(name="", arm=arm, seed=0, setting=alone)
    train = streams.load(tokens, 1, "sorted").train
    stacked = build(arm, [new_model(alone, 0)], 0)
    every = arm.sync.every if arm.sync else EVERY
    step = 0

    def turn() -> float:
        nonlocal step
        spent = all_of_it = 0.0
        for _ in range(every):
            step += 1
            data = batches(job, train, step)
            begun = time.process_time()
            stacked.backward(data)
            computed = time.process_time()
            stacked.update(step, arm.optimizer.lr)
            ended = time.process_time()
            spent += ended - computed
            all_of_it += ended - begun
        return 100 * spent / all_of_it

    return turn
