"""Timing on a machine that is shared: contestants take turns, and only ratios are compared.

Whatever slows the machine down for seconds slows neighbours in a round alike, so a ratio is taken
within each round, and the median over rounds is reported with its spread.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Measured:
    """One figure over all rounds."""

    median: float
    spread: float
    """Interquartile range, in the unit of the median; 0 with one round."""


def interleaved(contestants: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """What every contestant returned, by round: A, B, A, B, ... A first round does not count.

    A contestant returns what it measured itself, so that its preparations need not count either.
    """
    results: dict[str, list[T]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name, contestant in contestants.items():
            result = contestant()
            if number > 0:
                results[name].append(result)
    return results


def measured(values: Sequence[float]) -> Measured:
    """Median and spread of one contestant's rounds."""
    if len(values) < 2:
        return Measured(values[0], 0.0)
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return Measured(median, upper - lower)


def ratio(above: Sequence[float], below: Sequence[float]) -> Measured:
    """Median and spread of the ratios within each round."""
    return measured([a / b for a, b in zip(above, below, strict=True)])
