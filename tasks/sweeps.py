"""Sweeps: the points of a grid times seeds, and what they come to.

A point is one arm with other settings, trained as a run with `--set` is. Its job is named by all
that decides its result, so a point that is done is known by its run directory.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ruamel.yaml import YAML

from algorithms.common.errors import InputError, one_line
from tasks import measures
from tasks.config import NOT_YAML, Params
from tasks.measures import Measure


@dataclass(frozen=True)
class Point:
    """One job of a sweep."""

    setting: str
    """What its row in the table says: optimizer.lr=0.001."""
    seed: int
    overrides: tuple[str, ...]
    """As `--set` takes them."""


def points(params: Params, arm: str, grid: Sequence[str], seeds: int) -> list[Point]:
    """Every combination of the values of `grid` (KEY=VALUE,VALUE; keys of the arm), for `seeds`
    seeds from that of params.yaml on.

    Raises `InputError` for an unknown arm and for what is no grid.
    """
    if seeds < 1:
        raise InputError(f"--seeds {seeds}: must be positive")
    stage = params.stage_of(arm)
    config = params.stages[stage]
    place = f"{stage}.{'arms' if arm in config.arms else 'study'}.{arm}"
    axes = [_axis(text) for text in grid]
    keys = [key for key, _ in axes]
    if len({*keys}) < len(keys):
        raise InputError(f"--grid: {max(keys, key=keys.count)} is given twice")
    first = config.training.seed
    found = []
    for values in itertools.product(*(values for _, values in axes)):
        named = [f"{key}={value}" for key, value in zip(keys, values, strict=True)]
        for seed in range(first, first + seeds):
            overrides = [*(f"{place}.{each}" for each in named), f"{stage}.training.seed={seed}"]
            found.append(Point(" ".join(named) or "as it is", seed, tuple(overrides)))
    return found


def _axis(text: str) -> tuple[str, list[str]]:
    """KEY=VALUE,VALUE -> the key and its values, as JSON."""
    key, separator, values = text.partition("=")
    if not separator or not key or not values:
        raise InputError(f"--grid {text}: must be KEY=VALUE,VALUE")
    try:
        loaded = YAML(typ="safe", pure=True).load(f"[{values}\n]")
        return key, [json.dumps(value) for value in loaded]
    except NOT_YAML as error:
        raise InputError(f"--grid {text}: not YAML: {one_line(error)}") from None


def summary(results: Sequence[tuple[Point, dict[str, Any] | None]]) -> list[dict[str, Any]]:
    """A row for each setting, in order: mean over seeds of what its arm is judged by, the spread
    (the sample standard deviation), and which is the best. None for a point that was not finite."""
    measure = measures.of(next((quality for _, quality in results if quality is not None), {}))
    found: dict[str, list[float]] = {}
    for point, quality in results:
        value = math.nan if quality is None else float(quality[measure.key])
        found.setdefault(point.setting, []).append(value)
    means = {setting: measure.rank(statistics.fmean(values)) for setting, values in found.items()}
    best = min(means, key=means.__getitem__, default=None)
    return [_row(measure, name, values, name == best) for name, values in found.items()]


def _row(measure: Measure, setting: str, values: Sequence[float], best: bool) -> dict[str, Any]:
    finite = all(map(math.isfinite, values))
    spread = statistics.stdev(values) if finite and len(values) > 1 else None
    return {
        "setting": setting,
        "seeds": len(values),
        measure.word: f"{statistics.fmean(values):.4f}" if finite else "not finite",
        "spread": "" if spread is None else f"{spread:.4f}",
        "best": "best" if best and finite else "",
    }
