"""The process between a job and whoever wants it: nothing of the job outlives it.

    python -m tasks.supervisor SPEC      (tasks/torchrun.py starts it; SPEC is a `Spec` as JSON)

    owner (flow, dvc repro) --pipe--> supervisor --parent-death signal--> agent --same--> ranks

It is small and imports no torch, so it starts at once and can be killed by nothing that kills the
owner's process group. It holds the lock of the run directory, starts the agent, and waits for the
agent's exit, the end of the pipe (the owner died), SIGTERM or the deadline. Then it stops the
agent, kills whatever still carries the job's mark, and writes logs/attempt_K/exit.json:
{"reason": finished|failed|stopped|deadline|orphaned, "returncode", "failures", "survivors"}.
If it is itself killed, the kernel kills agent and ranks, and the next start sweeps the rest.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from algorithms.common.errors import InputError
from algorithms.common.files import read_json, write_json
from algorithms.common.stopping import on_signals
from tasks.jobs.entry import LOG_DIR
from tasks.prctl import become_subreaper, die_with_parent
from tasks.processes import RUN_DIR_MARK, sweep

POLL_S = 0.1
KILL_AFTER_S = 3.0
"""Beyond `stop_s`, in which the agent itself kills ranks that do not stop."""
ORPHAN_BUDGET_S = 14.5
"""From the owner's death to the end of the supervisor."""
ORPHAN_GRACE_S = 2.0
"""Part of it in which ranks may stop by themselves; the rest is for `on_orphaned`."""
ON_ORPHANED_S = 12.0


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One launch."""

    module: str
    run_dir: str
    ranks: int
    deadline_s: float
    stop_s: float
    owner: int
    """Pid of the process that holds the other end of our stdin."""
    on_orphaned: list[str]
    """Command to run when the owner has died and the job is gone; empty for none."""


class Owner:
    """Whether the owner still lives: it holds a pipe to our stdin, and it is our parent."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.died_at: float | None = None

    def check(self, wait_s: float) -> bool:
        """True when it is dead. Takes up to `wait_s` seconds to notice that it dies."""
        if self.died_at is not None:
            time.sleep(wait_s)
            return True
        ended, _, _ = select.select([sys.stdin], [], [], wait_s)
        if ended or os.getppid() != self.pid:  # a fork of the owner may keep the pipe open
            self.died_at = time.monotonic()
        return self.died_at is not None


def main(spec: Spec) -> int:
    """Run one launch to its end; the exit code for this process."""
    stop_requested = on_signals()
    signal.signal(signal.SIGHUP, lambda signum, frame: None)  # SIG_IGN would be inherited
    become_subreaper()
    owner = Owner(spec.owner)
    try:
        lock = take_lock(Path(spec.run_dir))
        survivors = sweep(Path(spec.run_dir))
        if survivors:
            raise InputError(f"{spec.run_dir}: processes {survivors} of an earlier start live on")
        log_dir = next_attempt(Path(spec.run_dir))
    except (InputError, OSError) as error:
        answer({"error": str(error)})
        return 2
    answer({"log_dir": str(log_dir)})
    with (log_dir / "agent.log").open("ab", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)

    agent = start_agent(spec, log_dir)
    reason = watch(agent, spec, owner, stop_requested)
    returncode = agent.returncode
    survivors = clean_up(spec)
    shutil.rmtree(log_dir / "elastic", ignore_errors=True)
    if returncode == 0:
        reason = "finished"
    failures = log_dir / "failures.json"
    outcome = {
        "reason": reason,
        "returncode": returncode,
        "failures": read_json(failures) if failures.exists() else [],
        "survivors": survivors,
    }
    write_json(log_dir / "exit.json", outcome)
    if owner.check(0) and spec.on_orphaned:
        tell_orphaned(spec, owner)
    os.close(lock)
    return 0


def take_lock(run_dir: Path) -> int:
    """Lock `run_dir` for the life of this process; the open file.

    The lock is the kernel's, so a dead holder leaves none behind, and the descriptor is closed on
    exec, so an orphaned rank cannot keep it. Raises `InputError` when another process holds it; if
    that one is only cleaning up after a dead owner, waits until it is done.
    """
    path = run_dir / ".lock"
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    give_up = time.monotonic() + ORPHAN_BUDGET_S + 2 * KILL_AFTER_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder, owner = (path.read_text().split() + ["?", "?"])[:2]
            orphaned = owner.isdigit() and not psutil.pid_exists(int(owner))
            if not orphaned or time.monotonic() > give_up:
                raise InputError(f"{run_dir}: already in use by process {holder}") from None
            time.sleep(POLL_S)
        else:
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()} {os.getppid()}\n".encode(), 0)
            return lock


