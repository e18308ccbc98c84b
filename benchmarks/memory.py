"""Peaks of memory: what torch allocated, by the profiler, and what a fresh process had resident.

The first is exact and repeatable but blind to what bypasses torch's allocator; the second sees
everything and has the noise of the system's.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

T = TypeVar("T")


def allocated_peak(step: Callable[[], object]) -> int:
    """Bytes of torch's CPU tensors at the worst moment of `step`, over those at its start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    recorder: Any = profiled.profiler
    events = [e for e in recorder.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: int(e.start_ns())):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def in_fresh_process(function: Callable[..., T], *args: Any) -> T:
    """`function(*args)` in a new interpreter of one thread; both sides of it can be pickled."""
    with ProcessPoolExecutor(1, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        return pool.submit(function, *args).result()


def resident() -> int:
    """Bytes of this process in memory now."""
    return _status("VmRSS")


def resident_peak() -> int:
    """The most since this process began or `reset_resident_peak`; not inherited from a parent, as
    `ru_maxrss` is."""
    return _status("VmHWM")


def reset_resident_peak() -> None:
    """Count anew from here."""
    Path("/proc/self/clear_refs").write_text("5")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status: has no {name}")
