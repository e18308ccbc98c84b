"""From held-out curves to the flat figures: how many updates an arm needs, over those of another.

Targets are the losses of a reference at given shares of its run. A figure is the worst over them. A
target that ours misses makes a figure null; one that another arm misses counts as its whole run,
or, in figures with `reached` in their name, does not count.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from benchmarks.async_study.arms import BASELINES, STAGED, X4
from benchmarks.study.figures import Figure, Seed, add

Curve = Sequence[tuple[int, float]]
"""Updates and losses."""

QUARTERS = (0.25, 0.5, 0.75, 1.0)
"""Shares of the reference's run."""


def smooth(curve: Curve) -> list[tuple[int, float]]:
    """Each point the mean of itself and its two neighbours, of one at the ends."""
    losses = [loss for _, loss in curve]
    return [
        (update, statistics.fmean(losses[max(0, i - 1) : i + 2]))
        for i, (update, _) in enumerate(curve)
    ]


def targets(curve: Curve, shares: Iterable[float] = QUARTERS) -> list[float]:
    """Smoothed losses at these shares of the run."""
    points, end = dict(smooth(curve)), curve[-1][0]
    return [points[round(share * end)] for share in shares]


def updates_to(curve: Curve, target: float) -> float | None:
    """Updates, at least 1, until the smoothed loss is at most `target`, on the line between two
    points; None where it never is."""
    before: tuple[int, float] | None = None
    for update, loss in smooth(curve):
        if loss <= target:
            if before is None:
                return 1.0
            share = (before[1] - target) / (before[1] - loss)
            return max(1.0, before[0] + share * (update - before[0]))
        before = update, loss
    return None


def ratio(
    ours: str,
    theirs: Sequence[str],
    reference: str,
    *,
    missed: bool = False,
    reached: bool = False,
    last: int = 4,
) -> Figure:
    """The largest over targets of ours over the least of theirs; targets are the first `last` of
    `reference`. With `missed`, one that ours misses counts as its whole run. With `reached`, those
    that all of theirs miss do not count."""

    def figure(seed: Seed) -> float | None:
        found = []
        for target in targets(seed[reference]["curve"])[:last]:
            mine = updates_to(seed[ours]["curve"], target)
            if mine is None:
                if not missed:
                    return None
                mine = seed[ours]["curve"][-1][0]
            others = {name: updates_to(seed[name]["curve"], target) for name in theirs}
            if reached and all(other is None for other in others.values()):
                continue
            found.append(
                mine
                / min(
                    seed[name]["curve"][-1][0] if other is None else other
                    for name, other in others.items()
                )
            )
        return max(found, default=None)

    return figure


def fewer(ours: str, theirs: Sequence[str], *, reached: bool = False) -> Figure:
    """By how many per cent ours needs fewer updates than the best of theirs."""
    worst = ratio(ours, theirs, "sync_adamw", reached=reached)
    return lambda seed: None if (found := worst(seed)) is None else 100 * (1 - found)


def penalty(without: str, given: str) -> Figure:
    """By how much the final loss is higher."""

    def figure(seed: Seed) -> float | None:
        values = [seed[name]["final"] for name in (without, given)]
        return None if None in values else values[0] - values[1]

    return figure


FIGURES: dict[str, Figure] = {
    "ratio_to_sync_adamw": ratio("ours", ["sync_adamw"], "sync_adamw"),
    "ratio_delay28_to_sync_adamw": ratio("ours_x4", ["sync_adamw"], "sync_adamw"),
    "ratio_to_sync_same": ratio("ours", ["sync_ours"], "sync_adamw"),
    "slowdown_adamw": ratio("adamw", ["sync_adamw"], "sync_adamw", missed=True),
    "slowdown_own_long": ratio("ours_long", ["sync_ours_long"], "sync_ours_long", last=3),
    "fewer_than_adamw_pct": fewer("ours", ["adamw"]),
    "fewer_than_best_baseline_pct": fewer("ours", BASELINES),
    "fewer_than_strengthened_baseline_pct": fewer("ours", STAGED),
    "fewer_than_best_baseline_reached_pct": fewer("ours", BASELINES, reached=True),
    "fewer_than_strengthened_baseline_reached_pct": fewer("ours", STAGED, reached=True),
    "delay28_fewer_than_best_pct": fewer("ours_x4", X4),
    "paper_preset_ratio_to_sync_adamw": ratio("paper", ["sync_adamw"], "sync_adamw", missed=True),
    "no_stash_penalty_rotation": penalty("ours_no_stash", "ours"),
    "no_stash_penalty_adamw": penalty("adamw_no_stash", "adamw"),
    "stage_aware_gain_pct": fewer("ours_stage_aware", ["ours"]),
    "moe_ratio_to_sync_adamw": ratio("moe_ours", ["moe_sync_adamw"], "moe_sync_adamw"),
}


def summary(seeds: Sequence[Seed]) -> dict[str, float | None]:
    """All figures of the comparison with their spreads."""
    found: dict[str, float | None] = {}
    for name, figure in FIGURES.items():
        add(found, name, figure, seeds)
    return found


def each_row(seeds: Sequence[Seed], rows: Iterable[str]) -> dict[str, float | None]:
    """`ROW.final` and `ROW.updates_to_25` to `_100`: the targets of synchronous AdamW, those of
    the mixture of experts for its rows, those of the long run for its."""
    found: dict[str, float | None] = {}
    for row in rows:
        reference = "sync_adamw"
        if row.startswith("moe_"):
            reference = "moe_sync_adamw"
        elif row.endswith("_long"):
            reference = "sync_ours_long"
        add(found, f"{row}.final", _final(row), seeds)
        for index, share in enumerate(QUARTERS):
            add(found, f"{row}.updates_to_{100 * share:.0f}", _to(row, reference, index), seeds)
    return found


def _final(row: str) -> Figure:
    return lambda seed: seed[row]["final"]


def _to(row: str, reference: str, index: int) -> Figure:
    return lambda seed: updates_to(seed[row]["curve"], targets(seed[reference]["curve"])[index])
