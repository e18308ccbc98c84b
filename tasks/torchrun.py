"""Running one job under torchrun: start, watch, stop, and say which rank failed and why.

    run_job -> tasks/supervisor.py -> tasks/agent.py (torchrun) -> ranks of tasks/jobs/NAME.py

`run_job` blocks in the thread that calls it. Whatever ends it (a result, an error, Ctrl-C, a cancel
from Prefect, SIGKILL) no process of the job is left; tasks/supervisor.py sees to that. What the
ranks print goes to logs/attempt_K/rank_N.log of the run directory, which is only ever read here:
ranks that wrote into a pipe would die with their reader.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from algorithms.common.errors import InputError, Preempted
from algorithms.common.files import read_json
from tasks.follower import Follower
from tasks.paths import PROJECT
from tasks.processes import MARK, sweep
from tasks.slots import VISIBLE, Slots
from tasks.supervisor import Spec

POLL_S = 0.2
STOP_MARGIN_S = 10.0
"""What the supervisor may take beyond `stop_s` before it is killed."""
LINES_PER_TICK = 50
TAIL_LINES = 20
FULL_BYTES = 65_536
"""A disk with less is taken to be full."""

logger = logging.getLogger(__name__)


class JobFailed(RuntimeError):
    """A rank died, or the agent did. The message ends with the last lines of its log."""

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        exitcode: int | None = None,
        signal: str | None = None,
        tail: str = "",
    ) -> None:
        super().__init__(message)
        self.rank = rank
        """None: no rank failed by itself; the agent or the supervisor was killed."""
        self.exitcode = exitcode
        self.signal = signal
        """Name of the signal that killed it, such as SIGKILL."""
        self.tail = tail
        """The last 20 lines of the rank's log, or of agent.log."""


class JobStopped(Preempted):
    """The job was asked to stop before its end; the next start resumes."""


class DeadlineExceeded(JobStopped):
    """The job was stopped because it took too long; the next start resumes."""


class Terminated(SystemExit):
    """This process got SIGTERM or SIGHUP while it waited for a job; exit code 128 + signal."""


def run_job(
    module: str,
    run_dir: Path,
    *,
    ranks: int,
    job_id: str,
    deadline_s: float,
    stop_s: float,
    on_tick: Callable[[], None] | None = None,
    on_log: Callable[[str], None] | None = None,
    on_orphaned: list[str] | None = None,
    slots: Slots | None = None,
) -> None:
    """Run `module` on `ranks` processes with `run_dir`/config.json, which the caller has written.

    The ranks share the cores out, by OMP_NUM_THREADS. After `deadline_s` seconds the job is
    stopped; ranks then have `stop_s` seconds to write a checkpoint. `on_tick` is called about five
    times a second and once after the end; `on_log` gets the lines of rank 0. An exception from
    either, or raised in this thread from outside, stops the job and is passed on. `on_orphaned` is
    a command to run when this process is killed, once the job is gone. `slots` are the GPUs it may
    use; they stay taken until its last process is gone.

    Raises `InputError` (also when another process holds `run_dir`), `JobFailed`, `JobStopped` when
    the job was stopped by others and `DeadlineExceeded`. In the main thread, unless a handler is
    installed, SIGTERM and SIGHUP raise `Terminated` for the duration.
    """
    run_dir = run_dir.resolve()
    spec = Spec(
        module=module,
        run_dir=str(run_dir),
        ranks=ranks,
        deadline_s=deadline_s,
        stop_s=stop_s,
        owner=os.getpid(),
        on_orphaned=on_orphaned or [],
    )
    with _signals_raise():
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "tasks.supervisor", json.dumps(dataclasses.asdict(spec))],
            cwd=PROJECT,
            env=_environment(job_id, ranks, slots),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=slots.locks if slots else (),
            start_new_session=True,
        )
        log_dir = None
        try:
            log_dir = _wait_for_start(supervisor)
            log = Follower(log_dir / "rank_0.log")
            running = True
            while running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    supervisor.wait(POLL_S)
                    running = False
                if on_log is not None:
                    _forward(log, on_log)
                if on_tick is not None:
                    on_tick()
        finally:
            try:
                _end(supervisor, stop_s)
            finally:
                if log_dir is not None:  # else the run directory is not ours
                    _sweep(run_dir)
    _check(log_dir, supervisor.returncode, module, deadline_s)


def _environment(job_id: str, ranks: int, slots: Slots | None) -> dict[str, str]:
    path = [str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(threads(ranks)),
        MARK: job_id,
        **({VISIBLE: ",".join(slots.devices)} if slots else {}),
    }


