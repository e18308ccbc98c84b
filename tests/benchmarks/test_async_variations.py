"""The variations: every row can be built, the best rate counts, gaps are to the first row."""

from dataclasses import replace

import pytest

from algorithms.async_pipeline import baselines
from algorithms.common.model import parameter_count
from benchmarks import async_variations
from benchmarks.async_study.arms import GRID
from benchmarks.async_study.training import new_model
from benchmarks.async_variations import BLOCKS, LARGE, Row
from tests import toys


def test_every_row_is_an_arm_that_can_be_built():
    for rows in BLOCKS.values():
        for name, row in rows.items():
            assert len(set(row.rates)) == len(row.rates)
            model = new_model(replace(row.setting, model=toys.MODEL), 0)
            for job in row.jobs(name):
                named = list(model.named_parameters())
                stages = job.arm.stages
                baselines.build(named, job.arm.optimizer, stage=stages - 1, stages=stages)


def test_a_row_of_the_first_block_differs_from_ours():
    first, *others = BLOCKS["ingredient"].values()
    for row in others:
        assert (row.setting, row.rates) == (first.setting, first.rates) and row.arm != first.arm


def test_the_large_model_has_five_million_parameters():
    assert 5_000_000 <= parameter_count(new_model(LARGE, 0)) < 6_000_000


def test_the_best_rate_counts_and_gaps_are_to_the_first_row():
    arm = BLOCKS["ingredient"]["ours"].arm
    rows = {"ours": Row(arm, (3, 5)), "other": Row(arm, (4,)), "bad": Row(arm, (6,))}
    losses = {3: 2.0, 5: 1.5, 4: 1.75, 6: None}

    def lookup(job):
        return {"final": losses[GRID.index(job.arm.optimizer.optimizer.lr)]}

    found = async_variations.figures({"block": rows}, lookup)
    assert found["block.ours.loss"] == 1.5 and found["block.ours.gap"] == 0
    assert found["block.ours.lr"] == GRID[5]
    assert found["block.other.gap"] == pytest.approx(0.25)
    assert found["block.bad.loss"] is found["block.bad.gap"] is found["block.bad.lr"] is None
    nothing = async_variations.figures({"block": rows}, lambda job: None)
    assert set(nothing) == set(found) and set(nothing.values()) == {None}


def test_all_rows_share_the_setting_of_their_block():
    for rows in BLOCKS.values():
        first, *others = rows.values()
        assert all(row.setting == first.setting for row in others)
