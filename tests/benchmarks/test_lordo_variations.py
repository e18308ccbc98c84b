"""The variations at toy size: every row can be built, validation chooses, gaps are to the first."""

from dataclasses import replace

import pytest

from algorithms.common.model import parameter_count
from algorithms.lordo.stacked import build
from benchmarks import lordo_variations
from benchmarks.lordo_study.training import new_model
from benchmarks.lordo_variations import BLOCKS, LARGE, OURS, Row
from tests import toys


def test_every_row_is_an_arm_that_can_be_built():
    for rows in BLOCKS.values():
        for name, row in rows.items():
            assert len(set(row.rates)) == len(row.rates)
            small = replace(row.setting, model=toys.MODEL)
            for job in row.jobs(name):
                build(job.arm, [new_model(small, 0) for _ in range(2)], 0)


def test_a_row_of_the_first_block_differs_from_ours_in_one_field():
    first, *others = BLOCKS["ingredient"].values()
    assert first.arm == OURS
    for row in others:
        assert row.setting == first.setting and row.rates == first.rates and row.arm != OURS


def test_tokens_of_large_batches_are_those_of_small_ones():
    for row in BLOCKS["batch_x4"].values():
        base = lordo_variations.HALF
        assert row.setting.sequences * row.setting.steps == base.sequences * base.steps


def test_the_large_model_has_five_million_parameters():
    setting = replace(lordo_variations.HALF, model=LARGE)
    assert 5_000_000 <= parameter_count(new_model(setting, 0)) < 6_000_000


def test_validation_chooses_and_gaps_are_to_the_first_row():
    rows = {"ours": Row(OURS, (3, 5)), "other": Row(OURS, (4,)), "bad": Row(OURS, (6,))}
    rates = {}
    for name, row in rows.items():
        for job, rate in zip(row.jobs(name), row.rates, strict=True):
            rates[job.arm.optimizer.lr] = rate
    perplexities = {3: (6.0, 5.0), 5: (5.5, 7.0), 4: (4.0, 8.4), 6: (None, None)}

    def lookup(job):
        validation, test = perplexities[rates[job.arm.optimizer.lr]]
        return {
            "validation_perplexity": validation,
            "test_perplexity": test,
            "payload_bytes_per_step": 9.0,
            "state_bytes": 4,
        }

    found = lordo_variations.figures({"block": rows}, lookup)
    assert found["block.ours.perplexity"] == 7.0 and found["block.ours.gap_pct"] == 0
    assert found["block.other.gap_pct"] == pytest.approx(20)
    assert found["block.bad.perplexity"] is None and found["block.bad.gap_pct"] is None
    assert found["block.other.payload_bytes_per_step"] == 9.0

    nothing = lordo_variations.figures({"block": rows}, lambda _: None)
    assert set(nothing) == set(found) and set(nothing.values()) == {None}
