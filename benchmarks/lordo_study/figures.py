"""From results of runs to the flat figures: ratios of bytes and state, gaps of perplexity.

Gaps compare runs of one seed, hence of the same data in the same order (`study/figures.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.study.figures import Figure, Seed, add

OURS = "lordo_ns"
PAPER = "lordo_global"
WIRE = {OURS: ("lordo_ns", "lordo_ns_fp32"), PAPER: ("lordo_global_int4", "lordo_global")}
"""Named arm -> itself with a coded wire, and with the fp32 wire."""

Number = Callable[[Seed], float]
"""A figure that is never None."""


def named_arms(seeds: Sequence[Seed]) -> dict[str, float | None]:
    """The figures of ours, and those of the paper's arm behind `paper.`."""
    figures: dict[str, float | None] = {}
    for prefix, arm in (("", OURS), ("paper.", PAPER)):
        for name, figure in _comparisons(arm).items():
            add(figures, prefix + name, figure, seeds)
    for name, figure in PAPER_ONLY.items():
        add(figures, f"paper.{name}", figure, seeds)
    return figures


def each_arm(seeds: Sequence[Seed], arms: Sequence[str]) -> dict[str, float | None]:
    """`ARM.perplexity_mean` on the test split and what the arm sends and holds."""
    figures: dict[str, float | None] = {}
    for arm in arms:
        add(figures, f"{arm}.perplexity_mean", _of(arm, "test_perplexity"), seeds)
        for name in ("payload_bytes_per_step", "state_bytes", "carried_bytes"):
            add(figures, f"{arm}.{name}", _of(arm, name), seeds)
    return figures


def _of(arm: str, key: str) -> Number:
    return lambda seed: float(seed[arm][key])


def _ratio(key: str, theirs: str, ours: str) -> Number:
    return lambda seed: float(seed[theirs][key]) / float(seed[ours][key])


def gap(ours: str, theirs: str) -> Number:
    """By how many per cent our perplexity is higher."""
    return lambda seed: 100 * (_ratio("test_perplexity", ours, theirs)(seed) - 1)


def _comparisons(arm: str) -> dict[str, Figure]:
    coded, plain = WIRE[arm]
    return {
        "bytes_vs_ddp": _ratio("payload_bytes", "ddp", arm),
        "bytes_vs_lowrank_ddp": _ratio("payload_bytes", "lowrank_ddp", arm),
        "wire_bytes_vs_ddp": _ratio("wire_bytes", "ddp", coded),
        "wire_gap_pct": gap(coded, plain),
        "state_vs_adam": lambda seed: (
            8 * seed[arm]["low_rank_parameters"] / seed[arm]["low_rank_state_bytes"]
        ),
        "carried_bytes": _of(arm, "carried_bytes"),
        "outer_state_bytes": _of(arm, "outer_state_bytes"),
        "x_sync_bytes": _of(arm, "x_sync_bytes"),
        "gap_vs_lowrank_ddp_pct": gap(arm, "lowrank_ddp"),
        "gap_vs_lowrank_ddp_ef_pct": gap(arm, "lowrank_ddp_ef"),
        "gap_vs_des_loc_pct": gap(arm, "des_loc"),
        "gap_vs_ddp_pct": gap(arm, "ddp"),
    }


PAPER_ONLY: dict[str, Figure] = {
    "gain_vs_local_pct": lambda seed: -gap(PAPER, "lordo_local")(seed),
    "stagnation_pct": gap("lordo_global_no_qhm", PAPER),
    "frozen_vs_refreshed_pct": gap("lordo_global_frozen", PAPER),
    "subspace_overlap_no_qhm": _of("lordo_global_no_qhm", "subspace_overlap"),
}
