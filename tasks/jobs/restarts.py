"""Elastic jobs: the process that torchrun starts for a rank starts the worker, again if it dies.

    agent --> rank (this module, no torch) --> worker (the job's `run`)

torchrun ends the whole job when one of its processes dies. So under `elastic` that process is a
thin parent which lives on: it runs the same command as a child, passes signals on, and starts the
child again when it was killed or crashed. What an error of ours says (bad input, a loss that is not
finite, a stop) would only be said again: then, and after the last restart, the parent ends as its
child did. Mark, log and error file are the same for both; the kernel kills the child with its
parent, and the parent with torchrun's agent.

A worker that is stalled when the others have finished, which result.json beside the config tells,
is killed after a while; the job is done without it.

    entry.main(restarts.restarting(run, elastic=lambda config: config["arm"]["elastic"]))
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from tasks.jobs.entry import AGENT, KNOWN, LOG_DIR

WORKER = "SHOESTRING_WORKER"
"""Environment variable of a worker: how often its rank has been started before."""
RESTARTS = 4
"""Of one rank in one attempt."""
RESULT = "result.json"
"""What the job writes last, beside its config."""
LINGER_S = 30.0
"""For a worker to end once that is there."""
POLL_S = 0.5
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def restarting(
    run: Callable[[Path], None], elastic: Callable[[dict[str, Any]], bool]
) -> Callable[[Path], None]:
    """What `entry.main` should call in place of `run`: `run` itself in a worker and wherever
    `elastic(config)` is false, else a parent's work."""

    def watched(config_path: Path) -> None:
        if WORKER not in os.environ and _wants(elastic, config_path):
            _end_as(_watch(config_path.with_name(RESULT)))
        else:
            run(config_path)

    return watched


def _wants(elastic: Callable[[dict[str, Any]], bool], config_path: Path) -> bool:
    try:
        return elastic(json.loads(config_path.read_text(encoding="utf-8")))
    except (OSError, ValueError, LookupError, TypeError):
        return False  # `run` will say what is wrong with it


def _watch(result: Path) -> int:
    """Run workers until one ends for good, or the job writes its `result` and the worker does not
    end; the return code, as of `Popen`."""
    before = _written(result)
    worker: subprocess.Popen[bytes] | None = None
    stopping: int | None = None

    def forward(number: int, frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = number
        if worker is not None and worker.returncode is None:
            worker.send_signal(number)

    for number in FORWARDED:
        signal.signal(number, forward)
    final = {0, *(code for _, code in KNOWN.values())}
    rank = os.environ.get("RANK", "0")
    for start in range(RESTARTS + 1):
        worker = subprocess.Popen(
            _command(), env={**os.environ, AGENT: str(os.getpid()), WORKER: str(start)}
        )
        if stopping is not None:  # it arrived before there was a worker
            worker.send_signal(stopping)
        ended = _wait(worker, lambda: _written(result) not in (before, None))
        if ended is None:
            print(f"rank {rank}: worker {worker.pid} is stalled, but the job is done; killed")
            worker.kill()
            worker.wait()
            return 0
        code = ended
        if code in final or stopping is not None:
            return code
        manner = f"was killed by {_name(-code)}" if code < 0 else f"exited with code {code}"
        if start == RESTARTS:
            print(f"rank {rank}: worker {worker.pid} {manner}; it was the last of {start + 1}")
        else:
            print(f"rank {rank}: worker {worker.pid} {manner}; start {start + 2} of {RESTARTS + 1}")
            _forget_error(rank)
        sys.stdout.flush()
    return code


def _wait(worker: subprocess.Popen[bytes], done: Callable[[], bool]) -> int | None:
    """The return code of `worker`; None if it goes on for `LINGER_S` after the job is `done`."""
    give_up = math.inf
    while time.monotonic() < give_up:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return worker.wait(POLL_S)
        if give_up == math.inf and done():
            give_up = time.monotonic() + LINGER_S
    return None


def _written(path: Path) -> int | None:
    """When, in nanoseconds; None: not yet."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


def _command() -> list[str]:
    """How this process was started."""
    spec = sys.modules["__main__"].__spec__
    program = ["-m", spec.name] if spec is not None else sys.argv[:1]
    return [sys.executable, *program, *sys.argv[1:]]


def _forget_error(rank: str) -> None:
    """An error that a restart followed is not what the rank ends with."""
    if LOG_DIR in os.environ:
        Path(os.environ[LOG_DIR], f"rank_{rank}.error.json").unlink(missing_ok=True)


def _end_as(code: int) -> None:
    """End this process as its child ended, whose error file stays as it is."""
    sys.stdout.flush()
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    if code != 0:
        os._exit(code)


def _name(number: int) -> str:
    known = {int(each): each.name for each in signal.Signals}
    return known.get(number, f"signal {number}")
