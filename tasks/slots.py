"""GPUs of this machine, each for one job at a time: a lock file a device.

The lock is the kernel's, on a file that all clones of the project see. The job's supervisor
inherits it, so a device is free when the last process of its job is gone, and not when the owner
dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from algorithms.common.errors import InputError

VISIBLE = "CUDA_VISIBLE_DEVICES"
DRIVER = Path("/proc/driver/nvidia/gpus")
LOCKS = Path(tempfile.gettempdir())
POLL_S = 0.5

log = logging.getLogger("shoestring")


@dataclass(frozen=True)
class Slots:
    """Devices that a job may use, by what `VISIBLE` calls them, and the locks that say so."""

    devices: tuple[str, ...] = ()
    locks: tuple[int, ...] = ()
    """Open files; whoever inherits them holds the devices too."""


def devices() -> list[str]:
    """Of this machine, or those of them that the user has made visible."""
    if (visible := os.environ.get(VISIBLE)) is not None:
        return [name.strip() for name in visible.split(",") if name.strip()]
    return [str(number) for number, _ in enumerate(DRIVER.glob("*"))]


@contextlib.contextmanager
def hold(count: int) -> Iterator[Slots]:
    """Wait until `count` devices are free, and hold them: all at once, or none, so that two who
    wait never wait for each other. Raises `InputError` where there are too few for ever."""
    known = devices()
    if count > len(known):
        raise InputError(f"training.ranks: {count} GPUs are needed, this machine has {len(known)}")
    taken = _take(known, count)
    if len(taken.devices) < count:
        log.warning("waiting for %d GPUs: other jobs are at work there", count)
    while len(taken.devices) < count:
        time.sleep(POLL_S)
        taken = _take(known, count)
    try:
        yield taken
    finally:
        _release(taken)


def _take(known: list[str], count: int) -> Slots:
    """The first `count` free devices, or none."""
    taken = Slots()
    for device in known:
        if len(taken.devices) == count:
            break
        name = f"shoestring-{os.getuid()}-gpu-{device.replace('/', '-')}.lock"
        lock = os.open(LOCKS / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
        else:
            taken = Slots((*taken.devices, device), (*taken.locks, lock))
    if len(taken.devices) < count:
        _release(taken)
        return Slots()
    return taken


def _release(taken: Slots) -> None:
    """Close our ends; an heir goes on holding the devices."""
    for lock in taken.locks:
        os.close(lock)
