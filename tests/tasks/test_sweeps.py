"""A grid becomes points, points become a table."""

import math
import statistics

import pytest

from algorithms.common.errors import InputError
from tasks.config import load_params
from tasks.sweeps import Point, points, summary

PARAMS = load_params()
DDP = "pretrain_lordo.arms.ddp"


def test_every_combination_for_every_seed():
    found = points(PARAMS, "ddp", ["optimizer.lr=1e-3,3e-3", "optimizer.beta1=0.9,0.8"], 2)
    assert len(found) == 8
    assert [point.seed for point in found[:2]] == [0, 1]
    assert found[3] == Point(
        "optimizer.lr=0.001 optimizer.beta1=0.8",
        1,
        (
            f"{DDP}.optimizer.lr=0.001",
            f"{DDP}.optimizer.beta1=0.8",
            "pretrain_lordo.training.seed=1",
        ),
    )
    assert len({point.overrides for point in found}) == 8


def test_seeds_alone_and_an_arm_of_a_study():
    assert [p.overrides for p in points(PARAMS, "ddp", [], 2)] == [
        ("pretrain_lordo.training.seed=0",),
        ("pretrain_lordo.training.seed=1",),
    ]
    [point] = points(PARAMS, "muloco", ["sync={every: 2},"], 1)
    assert point.overrides[0] == 'pretrain_lordo.study.muloco.sync={"every": 2}'


@pytest.mark.parametrize(
    ("grid", "seeds", "message"),
    [
        (["optimizer.lr"], 1, "--grid optimizer.lr: must be KEY=VALUE,VALUE"),
        (["optimizer.lr="], 1, "--grid optimizer.lr=: must be KEY=VALUE,VALUE"),
        (["a=1] # [2"], 1, "--grid a=1] # [2: not YAML: "),
        (["optimizer.lr=[1"], 1, "--grid optimizer.lr=[1: not YAML: "),
        (["a=1", "b=1", "a=2"], 1, "--grid: a is given twice"),
        ([], 0, "--seeds 0: must be positive"),
    ],
)
def test_what_is_no_grid_is_one_line(grid, seeds, message):
    with pytest.raises(InputError) as caught:
        points(PARAMS, "ddp", grid, seeds)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)
    with pytest.raises(InputError, match="no arm 'dpp'"):
        points(PARAMS, "dpp", [], 1)


def test_mean_spread_and_the_best():
    losses = {"a": [3.0, 3.5, 4.5], "b": [2.0, 2.5, 3.0], "c": [1.0, None, 1.0], "d": [3.0] * 3}
    results = [
        (Point(setting, seed, ()), None if loss is None else {"val_loss": loss})
        for setting, found in losses.items()
        for seed, loss in enumerate(found)
    ]
    rows = {row["setting"]: row for row in summary(results)}
    assert [*rows] == [*losses]
    assert rows["a"]["loss"] == "3.6667"
    spread = math.sqrt(sum((x - 11 / 3) ** 2 for x in (3.0, 3.5, 4.5)) / 2)
    assert rows["a"]["spread"] == f"{spread:.4f}" == f"{statistics.stdev([3, 3.5, 4.5]):.4f}"
    assert rows["c"]["loss"] == "not finite" and rows["c"]["spread"] == ""
    assert rows["d"]["spread"] == "0.0000"
    assert [setting for setting, row in rows.items() if row["best"]] == ["b"]
    assert {row["seeds"] for row in rows.values()} == {3}


def test_one_seed_has_no_spread_and_nothing_finite_no_best():
    assert summary([(Point("a", 0, ()), {"val_loss": 1.0})])[0]["spread"] == ""
    [row] = summary([(Point("a", 0, ()), None)])
    assert row["best"] == "" and row["loss"] == "not finite"
    assert summary([]) == []


def test_of_rewards_the_highest_is_the_best():
    results = [
        (Point(setting, 0, ()), None if value is None else {"reward_heldout": value})
        for setting, value in (("a", None), ("b", 0.5), ("c", 0.75))
    ]
    rows = {row["setting"]: row for row in summary(results)}
    assert [setting for setting, row in rows.items() if row["best"]] == ["c"]
    assert (rows["a"]["reward"], rows["c"]["reward"]) == ("not finite", "0.7500")


def test_a_point_of_post_training_is_of_its_stage():
    [point] = points(PARAMS, "exact", ["objective.name=dapo"], 1)
    assert point.overrides == (
        'post_train.arms.exact.objective.name="dapo"',
        "post_train.training.seed=0",
    )
