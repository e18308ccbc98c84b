"""Which twin of an operation runs, and why.

An operation lists its twins in order of preference. Each can say in a few words why it does not
take a call; the first that does not object runs. Nothing falls back in silence: the choice is
counted, and the objections of the twins before it are kept and logged when they change.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor

log = logging.getLogger(__name__)

counters: defaultdict[str, Counter[str]] = defaultdict(Counter)  # {op: {twin: calls}}
reasons: defaultdict[str, dict[str, str]] = defaultdict(dict)  # {op: {twin: why, last time}}

_forced: ContextVar[Mapping[str, str]] = ContextVar("_forced")


class CannotRun(RuntimeError):
    """A twin was forced that cannot run here. The message is one line with the reason."""


@dataclass(frozen=True)
class Twin:
    """One implementation of an operation."""

    name: str
    refuses: Callable[..., str | None]  # why it cannot take these tensors, or None
    run: Callable[..., Any]


def anywhere(*tensors: Tensor) -> None:
    """The `refuses` of a twin that takes every call."""


def choose(op: str, twins: Sequence[Twin], *tensors: Tensor) -> Twin:
    """The twin for a call with these tensors: the forced one, else the first that can run.

    Raises CannotRun if the forced twin refuses or does not exist, or if every twin refuses.
    """
    forced = _forced.get({}).get(op)
    objections: list[str] = []
    for twin in twins:
        if forced not in (None, twin.name):
            continue
        objection = twin.refuses(*tensors)
        if objection is None:
            why = "; ".join(objections) or ("forced" if forced else "preferred")
            _record(op, twin.name, why)
            return twin
        objections.append(f"not {twin.name}: {objection}")
    if forced is not None and not objections:
        names = ", ".join(twin.name for twin in twins)
        raise CannotRun(f"{op} has no twin {forced!r}, only {names}")
    raise CannotRun(f"{op}: {'; '.join(objections)}")


@contextmanager
def override(op: str, twin: str) -> Iterator[None]:
    """Force a twin of an operation in this thread or task, for tests and measurements."""
    token = _forced.set({**_forced.get({}), op: twin})
    try:
        yield
    finally:
        _forced.reset(token)


def _record(op: str, twin: str, why: str) -> None:
    counters[op][twin] += 1
    if reasons[op].get(twin) != why:
        reasons[op][twin] = why
        log.info("%s runs as %s (%s)", op, twin, why)
