"""What an asynchronous pipeline's times would be, where it is only simulated.

The actions of `schedule`, each as soon as its stage is free and what it needs is there. Messages
and updates take no time. So it is a bound: real pipelines have links, and threads to share.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from copy import deepcopy

from algorithms.async_pipeline import schedule
from algorithms.async_pipeline.schedule import Action
from algorithms.async_pipeline.trace import Event

FORWARD = 1 / 3
"""Share of a microbatch's compute; the backward is twice as much."""


def timeline(
    delays: Sequence[int], microbatches: int, compute: Sequence[float], accumulation: int = 1
) -> list[list[Event]]:
    """The events of each stage, from 0 on, when stage k needs `compute[k]` seconds for forward and
    backward of one microbatch."""
    work = _Work([(FORWARD * each, (1 - FORWARD) * each) for each in compute])
    for plan, delay in zip(work.plans, delays, strict=True):
        plan += schedule.actions(delay, 0, microbatches, accumulation)
    stages: list[list[Event]] = [[] for _ in delays]
    for k, event in work.events():
        stages[k].append(event)
    return stages


class Span:
    """How long `timeline` is, for a number of microbatches that grows with a run: what was done
    before the drain of the last one is not done again."""

    def __init__(self, delays: Sequence[int], costs: Sequence[int], accumulation: int = 1) -> None:
        """`costs` are the stages' for a forward; a backward costs twice as much."""
        self.delays, self.accumulation = delays, accumulation
        self.work = _Work([(cost, 2 * cost) for cost in costs])
        """Of a pipeline that goes on for ever."""
        self.microbatches = 0

    def of(self, microbatches: int) -> float:
        """In the unit of the costs, exactly; `microbatches` must not fall from call to call."""
        a = self.accumulation
        for plan, delay in zip(self.work.plans, self.delays, strict=True):
            done, until = (max(0, each - delay) for each in (self.microbatches, microbatches))
            far = a * (microbatches + delay)
            plan += schedule.actions(delay, 0, far, a, done=done, until=until)
        self.microbatches = microbatches
        deque(self.work.events(), maxlen=0)
        drain = deepcopy(self.work)
        for plan, delay in zip(drain.plans, self.delays, strict=True):
            done = max(0, microbatches - delay)
            plan += schedule.actions(delay, 0, microbatches, a, done=done, until=microbatches)
        deque(drain.events(), maxlen=0)
        return max(drain.free)


class _Work:
    """What stages have before them, and when each will be free."""

    def __init__(self, costs: Sequence[tuple[float, float]]) -> None:
        """Of a forward and a backward on each stage; with whole numbers times are whole."""
        self.costs = costs
        self.free = [0 * forward for forward, _ in costs]
        self.plans: list[deque[Action]] = [deque() for _ in costs]
        self.arrived: dict[tuple[str, int, int], float] = {}
        """When a stage has what it needs for its forward or backward of a microbatch."""

    def events(self) -> Iterator[tuple[int, Event]]:
        """Does what can be done, and says on which stage; in order for each."""
        last = len(self.plans) - 1
        moved = True
        while moved:
            moved = False
            for k, plan in enumerate(self.plans):
                while plan:
                    kind, index = plan[0].kind, plan[0].index
                    begin, ready = self.free[k], self.free[k]
                    if (kind == "forward" and k > 0) or (kind == "backward" and k < last):
                        if (kind, k, index) not in self.arrived:
                            break
                        ready = self.arrived.pop((kind, k, index))
                    plan.popleft()
                    moved = True
                    if ready > begin:
                        yield k, Event("wait", index, begin, ready)
                        begin = ready
                    forward, backward = self.costs[k]
                    end = begin + {"forward": forward, "backward": backward}.get(kind, 0)
                    self.free[k] = end
                    if kind == "forward" and k < last:
                        self.arrived[kind, k + 1, index] = end
                    elif kind == "backward" and k > 0:
                        self.arrived[kind, k - 1, index] = end
                    yield k, Event(kind, index, begin, end)
