"""SIGTERM and SIGINT as a request: the loop asks at every step, all ranks agree when to stop."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType


def on_signals() -> Callable[[], bool]:
    """Take over SIGTERM and SIGINT of this process; the result says whether one has arrived."""
    requested = False

    def remember(signum: int, frame: FrameType | None) -> None:
        nonlocal requested
        requested = True

    signal.signal(signal.SIGTERM, remember)
    signal.signal(signal.SIGINT, remember)
    return lambda: requested
