"""From held-out curves to the flat figures.

A figure is a function of one seed's results; its value is the mean over seeds, its `_spread` the
range (null with one seed). Runs that are compared have the same seed: warm start, prompts, numbers
that sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.study.figures import Figure, Seed, add

Curve = Sequence[tuple[int, float, float]]
"""Updates, their seconds, sampled accuracy."""

TARGET = 0.6


def reached(curve: Curve, target: float = TARGET, column: int = 1) -> float | None:
    """Seconds, or with column 0 updates, until the accuracy is at least `target`, on the line
    between two points; None where it never is."""
    before = curve[0]
    for point in curve:
        if point[2] >= target:
            if point is before:
                return float(point[column])
            share = (target - before[2]) / (point[2] - before[2])
            return before[column] + share * (point[column] - before[column])
        before = point
    return None


def at_seconds(curve: Curve, seconds: float) -> float:
    """The accuracy after so many seconds of updates, on the line between two points."""
    for before, after in zip(curve, curve[1:], strict=False):
        if after[1] >= seconds:
            share = (seconds - before[1]) / (after[1] - before[1])
            return before[2] + share * (after[2] - before[2])
    return curve[-1][2]


def _start(row: str) -> Figure:
    return lambda seed: seed[row]["curve"][0][2]


def _end(row: str) -> Figure:
    return lambda seed: seed[row]["curve"][-1][2]


def _gap(above: str, below: str) -> Figure:
    return lambda seed: seed[above]["curve"][-1][2] - seed[below]["curve"][-1][2]


def _cosine(row: str, index: int) -> Figure:
    return lambda seed: seed[row]["cosines"][index]


def _slower(seed: Seed) -> float | None:
    naive, exact = (reached(seed[row]["curve"]) for row in ("naive", "exact"))
    return None if naive is None or not exact else naive / exact


def _slower_update(seed: Seed) -> float | None:
    return float(seed["naive"]["update_s"] / seed["exact"]["update_s"])


def _equal_seconds(seed: Seed) -> float | None:
    """Exact after the seconds that the whole of response_only takes, over its end."""
    end = seed["response_only"]["curve"][-1]
    return at_seconds(seed["exact"]["curve"], end[1]) - float(end[2])


def _selfcheck(seed: Seed) -> float | None:
    return max(float(result["selfcheck"]) for result in seed.values())


FIGURES: dict[str, Figure] = {
    "heldout_start": _start("exact"),
    "heldout_exact": _end("exact"),
    "heldout_response_only": _end("response_only"),
    "heldout_best": _end("best"),
    "gap_exact_response_only": _gap("exact", "response_only"),
    "gap_equal_seconds": _equal_seconds,
    "gap_good_reader": _gap("good_reader_exact", "good_reader_response_only"),
    "gap_ppo": _gap("ppo_exact", "ppo_response_only"),
    "gap_dpo": _gap("dpo_exact", "dpo_response_only"),
    "shuffled_gain": lambda seed: _end("shuffled")(seed) - _start("shuffled")(seed),  # type: ignore[operator]
    "reuse_8_over_recaptured": _gap("reuse_8", "recaptured_8"),
    "seconds_to_060_naive_over_exact": _slower,
    "update_naive_over_exact": _slower_update,
    **{
        f"cosine_{when}{ending}": _cosine(row, index)
        for row, ending in (("exact", ""), ("response_only", "_on_response_only"))
        for index, when in enumerate(("start", "middle", "end"))
    },
    "selfcheck_max": _selfcheck,
}


def summary(seeds: Sequence[Seed]) -> dict[str, float | None]:
    """All figures of the comparison with their spreads."""
    found: dict[str, float | None] = {}
    for name, figure in FIGURES.items():
        add(found, name, figure, seeds)
    return found


def each_row(seeds: Sequence[Seed], rows: Iterable[str]) -> dict[str, float | None]:
    """The table: where each row starts and ends, sampled and greedy, what it takes to .60 and what
    an update costs."""
    found: dict[str, float | None] = {}
    for row in rows:
        columns: dict[str, Figure] = {
            "start": _start(row),
            "final": _end(row),
            "greedy": lambda seed, row=row: seed[row]["greedy"],  # type: ignore[misc]
            "alike": lambda seed, row=row: seed[row]["alike"],  # type: ignore[misc]
            "others": lambda seed, row=row: seed[row]["others"],  # type: ignore[misc]
            "updates_to_060": lambda seed, row=row: reached(seed[row]["curve"], column=0),  # type: ignore[misc]
            "seconds_to_060": lambda seed, row=row: reached(seed[row]["curve"]),  # type: ignore[misc]
            "update_ms": lambda seed, row=row: 1000 * seed[row]["update_s"],  # type: ignore[misc]
        }
        for column, figure in columns.items():
            add(found, f"{row}.{column}", figure, seeds)
    return found
