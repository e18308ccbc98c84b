"""The search for learning rates, on made-up losses."""

from itertools import count

import pytest

from algorithms.common.errors import InputError
from benchmarks.lordo_study.arms import ARMS, GRID
from benchmarks.lordo_study.search import Study, best_rate, needed
from benchmarks.lordo_study.setting import Setting

NAMES = ("ddp", "local_adam")


def study(**changes):
    given = {
        "setting": Setting(),
        "arms": {name: ARMS[name] for name in NAMES},
        "rates": {"ddp": 5, "local_adam": 5},
        "follows": {"local_adam": "ddp"},
        "seeds": 3,
        "search": True,
    }
    return Study(**(given | changes))


def played(study, losses):
    """Runs all that is needed; returns (name, rate, seed) in the order of the runs."""
    results, order = {}, []

    def lookup(job):
        return results.get((job.name, GRID.index(job.arm.optimizer.lr), job.seed))

    for _ in count():
        waiting = [job for job in needed(study, lookup) if lookup(job) is None]
        if not waiting:
            return order, {name: best_rate(study, name, lookup) for name in study.arms}
        job = waiting[0]
        rate = GRID.index(job.arm.optimizer.lr)
        order.append((job.name, rate, job.seed))
        results[order[-1]] = {"validation_perplexity": losses(rate)}


def test_three_rates_are_enough_where_the_middle_is_best():
    order, best = played(study(), lambda rate: abs(rate - 5))
    assert best == {"ddp": 5, "local_adam": 5}
    assert sorted(order) == sorted(
        [("ddp", rate, 0) for rate in (4, 5, 6)]
        + [("ddp", 5, seed) for seed in (1, 2)]
        + [("local_adam", 5, seed) for seed in (0, 1, 2)]
    )


@pytest.mark.parametrize("optimum", [1, 3, 8, 12])
def test_the_search_goes_on_until_the_best_is_inside(optimum):
    order, best = played(study(), lambda rate: abs(rate - optimum))
    assert best["ddp"] == optimum
    tried = {rate for name, rate, seed in order if name == "ddp" and seed == 0}
    assert {optimum - 1, optimum, optimum + 1} <= tried
    assert len(tried) == len([o for o in order if o[0] == "ddp" and o[2] == 0])
    assert tried == set(range(min(4, optimum - 1), max(6, optimum + 1) + 1))


def test_a_run_that_diverged_is_the_worst():
    _, best = played(study(), lambda rate: None if rate > 3 else 10 - rate)
    assert best["ddp"] == 3


def test_a_best_rate_at_the_edge_of_the_grid_is_an_error():
    with pytest.raises(InputError, match="ddp: the best learning rate is at the edge of the grid"):
        played(study(), lambda rate: rate)


def test_without_search_the_given_rates_stand():
    order, best = played(study(search=False, seeds=1), lambda rate: -rate)
    assert order == [("ddp", 5, 0), ("local_adam", 5, 0)]
    assert best == {"ddp": 5, "local_adam": 5}


def test_every_arm_has_a_rate_or_follows_one():
    from benchmarks.lordo_study.arms import FOLLOWS, QUICK, RATES

    assert set(RATES) | set(FOLLOWS) == set(ARMS)
    assert not set(RATES) & set(FOLLOWS)
    assert set(FOLLOWS.values()) <= set(RATES)
    assert {FOLLOWS.get(name, name) for name in QUICK} <= set(QUICK)
