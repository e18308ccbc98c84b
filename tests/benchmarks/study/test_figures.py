"""Means over seeds, their spreads, and where there are none."""

import pytest

from benchmarks.study.figures import add


def double(seed):
    return None if seed["row"]["missed"] else 2 * seed["row"]["loss"]


def run(loss, missed=False):
    return {"row": {"loss": loss, "missed": missed}}


def test_a_figure_is_the_mean_over_seeds_and_its_spread_their_range():
    found = {}
    add(found, "doubled", double, [run(1.0), run(4.0), run(2.5)])
    add(found, "alone", double, [run(1.0)])
    assert found == {
        "doubled": 5.0,
        "doubled_spread": 6.0,
        "alone": 2.0,
        "alone_spread": None,
    }


@pytest.mark.parametrize("lacking", [{}, run(1.0, missed=True), run(None)])
def test_it_is_null_where_a_run_is_missing_missed_or_diverged(lacking):
    found = {}
    add(found, "figure", double, [run(1.0), lacking])
    add(found, "none", double, [])
    assert set(found.values()) == {None}
