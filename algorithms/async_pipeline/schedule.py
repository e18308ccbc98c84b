"""Asynchronous 1F1B as a plain list of actions per stage: no flush between updates.

Stage k of P runs D_k forwards ahead, then one forward and one backward in turn, then drains. So its
forward of microbatch m comes after the backwards of 0..m-1-D_k, and with an update after each `a`
backwards its weights have max(0, m - D_k) // a updates. D_k = P-1-k is the least with which every
stage is busy when messages take no time (PipeDream, 1806.03377). A message that takes r times as
long as a microbatch's compute needs (1 + 2r)(P-1-k): see `stretched`.

Departs from PipeDream's runtime in that a run may have fewer microbatches than D_k, and may pause
after any update without draining: the actions until then are a prefix of the list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal

from algorithms.common.errors import InputError

Kind = Literal["forward", "backward", "update"]


@dataclass(frozen=True)
class Action:
    """One step of a stage's work; `index` is a microbatch, or for updates the update, from 0."""

    kind: Kind
    index: int


def natural(stages: int) -> list[int]:
    """D_k = P-1-k for k = 0..P-1, in microbatches."""
    return list(range(stages - 1, -1, -1))


def stretched(stages: int, ratio: float) -> list[int]:
    """The least delays that hide messages that take `ratio` times a microbatch's compute.

    From stage k to the last and back a microbatch needs P-k computes and 2(P-1-k) messages; stage k
    has 1 + D_k microbatches under way, so it is never idle with D_k = (1 + 2 ratio)(P-1-k).
    """
    return [ceil((1 + 2 * ratio) * delay - 1e-9) for delay in natural(stages)]


def check_delays(delays: Sequence[int], stages: int, name: str = "delays") -> list[int]:
    """`delays` if a pipeline can run with them: one for each stage, never rising, not negative.

    A stage that ran fewer forwards ahead than the next would starve it for ever. Raises
    `InputError` that begins with `name`.
    """
    if len(delays) != stages:
        raise InputError(f"{name}: {len(delays)} numbers for {stages} stages")
    for stage, delay in enumerate(delays):
        if delay < 0:
            raise InputError(f"{name}: stage {stage} has {delay}, which is negative")
        if stage and delay > delays[stage - 1]:
            raise InputError(f"{name}: stage {stage} has {delay}, more than stage {stage - 1}")
    return list(delays)


def actions(
    delay: int,
    start: int,
    stop: int,
    accumulation: int = 1,
    *,
    done: int | None = None,
    until: int | None = None,
) -> list[Action]:
    """What a stage of this delay does with microbatches `start`..`stop`-1, from the first forward
    to the drained end. With `done` and `until`, those actions of it that lie between the backwards
    of all microbatches below `done`, with their updates, and of all below `until`.

    Raises `InputError` when `accumulation` does not divide `start` and `stop`.
    """
    for name, value in (("start", start), ("stop", stop)):
        if value % accumulation:
            raise InputError(f"{name}: {value} is no multiple of accumulation ({accumulation})")
    warm_up = min(delay, stop - start)
    plan = []
    for index in range(start if done is None else done, stop if until is None else until):
        if index == start:
            plan += [Action("forward", start + ahead) for ahead in range(warm_up)]
        if index + warm_up < stop:
            plan.append(Action("forward", index + warm_up))
        plan.append(Action("backward", index))
        if (index + 1) % accumulation == 0:
            plan.append(Action("update", index // accumulation))
    return plan


def forwarded(delay: int, start: int, stop: int, done: int) -> int:
    """The end of the microbatches that a stage of this delay has forwarded when the backwards of
    all below `done` are over and nothing of the next has begun."""
    return start if done <= start else min(done + delay, stop)
