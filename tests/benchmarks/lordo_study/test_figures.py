"""Figures from made-up results: ratios, gaps, signs, spreads, and null for what was not run."""

import pytest

from benchmarks.lordo_study import figures


def result(perplexity, payload=100, wire=150, state=10, **more):
    return {
        "test_perplexity": perplexity,
        "payload_bytes": payload,
        "payload_bytes_per_step": payload / 10,
        "wire_bytes": wire,
        "state_bytes": state,
        "low_rank_parameters": 8,
        "low_rank_state_bytes": state // 2,
        "carried_bytes": 6,
        "outer_state_bytes": 3,
        "x_sync_bytes": 4,
        **more,
    }


def seed(ours=5.0, **changes):
    results = {
        "ddp": result(4.0, payload=25_000, wire=37_500),
        "lowrank_ddp": result(6.25, payload=10_000),
        "lowrank_ddp_ef": result(5.0, payload=10_000),
        "des_loc": result(6.0),
        "lordo_local": result(10.0),
        "lordo_global": result(8.0, payload=1000, wire=1500, state=16),
        "lordo_global_int4": result(8.4, payload=200, wire=300),
        "lordo_global_no_qhm": result(9.0, subspace_overlap=0.999),
        "lordo_global_frozen": result(7.6),
        "lordo_ns": result(ours),
        "lordo_ns_fp32": result(4.8),
    }
    return results | changes


def test_ours_and_the_paper_s_arm():
    found = figures.named_arms([seed(), seed()])
    expected = {
        "bytes_vs_ddp": 250,
        "bytes_vs_lowrank_ddp": 100,
        "wire_bytes_vs_ddp": 250,
        "wire_gap_pct": 100 * (5 / 4.8 - 1),
        "state_vs_adam": 64 / 5,
        "carried_bytes": 6,
        "outer_state_bytes": 3,
        "x_sync_bytes": 4,
        "gap_vs_lowrank_ddp_pct": -20,
        "gap_vs_lowrank_ddp_ef_pct": 0,
        "gap_vs_des_loc_pct": 100 * (5 / 6 - 1),
        "gap_vs_ddp_pct": 25,
        "paper.bytes_vs_ddp": 25,
        "paper.bytes_vs_lowrank_ddp": 10,
        "paper.wire_bytes_vs_ddp": 125,
        "paper.wire_gap_pct": 5,
        "paper.state_vs_adam": 8,
        "paper.carried_bytes": 6,
        "paper.outer_state_bytes": 3,
        "paper.x_sync_bytes": 4,
        "paper.gap_vs_lowrank_ddp_pct": 28,
        "paper.gap_vs_lowrank_ddp_ef_pct": 60,
        "paper.gap_vs_des_loc_pct": 100 / 3,
        "paper.gap_vs_ddp_pct": 100,
        "paper.gain_vs_local_pct": 20,
        "paper.stagnation_pct": 12.5,
        "paper.frozen_vs_refreshed_pct": -5,
        "paper.subspace_overlap_no_qhm": 0.999,
    }
    spreads = {f"{name}_spread": 0 for name in expected}
    assert found == pytest.approx(expected | spreads)


def test_gaps_are_paired_and_their_spread_is_the_range():
    better = seed(ours=4.0) | {"ddp": result(5.0)}
    found = figures.named_arms([seed(), better, seed()])
    assert found["gap_vs_ddp_pct"] == pytest.approx((25 - 20 + 25) / 3)
    assert found["gap_vs_ddp_pct_spread"] == pytest.approx(45)


def test_what_was_not_run_or_diverged_is_null():
    partial = seed(lordo_local=result(None))
    del partial["lordo_global_int4"]
    found = figures.named_arms([partial])
    null = {name for name, value in found.items() if value is None and "_spread" not in name}
    assert null == {"paper.wire_bytes_vs_ddp", "paper.wire_gap_pct", "paper.gain_vs_local_pct"}
    assert all(found[name] is None for name in found if name.endswith("_spread"))


def test_each_arm_has_its_mean_and_what_it_costs():
    found = figures.each_arm([seed(ours=4.0), seed(ours=6.0)], ["lordo_ns", "muloco"])
    assert found == {
        "lordo_ns.perplexity_mean": 5.0,
        "lordo_ns.perplexity_mean_spread": 2.0,
        "lordo_ns.payload_bytes_per_step": 10,
        "lordo_ns.payload_bytes_per_step_spread": 0,
        "lordo_ns.state_bytes": 10,
        "lordo_ns.state_bytes_spread": 0,
        "lordo_ns.carried_bytes": 6,
        "lordo_ns.carried_bytes_spread": 0,
        "muloco.perplexity_mean": None,
        "muloco.perplexity_mean_spread": None,
        "muloco.payload_bytes_per_step": None,
        "muloco.payload_bytes_per_step_spread": None,
        "muloco.state_bytes": None,
        "muloco.state_bytes_spread": None,
        "muloco.carried_bytes": None,
        "muloco.carried_bytes_spread": None,
    }
