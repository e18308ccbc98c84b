"""Exchange times by formula, against figures worked out by hand."""

from dataclasses import replace

import pytest

from algorithms.lordo.config import ArmConfig
from benchmarks.lordo_study.arms import ARMS
from benchmarks.ring_model import (
    SHAPES,
    Shape,
    bytes_per_value,
    exchange_seconds,
    payload_bytes_per_step,
    seconds_per_step,
)

TINY = Shape(vocabulary=10, width=4, layers=2)  # D 40, N 424


def every(name: str, steps: int) -> ArmConfig:
    """An arm with another period, the ratios of its periods kept."""
    arm = ARMS[name]
    assert arm.sync is not None
    sync, factor = arm.sync, steps / arm.sync.every
    periods = {
        key: round(getattr(sync, key) * factor) for key in ("momentum_every", "variance_every")
    }
    return replace(arm, sync=replace(sync, every=steps, **periods))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ddp", 4 * 424),
        ("lowrank_ddp", 4 * (40 + 2 * 12 * 3 * 4 + 2 * 4 * 3 * 4)),
        ("des_loc", 4 * 424 * (1 / 32 + 1 / 96 + 1 / 192)),
        ("lordo_global", 4 * (424 / 40 + (40 + 2 * 12 * 3 * 4) * (1 / 120 + 1 / 240))),
        ("lordo_ns", 2.25 / 8 * 424 / 16),
    ],
)
def test_payload_per_step(name: str, expected: float) -> None:
    assert payload_bytes_per_step(ARMS[name], TINY, rank=3) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("wire", "expected"), [("fp32", 4), ("bf16", 2), ("int4", 4.25 / 8), ("int2", 2.25 / 8)]
)
def test_bytes_of_a_value_are_those_of_its_code(wire: str, expected: float) -> None:
    arm = ARMS["lordo_ns"]
    assert arm.sync is not None
    assert bytes_per_value(replace(arm, sync=replace(arm.sync, wire=wire, residual="none"))) == (
        expected
    )


def test_a_ring_at_full_size() -> None:
    """M = 4 at 10 Gbit/s: each value takes 2 * 3/4 * 32 bits / 1e10 = 4.8 ns."""
    assert [shape.parameters for shape in SHAPES.values()] == [123_617_280, 707_133_440]
    ddp = [seconds_per_step(ARMS["ddp"], shape, 4, 1e10) for shape in SHAPES.values()]
    assert ddp == pytest.approx([0.593, 3.39], rel=2e-3)
    lordo = [seconds_per_step(every("lordo_global", 32), s, 4, 1e10) for s in SHAPES.values()]
    assert lordo == pytest.approx([0.0222, 0.120], rel=5e-3)
    # Rank m / 8 everywhere; dense values, moments and both thin factors in fp32.
    low_rank = seconds_per_step(ARMS["lowrank_ddp"], SHAPES["125M"], 4, 1e10)
    assert low_rank == pytest.approx(4.8e-9 * (38_682_624 + 10_616_832 + 3_538_944))


def test_latency_counts_once_a_message() -> None:
    assert exchange_seconds(1e6, 4, 1e8) == pytest.approx(0.08)
    assert exchange_seconds(1e6, 4, 1e8, calls=2, latency_s=1e-3) == pytest.approx(0.08 + 12e-3)
