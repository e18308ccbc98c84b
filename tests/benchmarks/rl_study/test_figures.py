"""Figures from made-up curves: where a target is reached, equal seconds, gaps, spreads."""

import pytest

from benchmarks.rl_study import figures
from benchmarks.rl_study.arms import ROWS
from benchmarks.rl_study.picture import draw


def result(end, start=0.2, updates=40, seconds=4.0, **more):
    """A straight line in three points."""
    middle = (start + end) / 2
    curve = [(0, 0.0, start), (updates // 2, seconds / 2, middle), (updates, seconds, end)]
    given = {"update_s": seconds / updates, "selfcheck": 1e-6, "cosines": []}
    return {"curve": curve, "greedy": end, "alike": end, "others": end} | given | more


@pytest.mark.parametrize(
    ("end", "updates", "seconds"), [(0.8, 80 / 3, 8 / 3), (1.0, 20, 2.0), (0.5, None, None)]
)
def test_a_target_is_reached_between_two_points(end, updates, seconds):
    curve = result(end)["curve"]
    assert figures.reached(curve, column=0) == (updates and pytest.approx(updates))
    assert figures.reached(curve) == (seconds and pytest.approx(seconds))


def test_a_start_above_the_target_takes_nothing():
    assert figures.reached(result(0.9, start=0.7)["curve"]) == 0.0


@pytest.mark.parametrize(("seconds", "accuracy"), [(1.0, 0.35), (3.0, 0.65), (9.0, 0.8)])
def test_accuracy_at_some_seconds_is_on_the_line(seconds, accuracy):
    assert figures.at_seconds(result(0.8)["curve"], seconds) == pytest.approx(accuracy)


def seed(shift=0.0):
    cosines = [0.5, 0.4 + shift, 0.3]
    return {
        "exact": result(0.9 + shift, cosines=cosines),
        "response_only": result(0.6, seconds=2.0, selfcheck=2e-5, cosines=cosines[::-1]),
        "naive": result(0.8, seconds=16.0),
        "shuffled": result(0.15),
    }


def test_figures_are_means_with_a_range():
    found = figures.summary([seed(), seed(0.04)])
    assert found["heldout_start"] == pytest.approx(0.2)
    assert found["gap_exact_response_only"] == pytest.approx(0.32)
    assert found["gap_exact_response_only_spread"] == pytest.approx(0.04)
    assert found["shuffled_gain"] == pytest.approx(-0.05)
    # Exact at 2 of its 4 seconds is half way.
    assert found["gap_equal_seconds"] == pytest.approx((0.55 + 0.57) / 2 - 0.6)
    slower = [(16 * 0.4 / 0.6) / (4 * 0.4 / rise) for rise in (0.7, 0.74)]
    assert found["seconds_to_060_naive_over_exact"] == pytest.approx(sum(slower) / 2)
    assert found["update_naive_over_exact"] == pytest.approx(4.0)
    assert found["selfcheck_max"] == 2e-5
    assert found["cosine_middle"] == pytest.approx(0.42)
    assert found["cosine_start_on_response_only"] == pytest.approx(0.3)


def test_what_was_not_run_is_null_and_one_seed_has_no_spread():
    found = figures.summary([seed()])
    assert found["gap_good_reader"] is None
    assert found["heldout_exact_spread"] is None
    table = figures.each_row([seed()], ["response_only", "dpo_exact"])
    assert table["response_only.final"] == 0.6 and table["response_only.update_ms"] == 50
    assert table["response_only.seconds_to_060"] == 2.0
    assert table["dpo_exact.final"] is None


def test_a_target_that_is_missed_makes_its_figure_null():
    low = seed() | {"naive": result(0.5)}
    assert figures.summary([low, seed()])["seconds_to_060_naive_over_exact"] is None


def test_every_figure_is_of_rows_that_there_are():
    whole = {row: result(0.9, cosines=[0.1, 0.2, 0.3]) for row in ROWS}
    found = figures.summary([whole])
    assert [name for name, value in found.items() if value is None and "_spread" not in name] == []


def test_the_picture_has_a_line_for_each_arm_in_both_panels():
    picture = draw([seed(), seed(0.04)])
    for axes in picture.axes:
        assert [line.get_label() for line in axes.lines] == ["exact", "response_only", "naive"]
    assert picture.axes[0].lines[0].get_xdata().tolist() == [0, 20, 40]
