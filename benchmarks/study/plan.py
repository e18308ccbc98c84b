"""Which runs of a study are still needed: the search for each row's rate, then all seeds.

A row is an arm in its setting, as its study describes it; all seeds take the rate that the search
(`search.py`) found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from benchmarks.study import search
from benchmarks.study.queue import Result

Lookup = Callable[[Any], Result | None]
"""The result of a job, None if it has not ended."""


class Row(Protocol):
    """An arm in its setting."""

    @property
    def follows(self) -> str | None:
        """The row whose rate it takes, where it is not searched."""

    def job(self, name: str, rate: int, seed: int, /) -> Any:
        """The run that is reported."""

    def trials(self, name: str, rate: int, /) -> Sequence[Any]:
        """The runs that tell whether a rate is good."""

    def loss(self, results: Sequence[Result], /) -> float:
        """Of the trials of one rate."""


R = TypeVar("R", bound=Row)


@dataclass(frozen=True)
class Study(Generic[R]):
    """Rows to compare, with what is known before."""

    rows: Mapping[str, R]
    rates: Mapping[str, int]
    """Row -> index into the grid where the search begins; or is the answer, if not `search`."""
    grid: Sequence[float]
    seeds: int
    search: bool


def needed(study: Study[Any], lookup: Lookup) -> list[Any]:
    """The jobs that can be started now, results known or not, the searches first."""
    searching: list[Any] = []
    settled: list[tuple[int, Any]] = []
    for name, row in study.rows.items():
        rate = best_rate(study, name, lookup)
        if rate is not None:
            settled += [(seed, row.job(name, rate, seed)) for seed in range(study.seeds)]
        elif row.follows is None:
            losses = _losses(row, name, lookup)
            for each in search.tried(name, study.rates[name], len(study.grid), losses):
                searching += row.trials(name, each)
    return searching + [job for _, job in sorted(settled, key=lambda pair: pair[0])]


def best_rate(study: Study[Any], name: str, lookup: Lookup) -> int | None:
    """Index into the grid of the row's rate, None while its search goes on."""
    name = study.rows[name].follows or name
    if not study.search:
        return study.rates[name]
    losses = _losses(study.rows[name], name, lookup)
    return search.best(name, study.rates[name], len(study.grid), losses)


def outcome(study: Study[Any], lookup: Lookup) -> tuple[dict[str, int], list[dict[str, Result]]]:
    """When all runs have ended: the rate of every row, and its results, a dict for each seed."""
    rates: dict[str, int] = {}
    seeds: list[dict[str, Result]] = [{} for _ in range(study.seeds)]
    for name, row in study.rows.items():
        rate = best_rate(study, name, lookup)
        assert rate is not None
        rates[name] = rate
        for seed, results in enumerate(seeds):
            result = lookup(row.job(name, rate, seed))
            assert result is not None
            results[name] = result
    return rates, seeds


def _losses(row: Row, name: str, lookup: Lookup) -> search.Losses:
    def loss(rate: int) -> float | None:
        results = [lookup(job) for job in row.trials(name, rate)]
        known = [result for result in results if result is not None]
        return row.loss(known) if len(known) == len(results) else None

    return loss
