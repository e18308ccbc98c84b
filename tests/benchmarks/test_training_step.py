"""The benchmark of the training step on a model that trains in milliseconds."""

import math

import pytest

from algorithms.common.model import parameter_count
from benchmarks.training_step import Case, Round, measure_case, step_figures
from tests import toys
from tests.loops import new_model

CASE = Case(toys.MODEL, toys.OPTIMIZER, toys.training(), toys.VOCAB, rounds=1)


def test_all_figures_are_measured():
    figures = measure_case(CASE)
    assert all(isinstance(value, int | float) for value in figures.values())
    assert all(map(math.isfinite, figures.values()))
    parameters = parameter_count(new_model())
    assert figures["parameters"] == parameters
    assert figures["gradient_payload_formula_bytes"] == 4 * parameters
    assert figures["gradient_payload_bytes_per_step"] == 4 * parameters
    # Weights and two moments, and what is written around them.
    assert figures["checkpoint_bytes_per_parameter"] > 12
    assert 0 < figures["loader_ms"] + figures["optimizer_ms"] < figures["plain_step_ms"]
    assert figures["tokens_per_s"] == pytest.approx(8 * 16 / figures["step_ms"] * 1000)
    assert figures["checkpoint_save_ms"] > 0
    assert figures["speedup_2_ranks"] > 0
    assert figures["loop_overhead_pct"] > -100


def test_loops_that_do_different_work_are_not_compared():
    with pytest.raises(RuntimeError, match="loss 2.0 of Loop is not 1.0 of the plain loop"):
        step_figures(CASE, plain=[Round(1.0, 1.0)], one=[Round(1.0, 2.0)])
