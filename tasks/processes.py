"""Finding and killing all processes of a job by the mark in their environment.

torchrun gives every rank a session of its own, so no process group holds a job together. What does
is a variable that children inherit and cannot shed by forking, by `setsid` or by losing their
parent: SHOESTRING_JOB=<job id>.
"""

from __future__ import annotations

import contextlib
import os
import time

import psutil

MARK = "SHOESTRING_JOB"
"""Environment variable of the agent, the ranks and their children: the job id."""
SUPERVISOR_MARK = "SHOESTRING_SUPERVISOR"
"""The same for supervisors, which are not swept: one that waits for its turn must live."""

POLL_S = 0.02


def alive(job_id: str) -> list[int]:
    """Pids of the processes of job `job_id`, its supervisor included, the caller and zombies not.

    Processes of other users cannot be read and are not found.
    """
    return [process.pid for process in _marked(job_id, MARK, SUPERVISOR_MARK)]


def sweep(job_id: str, *, timeout_s: float = 5.0) -> list[int]:
    """SIGKILL the processes of a job, but for supervisors and the caller, until none is left.

    Returns the pids that still live after `timeout_s` seconds: stuck in the kernel (state D).
    """
    give_up = time.monotonic() + timeout_s
    while True:
        # Listed again each time: one may have forked between the listing and its death.
        found = _marked(job_id, MARK)
        if not found or time.monotonic() > give_up:
            return [process.pid for process in found]
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(POLL_S)


def _marked(job_id: str, *marks: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            environment = process.environ()
            if job_id in map(environment.get, marks) and process.pid != os.getpid():
                found.append(process)
    return found