def threads(ranks: int) -> int:
    """Threads of a rank when `ranks` share the cores out; sums depend on it in their last bits."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into `Terminated`, where they would else kill this process at once.

    A handler that is there already, such as Prefect's, raises by itself and stays; so does SIG_IGN
    (nohup). SIGINT raises KeyboardInterrupt in any Python process.
    """

    def stop(signum: int, frame: FrameType | None) -> None:
        raise Terminated(128 + signum)

    taken = []
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, stop)
                taken.append(number)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _wait_for_start(supervisor: subprocess.Popen[bytes]) -> Path:
    """The folder of this attempt's logs, as the supervisor says; `InputError` if it refuses."""
    assert supervisor.stdout is not None
    while not select.select([supervisor.stdout], [], [], POLL_S)[0]:
        pass  # not in one blocking read: an exception from another thread arrives between calls
    line = supervisor.stdout.readline()
    if not line:
        raise JobFailed(f"the supervisor ended with {supervisor.wait()} before it started the job")
    answer = json.loads(line)
    if "error" in answer:
        raise InputError(answer["error"])
    return Path(answer["log_dir"])


def _forward(log: Follower, on_log: Callable[[str], None]) -> None:
    """Call `on_log` for each new line; beyond 50, only say how many more there are."""
    lines = list(log.lines())
    for line in lines[:LINES_PER_TICK]:
        on_log(line)
    if len(lines) > LINES_PER_TICK:
        on_log(f"... {len(lines) - LINES_PER_TICK} more lines in {log.path}")


def _end(supervisor: subprocess.Popen[bytes], stop_s: float) -> None:
    """Wait until the supervisor is gone; it is asked to stop the job if it still runs."""
    try:
        if supervisor.poll() is None:
            supervisor.terminate()
            supervisor.wait(stop_s + STOP_MARGIN_S)
    except subprocess.TimeoutExpired:
        logger.error("supervisor %d does not stop; killing it", supervisor.pid)
    finally:  # also on a second Ctrl-C, which means: at once
        supervisor.kill()
        supervisor.wait()
        for pipe in (supervisor.stdin, supervisor.stdout):
            assert pipe is not None
            pipe.close()


def _sweep(run_dir: Path) -> None:
    """Kill what is left; there is something only if the supervisor was killed."""
    survivors = sweep(run_dir)
    if survivors:
        logger.error("processes %s of the job in %s cannot be killed", survivors, run_dir)


def _check(log_dir: Path, supervisor_code: int, module: str, deadline_s: float) -> None:
    """Raise unless the job finished."""
    path = log_dir / "exit.json"
    if not path.exists():
        _require_space(log_dir)
        tail = _tail(log_dir / "agent.log")
        raise JobFailed(
            f"the supervisor of {module} {_manner(supervisor_code)}; {log_dir}:\n{tail}", tail=tail
        )
    outcome = read_json(path)
    if outcome["survivors"]:
        raise JobFailed(f"{module}: processes {outcome['survivors']} cannot be killed; {log_dir}")
    if outcome["reason"] == "deadline":
        raise DeadlineExceeded(
            f"{module}: stopped at its deadline of {deadline_s / 60:g} minutes, "
            f"the next start resumes; {log_dir}"
        )
    if outcome["reason"] == "failed":
        _raise_failure(outcome, log_dir, module)
    if outcome["reason"] != "finished":
        raise JobStopped(f"{module}: stopped before its end, the next start resumes; {log_dir}")


def _raise_failure(outcome: dict[str, Any], log_dir: Path, module: str) -> None:
    """Raise what the first failure of exit.json stands for."""
    if not outcome["failures"]:
        _require_space(log_dir)
        tail, code = _tail(log_dir / "agent.log"), outcome["returncode"]
        raise JobFailed(
            f"{module}: the torchrun agent {_manner(code)}; {log_dir / 'agent.log'} ends with:\n"
            f"{tail}",
            exitcode=code,
            signal=_signal_name(code),
            tail=tail,
        )
    first = outcome["failures"][0]
    if first["kind"] == "input":
        raise InputError(first["message"])
    if first["kind"] == "preempted":
        raise JobStopped(f"{module}: {first['message']}")
    _require_space(log_dir)
    log = log_dir / f"rank_{first['rank']}.log"
    if not log.exists() or log.stat().st_size == 0:
        log = log_dir / "agent.log"
    tail, said = _tail(log), f" ({first['message']})" if first["message"] else ""
    raise JobFailed(
        f"{module}: rank {first['rank']} {_manner(first['exitcode'])}{said}; {log} ends with:\n"
        f"{tail}",
        rank=first["rank"],
        exitcode=first["exitcode"],
        signal=first["signal"],
        tail=tail,
    )


def _require_space(folder: Path) -> None:
    """Raise `InputError` where the disk is full: who failed may have had no room to say so."""
    if shutil.disk_usage(folder).free < FULL_BYTES:
        raise InputError(f"{folder}: {os.strerror(errno.ENOSPC)}")


def _manner(code: int | None) -> str:
    """How a process with this return code ended."""
    name = _signal_name(code)
    return f"was killed by {name}" if name else f"exited with code {code}"


def _signal_name(code: int | None) -> str | None:
    if code is None or code >= 0:
        return None
    number = -code
    known = {int(s): s.name for s in signal.Signals}
    return known.get(number, f"signal {number}")


def _tail(path: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a file, from its last 64 KiB; empty if there is none."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 65536))
        text = file.read().decode("utf-8", errors="replace")
    return "\n".join(text.splitlines()[-lines:])
