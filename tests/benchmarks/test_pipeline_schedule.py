"""Sleeping stages sleep as long as told under every schedule; figures follow from the runs."""

import subprocess
import sys
import time

import pytest
import torch

from benchmarks import pipeline_schedule, sleeping
from benchmarks.pipeline_schedule import (
    Real,
    Run,
    Sent,
    Sleep,
    arms,
    compute_on_rank,
    formula_bytes,
    measure,
    sleep_on_rank,
    utilisations,
)
from tasks.paths import PROJECT

SLEEP = Sleep(ranks=2, layers=4, seconds=0.012, microbatches=8, shape=(1, 5, 3))
REAL = Real(layers=2, width=16, vocabulary=32, sequences=1, tokens=8, microbatches=4, rounds=1)


def test_each_gradient_takes_a_third(monkeypatch):
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    stage = sleeping.stage(2, width=3, seconds=6.0)
    x = torch.ones(4, 3, requires_grad=True)
    output = stage(x).sum()
    assert sum(slept) == 2.0
    slept.clear()
    (gradient,) = torch.autograd.grad(output, [x], retain_graph=True)
    assert sum(slept) == 2.0
    assert torch.equal(gradient, torch.ones(4, 3))
    slept.clear()
    torch.autograd.grad(output, [stage[1].weight], retain_graph=True)
    assert slept == [1.0]
    slept.clear()
    torch.autograd.backward(output)
    assert sum(slept) == 4.0
    assert torch.equal(stage[0].weight.grad, torch.full((3,), 4.0))


def all_naps(comm, sleep):
    """Seconds that this rank was told to sleep, by arm."""
    told, found = [], {}
    known = arms(sleep.ranks)
    kept = time.sleep, pipeline_schedule.arms
    time.sleep = told.append
    try:
        for name, arm in known.items():
            told.clear()
            pipeline_schedule.arms = lambda ranks, only={name: arm}: only
            sleep_on_rank(comm, sleep)
            found[name] = sum(told)
    finally:
        time.sleep, pipeline_schedule.arms = kept
    return found


def test_all_schedules_sleep_as_long(ranks):
    probe = SLEEP.seconds / 3  # a forward before the first update, for the shapes
    for found in ranks.run(all_naps, SLEEP, world_size=2):
        assert list(found) == list(arms(2))
        for seconds in found.values():
            assert seconds == pytest.approx(SLEEP.microbatches * SLEEP.seconds + probe)


def test_runs_of_sleeping_ranks(ranks):
    runs, nothing = ranks.run(sleep_on_rank, SLEEP, world_size=2)
    assert nothing is None
    assert list(runs) == list(arms(2))
    hidden, targets = 4 * 5 * 3, 8 * 5
    for name, run in runs.items():
        stages = 4 if name.startswith("zero_bubble") else 2
        assert run.sent.formula == 8 * (2 * (stages - 1) * hidden + targets)
        assert run.sent.metered == run.sent.formula
        assert run.wall_s >= SLEEP.microbatches * SLEEP.seconds
        assert run.told == SLEEP.microbatches * SLEEP.seconds / run.wall_s
        assert run.told < run.utilisation < 1


@pytest.mark.slow
def test_runs_of_computing_ranks(ranks):
    (seconds, sent), nothing = ranks.run(compute_on_rank, REAL, world_size=2)
    assert nothing is None
    assert {name: len(rounds) for name, rounds in seconds.items()} == {"async": 1, "one_f_one_b": 1}
    assert min(seconds["async"] + seconds["one_f_one_b"]) > 0
    assert sent == [Sent(*[2 * 4 * (2 * 4 * 8 * 16 + 8 * 8)] * 2)] * 2


def test_figures(monkeypatch):
    shares = zip(arms(8), (0.96, 0.5, 0.7, 0.51, 0.71, 0.8, 0.9), strict=True)
    runs = {name: Run(share, 0.1, 1.0, Sent(100, 100)) for name, share in shares}
    expected = {
        "async_utilisation_p8": 0.96,
        "gpipe_utilisation_p8": 0.7,
        "gpipe_utilisation_p8_m8": 0.5,
        "gpipe_utilisation_p8_m16": 0.7,
        "one_f_one_b_utilisation_p8": 0.71,
        "one_f_one_b_utilisation_p8_m8": 0.51,
        "one_f_one_b_utilisation_p8_m16": 0.71,
        "zero_bubble_utilisation_p8": 0.9,
        "zero_bubble_utilisation_p8_m8": 0.8,
        "zero_bubble_utilisation_p8_m16": 0.9,
    }
    assert utilisations(8, runs) == expected

    def found(function, ranks, settings):
        if function is sleep_on_rank:
            return runs
        seconds = {"one_f_one_b": [3.0, 4.2, 3.2], "async": [2.0, 3.0, 2.0]}
        return seconds, [Sent(99, 100), Sent(103, 100)]

    monkeypatch.setattr(pipeline_schedule, "run_ranks", found)
    figures = measure(quick=True)
    assert expected.items() <= figures.items()
    assert figures["async_speedup_p2_real"] == pytest.approx(1.5)
    assert figures["async_speedup_p2_real_spread"] == pytest.approx(0.1)
    assert figures["bytes_vs_formula_pct"] == pytest.approx(3)


def test_the_formula():
    assert formula_bytes(stages=2, hidden=10, targets=3, microbatches=1) == 23
    assert formula_bytes(stages=8, hidden=10, targets=3, microbatches=4) == 572


@pytest.mark.slow
def test_sleeping_ranks_load_no_transformers():
    code = "import sys, benchmarks.pipeline_schedule; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PROJECT).returncode == 0
