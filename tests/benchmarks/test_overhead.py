"""What the house costs, computed from known times, and measured once in its quick form."""

import math

import pytest

from benchmarks import overhead
from benchmarks.overhead import ROUND_S, slower


@pytest.mark.parametrize("drift", [0.0, 0.01], ids=["steady", "ever slower"])
def test_a_job_that_loses_a_tenth_of_a_second_in_each_period(drift):
    moments = [1003.0 + ROUND_S * index for index in range(8)]
    times, now, due = [], 1000.0, list(moments)
    while now < moments[-1] + ROUND_S:
        times.append(now)
        now += 0.01 * (1 + drift * (now - 1000.0))
        if due and now > due[0]:
            due.pop(0)
            now += 0.1
    found = slower(times, moments)
    assert found["tracking_overhead_pct"] == pytest.approx(100 * 0.1 / ROUND_S, rel=0.05)
    assert found["tracking_overhead_spread"] < 0.1


def test_a_job_that_loses_nothing():
    times = [0.01 * index for index in range(2000)]
    found = slower(times, [5.0, 10.0])
    assert found["tracking_overhead_pct"] == pytest.approx(0, abs=1e-6)


@pytest.mark.slow
def test_all_figures_are_measured(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "the benchmark sets its own; this brings ours back")
    found = overhead.measure(quick=True)
    assert set(found) == {
        *(
            prefix + name
            for prefix in ("", "every_step.")
            for name in (
                "tracking_overhead_pct",
                "tracking_overhead_spread",
                "parent_cpu_share_pct",
            )
        ),
        "launcher_overhead_s",
        "flow_overhead_s",
    }
    assert all(math.isfinite(value) for value in found.values())
    assert -50 < found["tracking_overhead_pct"] < 100
    assert 0 < found["parent_cpu_share_pct"] < 50
