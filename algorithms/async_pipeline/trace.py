"""What a stage did when: from it, how busy the pipeline was.

Times are seconds of `time.perf_counter`, which processes of one machine share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal

import torch

Kind = Literal["forward", "backward", "update", "wait"]
COMPUTE = ("forward", "backward", "update")


@dataclass(frozen=True)
class Event:
    """`index` is the microbatch, or for updates the update. A wait is for a message of it."""

    kind: Kind
    index: int
    start: float
    end: float


@dataclass
class Trace:
    """The events of one stage. On an accelerator each ends when the device is done."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    events: list[Event] = field(default_factory=list)

    @contextmanager
    def record(self, kind: Kind, index: int) -> Iterator[None]:
        """Note what happens inside."""
        start = perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self.events.append(Event(kind, index, start, perf_counter()))

    def take(self) -> list[Event]:
        """The events so far; forgets them."""
        events, self.events = self.events, []
        return events


def seconds(events: Sequence[Event], *kinds: str) -> float:
    """Time spent in events of these kinds."""
    return sum(event.end - event.start for event in events if event.kind in kinds)


def span(stages: Sequence[Sequence[Event]]) -> float:
    """Seconds from the first event of any stage to the end of the last."""
    every = [event for events in stages for event in events]
    return max(event.end for event in every) - min(event.start for event in every)


def utilisation(stages: Sequence[Sequence[Event]]) -> float:
    """Compute over (P times wall), 0 to 1, of the events of all stages."""
    return sum(seconds(events, *COMPUTE) for events in stages) / (len(stages) * span(stages))
