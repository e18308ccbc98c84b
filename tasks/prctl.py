"""Two properties of a process, set by prctl(2).

Only the standard library: ranks use this before they import anything heavy.
"""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process signal `number` as soon as `parent` (a pid) is dead.

    The kernel watches the thread that created this process, so create it from a main thread. The
    setting survives exec but is not inherited by children.
    """
    _prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it died before the kernel was told
        os.kill(os.getpid(), number)


def end_with_worker() -> None:
    """Get SIGTERM when the Prefect worker that started this process dies, or at once if it has.

    A dead worker's child is init's; a worker that is a container's init itself names Prefect.
    """
    parent = os.getppid()
    if parent == 1 and b"prefect" not in Path("/proc/1/cmdline").read_bytes():
        os.kill(os.getpid(), signal.SIGTERM)
    die_with_parent(parent, signal.SIGTERM)


def become_subreaper() -> None:
    """Have orphaned descendants become children of this process instead of init's."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")
