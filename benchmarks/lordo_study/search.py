"""Which runs are still needed: the search for each arm's learning rate, then the other seeds.

Seed 0 tries the rate where an arm's search begins and its two neighbours on the grid, and goes on
in the direction of the best until that is in the interior. Validation decides, never test. The
other seeds take the rate that was found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from algorithms.lordo.config import ArmConfig
from benchmarks.lordo_study.arms import GRID, at_rate
from benchmarks.lordo_study.setting import Job, Setting
from benchmarks.study import search
from benchmarks.study.queue import Result


@dataclass(frozen=True)
class Study:
    """Arms to compare, with what is known before."""

    setting: Setting
    arms: Mapping[str, ArmConfig]
    rates: Mapping[str, int]
    """Arm -> index into `GRID` where the search begins; or is the answer, if not `search`."""
    follows: Mapping[str, str]
    """Arm -> the arm whose rate it takes."""
    seeds: int
    search: bool

    def job(self, name: str, rate: int, seed: int) -> Job:
        return Job(name=name, arm=at_rate(self.arms[name], rate), seed=seed, setting=self.setting)


Lookup = Callable[[Job], Result | None]
"""The result of a run, None if it has not ended."""


def needed(study: Study, lookup: Lookup) -> list[Job]:
    """The runs that can be started now, results known or not, the searches first."""
    searching: list[Job] = []
    settled: list[Job] = []
    for name in study.arms:
        rate = best_rate(study, name, lookup)
        if rate is not None:
            settled += [study.job(name, rate, seed) for seed in range(study.seeds)]
        elif name not in study.follows:
            losses = _losses(study, name, lookup)
            rates = search.tried(name, study.rates[name], len(GRID), losses)
            searching += [study.job(name, rate, 0) for rate in rates]
    return searching + settled


def best_rate(study: Study, name: str, lookup: Lookup) -> int | None:
    """Index into `GRID` of the arm's rate, None while its search goes on."""
    name = study.follows.get(name, name)
    if not study.search:
        return study.rates[name]
    return search.best(name, study.rates[name], len(GRID), _losses(study, name, lookup))


def outcome(study: Study, lookup: Lookup) -> tuple[dict[str, int], list[dict[str, Result]]]:
    """When all runs have ended: the rate of every arm, and its results, a dict for each seed."""
    rates: dict[str, int] = {}
    seeds: list[dict[str, Result]] = [{} for _ in range(study.seeds)]
    for name in study.arms:
        rate = best_rate(study, name, lookup)
        assert rate is not None
        rates[name] = rate
        for seed, results in enumerate(seeds):
            result = lookup(study.job(name, rate, seed))
            assert result is not None
            results[name] = result
    return rates, seeds


def _losses(study: Study, name: str, lookup: Lookup) -> search.Losses:
    """Validation perplexity of the arm by rate; a run that diverged is worse than all others."""

    def loss(rate: int) -> float | None:
        result = lookup(study.job(name, rate, 0))
        if result is None:
            return None
        found = result["validation_perplexity"]
        return math.inf if found is None else float(found)

    return loss
