"""The benchmark of a long prompt, at a short one."""

import math

import pytest
import torch

from benchmarks.groups import random_group
from benchmarks.long_context import Case, exact_error, long_step, measure_case

TOY = Case(positions=600, response=5, branches=3, window=64, chunk=50, compared=300)


def test_all_figures_are_measured():
    figures = measure_case(TOY)
    assert set(figures) == {
        "positions",
        "seconds",
        "peak_bytes",
        "bytes_per_position",
        "exact_error_300",
    }
    assert all(math.isfinite(value) for value in figures.values())
    assert figures["positions"] == 600
    assert figures["exact_error_300"] < 1e-12
    assert 0 < figures["seconds"] < 60
    assert figures["peak_bytes"] > 600 * figures["bytes_per_position"] > 0


def test_the_full_form_is_the_one_that_is_promised():
    case = Case()
    assert (case.positions, case.branches, case.compared) == (2_097_152, 8, 4096)
    assert case.window >= 1024 and case.chunk < case.compared


def test_the_window_is_imposed_on_full_sequences():
    """With the recurrence cut off, a token does not see what is behind two windows."""
    model = TOY.model()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mamba.out_proj.weight.zero_()
    prompt = random_group(64, 200, 1, 1).prompt[None]
    other = prompt.clone()
    reach = 2 * (TOY.window - 1)  # one window a layer
    other[0, 10] += 1
    with torch.no_grad():
        apart = (model(prompt).logits - model(other).logits).abs().amax(-1)[0]
    assert float(apart[10 + reach]) > 0
    assert float(apart[10 + reach + 1 :].max()) == 0


def test_a_prompt_whose_first_token_gets_no_gradient_is_an_error(monkeypatch):
    monkeypatch.setattr("benchmarks.long_context.LONG_MEMORY", 1e6)
    with pytest.raises(RuntimeError, match="embedding has a gradient of norm 0.0"):
        long_step(TOY)
    assert exact_error(TOY) < 1e-12
