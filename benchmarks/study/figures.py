"""From results of runs with several seeds to flat figures: a mean and its spread.

A figure is a function of one seed's results; its value is the mean over seeds, its `_spread` the
range (null with one seed). Runs that are compared have the same seed, hence data in the same order.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from benchmarks.study.queue import Result

Seed = Mapping[str, Result]
"""Row -> its result with this seed; rows that were not run are missing."""
Figure = Callable[[Seed], float | None]


def add(found: dict[str, float | None], name: str, figure: Figure, seeds: Sequence[Seed]) -> None:
    """The mean over seeds and its spread; null where a run is missing, diverged, or gives None."""
    values = [_value(figure, seed) for seed in seeds]
    known = [value for value in values if value is not None]
    whole = 0 < len(known) == len(values)
    found[name] = statistics.fmean(known) if whole else None
    found[f"{name}_spread"] = max(known) - min(known) if whole and len(known) > 1 else None


def _value(figure: Figure, seed: Seed) -> float | None:
    try:
        return figure(seed)
    except (KeyError, TypeError):  # no such run; the loss of one that diverged is None
        return None