def attempts(run_dir: Path) -> dict[int, Path]:
    """Folders logs/attempt_K by K, ascending."""
    named = {path.name.removeprefix("attempt_"): path for path in run_dir.glob("logs/attempt_*")}
    return dict(sorted((int(k), path) for k, path in named.items() if k.isdecimal()))


def next_attempt(run_dir: Path) -> Path:
    """Make and return logs/attempt_K for the next free K, from 1."""
    log_dir = run_dir / "logs" / f"attempt_{max(attempts(run_dir), default=0) + 1}"
    log_dir.mkdir(parents=True)
    return log_dir


def answer(message: dict[str, str]) -> None:
    """The one line that the owner reads from our stdout."""
    with contextlib.suppress(BrokenPipeError):  # it has died; `Owner.check` will say so
        print(json.dumps(message), flush=True)


def start_agent(spec: Spec, log_dir: Path) -> subprocess.Popen[bytes]:
    """Start torchrun's agent in a session of its own, to be killed when we die."""
    torchrun = [
        "--standalone",  # a random free port
        *("--local-addr", "127.0.0.1"),  # else the host's name, which may resolve to nowhere
        *("--nproc-per-node", str(spec.ranks)),
        *("--shutdown-timeout", str(math.ceil(spec.stop_s))),
        *("--log-dir", str(log_dir / "elastic")),
        *("-m", spec.module, str(Path(spec.run_dir, "config.json"))),
    ]
    me = os.getpid()
    return subprocess.Popen(
        [sys.executable, "-m", "tasks.agent", str(log_dir / "failures.json"), "--", *torchrun],
        env={**os.environ, RUN_DIR_MARK: spec.run_dir, LOG_DIR: str(log_dir)},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: die_with_parent(me),
    )


def watch(
    agent: subprocess.Popen[bytes], spec: Spec, owner: Owner, stop_requested: Callable[[], bool]
) -> str:
    """Wait for the agent's end, and bring it about when it is time. Returns the reason."""
    deadline = time.monotonic() + spec.deadline_s
    reason, kill_at = "", math.inf
    while agent.poll() is None:
        owner_died = owner.check(POLL_S)
        now = time.monotonic()
        if not reason and (owner_died or stop_requested() or now > deadline):
            reason = "orphaned" if owner_died else "stopped" if stop_requested() else "deadline"
            print(f"supervisor: {reason}, stopping the job", flush=True)
            agent.terminate()
            kill_at = now + spec.stop_s + KILL_AFTER_S
        if owner.died_at is not None:
            kill_at = min(kill_at, owner.died_at + ORPHAN_GRACE_S)
        if now > kill_at:
            agent.kill()
        if now > kill_at + KILL_AFTER_S:  # stuck in the kernel; `clean_up` reports it
            break
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    if not reason and agent.returncode in {code for s in signals for code in (128 + s, -s)}:
        reason = "stopped"  # somebody else asked the agent to
    return reason or "failed"


def clean_up(spec: Spec) -> list[int]:
    """Kill and reap whatever the job left; the pids that could not be killed."""
    survivors = sweep(Path(spec.run_dir))
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return survivors


def tell_orphaned(spec: Spec, owner: Owner) -> None:
    """Run the `on_orphaned` command in what is left of the time."""
    assert owner.died_at is not None
    left = owner.died_at + ORPHAN_BUDGET_S - time.monotonic()
    marked = {**os.environ, RUN_DIR_MARK: spec.run_dir}  # so that `clean_up` finds what it leaves
    me = os.getpid()
    try:
        done = subprocess.run(
            spec.on_orphaned,
            env=marked,
            stdin=subprocess.DEVNULL,
            timeout=min(ON_ORPHANED_S, left),
            preexec_fn=lambda: die_with_parent(me),
        )
        print(f"supervisor: {spec.on_orphaned[0]} exited with {done.returncode}", flush=True)
    except subprocess.TimeoutExpired as error:
        print(f"supervisor: {error}", flush=True)
    clean_up(spec)


if __name__ == "__main__":
    sys.exit(main(Spec(**json.loads(sys.argv[1]))))
