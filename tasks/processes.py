"""Finding and killing all processes of a job by the marks in their environment.

torchrun gives every rank a session of its own, so no process group holds a job together. What does
are variables that children inherit and cannot shed by forking, by `setsid` or by losing their
parent. One names the job; another names its run directory, because a job id is a hash of what
decides the result: two clones of the project train the same job under the same id, and neither may
kill the other's.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import psutil

MARK = "SHOESTRING_JOB"
"""Environment variable of supervisor, agent, ranks and their children: the job id."""
RUN_DIR_MARK = "SHOESTRING_RUN_DIR"
"""The same without the supervisor: the run directory, resolved."""

POLL_S = 0.02


def alive(job_id: str) -> list[int]:
    """Pids of the processes of job `job_id`, its supervisor included, the caller and zombies not.

    Processes of other users cannot be read and are not found.
    """
    return [process.pid for process in _marked(MARK, job_id)]


def sweep(run_dir: Path, *, timeout_s: float = 5.0) -> list[int]:
    """SIGKILL the processes of the job in `run_dir` until none is left; for the lock's holder.

    Supervisors live on: one may be waiting for its turn. Returns the pids that still live after
    `timeout_s` seconds: stuck in the kernel (state D).
    """
    give_up = time.monotonic() + timeout_s
    while True:
        # Listed again each time: one may have forked between the listing and its death.
        found = _marked(RUN_DIR_MARK, str(run_dir.resolve()))
        if not found or time.monotonic() > give_up:
            return [process.pid for process in found]
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(POLL_S)


def _marked(mark: str, value: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(mark) == value and process.pid != os.getpid():
                found.append(process)
    return found
