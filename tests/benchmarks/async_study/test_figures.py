"""Figures from made-up curves: where targets are crossed, ratios, and null for what is missed."""

import pytest

from benchmarks.async_study import figures
from benchmarks.async_study.arms import BASELINES, ROWS


def curve(rate, end=100):
    """Falls by `rate` from 10 in every 10 updates, straight: smoothing changes only its ends."""
    return [(update, 10 - rate * update / 10) for update in range(0, end + 1, 5)]


def result(rate, end=100):
    points = curve(rate, end)
    return {"curve": points, "final": points[-1][1]}


def test_smoothing_takes_the_neighbours_that_there_are():
    assert figures.smooth([(0, 3.0), (5, 6.0), (10, 0.0)]) == [(0, 4.5), (5, 3.0), (10, 3.0)]


def test_targets_are_those_of_the_shares():
    assert figures.targets(curve(0.4, 40)) == pytest.approx([9.6, 9.2, 8.8, 8.5])


@pytest.mark.parametrize(("target", "updates"), [(11, 1), (9.0, 50), (8.9, 55), (7.0, None)])
def test_a_target_is_crossed_between_two_points(target, updates):
    found = figures.updates_to(curve(0.2), target)
    assert found == (None if updates is None else pytest.approx(updates))


def test_ratios_are_the_worst_over_targets():
    late = {"curve": [(0, 10.0), (10, 9.9), (20, 9.9), (30, 8.0), (40, 0.0)]}
    seed = {"ours": late, "sync_adamw": result(0.2)}
    found = figures.ratio("ours", ["sync_adamw"], "sync_adamw")(seed)
    each = [
        figures.updates_to(late["curve"], target) / figures.updates_to(curve(0.2), target)
        for target in figures.targets(curve(0.2))
    ]
    assert found == pytest.approx(max(each))
    assert len({round(each_one, 3) for each_one in each}) > 1


def test_what_ours_misses_is_null_and_what_others_miss_counts_whole():
    seed = {
        "sync_adamw": result(0.2),
        "ours": result(0.4),
        **{name: result(0.05) for name in BASELINES},
    }
    theirs = figures.fewer("ours", BASELINES)(seed)
    targets = figures.targets(curve(0.2))
    assert targets[-1] > 10 - 0.4 * 10
    worst = max(
        figures.updates_to(curve(0.4), target) / (figures.updates_to(curve(0.05), target) or 100)
        for target in targets
    )
    assert theirs == pytest.approx(100 * (1 - worst))
    first, *_ = targets
    seed |= {name: result(0.06) for name in BASELINES}
    reached = figures.fewer("ours", BASELINES, reached=True)(seed)
    assert reached == pytest.approx(
        100 * (1 - figures.updates_to(curve(0.4), first) / figures.updates_to(curve(0.06), first))
    )
    assert reached > figures.fewer("ours", BASELINES)(seed)
    seed |= {name: result(0.04) for name in BASELINES}
    assert figures.fewer("ours", BASELINES, reached=True)(seed) is None
    seed["ours"] = result(0.1)
    assert figures.fewer("ours", BASELINES)(seed) is None
    assert figures.ratio("ours", ["sync_adamw"], "sync_adamw", missed=True)(seed) == pytest.approx(
        2, rel=0.1
    )


def test_the_best_of_the_others_is_taken():
    seed = {"sync_adamw": result(0.2), "ours": result(0.4)}
    seed |= {name: result(rate) for name, rate in zip(BASELINES, (0.1, 0.2, 0.3), strict=True)}
    alone = figures.fewer("ours", BASELINES[-1:])(seed)
    assert figures.fewer("ours", BASELINES)(seed) == alone
    assert alone < figures.fewer("ours", BASELINES[:1])(seed)


def test_figures_are_means_with_spreads_and_null_where_a_row_is_missing():
    seeds = [
        {"ours": result(0.4), "ours_no_stash": {"curve": [], "final": final}} for final in (7, 8)
    ]
    found = figures.summary(seeds)
    assert found["no_stash_penalty_rotation"] == pytest.approx(7.5 - 6)
    assert found["no_stash_penalty_rotation_spread"] == pytest.approx(1)
    assert found["ratio_to_sync_adamw"] is None is found["ratio_to_sync_adamw_spread"]
    seeds[0]["ours_no_stash"]["final"] = None
    assert figures.summary(seeds)["no_stash_penalty_rotation"] is None


def test_every_row_has_its_targets():
    seeds = [{name: result(0.3) for name in ROWS}]
    seeds[0]["moe_sync_adamw"] = result(0.2)
    found = figures.each_row(seeds, ROWS)
    assert set(found) == {
        f"{name}.{key}{spread}"
        for name in ROWS
        for key in ("final", *(f"updates_to_{share}" for share in (25, 50, 75, 100)))
        for spread in ("", "_spread")
    }
    assert found["moe_ours.updates_to_100"] < found["ours.updates_to_100"]
    assert all(value is not None for name, value in found.items() if "_spread" not in name)
