"""One round of the kill matrix: start a job, strike at a moment, look 20 seconds later, resume.

A moment is drawn from one of three spans: during a checkpoint write, before the first checkpoint,
or all the time from launch to exit. For kinds that hit a part of a job, launch is that part's.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import psutil

from benchmarks.fault_arena import EVERY, STEPS, Arena, Flow, Outcome, Route

Span = Literal["write", "before", "any"]
SPANS: tuple[Span, ...] = ("write", "before", "any", "any")
"""In turn: a quarter during a write, a quarter before the first."""
PATIENCE_S = 20.0
"""After which nothing of a job may live."""
DEADLINE_S = 3.0
"""Of the kind `deadline`; its ranks take longer to start."""
POLL_S = 0.002
"""Between two looks: a checkpoint of the tiny job is written in an instant."""
TRIES = 8
"""A job that had ended before its moment came is started again, with another moment."""

STUBBORN = """\
import os
import signal

if "RANK" in os.environ:  # a rank on which SIGTERM is lost
    register = signal.signal
    register(signal.SIGTERM, signal.SIG_IGN)

    def deaf(number, handler):
        return None if number == signal.SIGTERM else register(number, handler)

    signal.signal = deaf
"""
"""A sitecustomize.py: imported by every Python before anything else."""


@dataclass(frozen=True)
class Kind:
    """One way in which a job comes to its end too early."""

    route: Route
    part: Literal["flow", "supervisor", "agent", "rank"]
    """What is hit; moments count from its start."""
    strike: Callable[[Arena, Flow, random.Random], bool]
    """Do it; False if there is nothing left to hit."""


def _cancel(arena: Arena, flow: Flow, generator: random.Random) -> bool:
    flow.cancel()
    return True


def _interrupt(arena: Arena, flow: Flow, generator: random.Random) -> bool:
    assert flow.process is not None
    os.killpg(flow.process.pid, signal.SIGINT)  # as a terminal does
    return True


def _signal(number: signal.Signals) -> Callable[[Arena, Flow, random.Random], bool]:
    def strike(arena: Arena, flow: Flow, generator: random.Random) -> bool:
        assert flow.process is not None
        flow.process.send_signal(number)
        return True

    return strike


def _kill_worker(arena: Arena, flow: Flow, generator: random.Random) -> bool:
    assert arena.worker is not None
    arena.worker.kill()
    arena.worker.wait()
    return True


def _hit(part: str, number: signal.Signals) -> Callable[[Arena, Flow, random.Random], bool]:
    def strike(arena: Arena, flow: Flow, generator: random.Random) -> bool:
        found = flow.members(part)
        try:
            generator.choice(found).send_signal(number)
        except (IndexError, psutil.NoSuchProcess):
            return False
        return True

    return strike


KINDS: Mapping[str, Kind] = {
    "cancel": Kind("deployment", "flow", _cancel),
    "sigint": Kind("prefect", "flow", _interrupt),
    "sigterm": Kind("prefect", "flow", _signal(signal.SIGTERM)),
    "kill_flow": Kind("prefect", "flow", _signal(signal.SIGKILL)),
    "kill_worker": Kind("deployment", "flow", _kill_worker),
    "kill_agent": Kind("plain", "agent", _hit("agent", signal.SIGKILL)),
    "kill_rank": Kind("plain", "rank", _hit("rank", signal.SIGKILL)),
    "stubborn": Kind("plain", "flow", _signal(signal.SIGTERM)),
    # The supervisor is held up from its start on, and finds its deadline passed at the moment.
    "deadline": Kind("plain", "supervisor", _hit("supervisor", signal.SIGCONT)),
}


@dataclass(frozen=True)
class Quiet:
    """Seconds from launch in a run that nobody disturbs."""

    parts: Mapping[str, float]
    """When each part starts."""
    writes: tuple[float, float]
    """When the first checkpoint begins to be written, and for how long one is."""
    end: float

    def by(self, end: float) -> Quiet:
        """The same of a run that took until `end`: a machine is not always equally busy."""
        faster = min(end / self.end, 1.0)
        parts = {name: seconds * faster for name, seconds in self.parts.items()}
        first, lasts = self.writes
        return Quiet(parts, (first * faster, lasts * faster), self.end * faster)


@dataclass(frozen=True)
class Verdict:
    """What one round found."""

    moment_s: float
    """From launch."""
    in_write: bool
    before_first: bool
    gone_s: float
    """Until no process lived and every run had ended; PATIENCE_S if they never did."""
    orphans: int
    wrong_status: int
    reconcile_needed: int
    resume_mismatch: int
    duplicate_steps: int


def watch_quietly(arena: Arena, route: Route) -> tuple[Quiet, Outcome]:
    """Run the job to its end by `route`; its times, and what every other run must equal."""
    arena.forget()
    flow = Flow(arena, route)
    parts = {"flow": 0.0}
    write = [0.0, 0.0]
    signs = {"supervisor": "logs/attempt_*", "agent": "logs/*/agent.log", "rank": "logs/*/rank_*"}
    asked = 0.0
    while True:
        now = time.monotonic()
        for part, sign in signs.items():
            if part not in parts and any(arena.root.glob(f"runs/pretrain_lordo/ddp/*/{sign}")):
                parts[part] = now - flow.began
        writing = arena.writing(step=EVERY)
        if writing and not write[0]:
            write[0] = now - flow.began
        if write[0] and not writing and not write[1]:
            write[1] = now - flow.began - write[0]
        if now > asked + 0.2:
            asked = now
            if flow.ended():
                break
        time.sleep(POLL_S)
    outcome = arena.outcome()
    steps = [row["step"] for row in outcome[1]]
    if steps != list(range(1, STEPS + 1)):
        raise RuntimeError(f"an undisturbed job by route {route} logged {steps}")
    return Quiet(parts, (write[0], write[1]), time.monotonic() - flow.began), outcome


class Rounds:
    """Rounds in one arena, whose services run. Each route is first watched undisturbed."""

    def __init__(self, arena: Arena, seed: int = 0) -> None:
        self.arena = arena
        self.generator = random.Random(seed)
        self.quiet: dict[Route, Quiet] = {}
        self.expected: Outcome = ("", [])
        prepared = arena.flows("prepare", "--plain")
        if prepared.returncode != 0:
            raise RuntimeError(prepared.stderr)

    def play(self, name: str, span: Span) -> Verdict:
        """One round. Raises `RuntimeError` if the job could not be caught alive."""
        arena, kind = self.arena, KINDS[name]
        if kind.route not in self.quiet:
            self.quiet[kind.route], self.expected = watch_quietly(arena, kind.route)
        before, flow, caught = self._strike(kind, span)
        gone_s = _await_end(arena, flow, kind, before)
        orphans = arena.strays()
        for process in orphans:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        flow.forget()
        wrong_status, reconcile_needed = _judge_status(arena, before)
        if arena.worker is not None and arena.worker.poll() is not None:
            arena.start_worker()
        mismatch, twice = _resume(arena, before, self.expected)
        return Verdict(
            *caught, gone_s, len(orphans), wrong_status, reconcile_needed, mismatch, twice
        )

    def _strike(self, kind: Kind, span: Span) -> tuple[float, Flow, tuple[float, bool, bool]]:
        """Start the job and strike: when it began, the job, and at which moment it was struck."""
        arena, generator = self.arena, self.generator
        for _ in range(TRIES):
            arena.forget()
            before = time.time()
            flow = _start(arena, kind)
            quiet = self.quiet[kind.route]
            if _await_moment(arena, flow, kind, span, quiet, generator):
                moment_s, in_write = time.monotonic() - flow.began, arena.writing()
                first = arena.written() == 0
                if kind.strike(arena, flow, generator):
                    return before, flow, (moment_s, in_write, first)
            flow.wait()
            self.quiet[kind.route] = quiet.by(time.monotonic() - flow.began)
        raise RuntimeError(f"{kind}: not caught alive in {TRIES} tries")


def _start(arena: Arena, kind: Kind) -> Flow:
    if kind is KINDS["stubborn"]:
        folder = arena.root / "stubborn"
        folder.mkdir(exist_ok=True)
        (folder / "sitecustomize.py").write_text(STUBBORN)
        return Flow(arena, kind.route, PYTHONPATH=str(folder))
    if kind is not KINDS["deadline"]:
        return Flow(arena, kind.route)
    flow = Flow(arena, kind.route, "--set", f"launch.deadline_minutes={DEADLINE_S / 60}")
    while not flow.members("agent") and not flow.ended():
        time.sleep(POLL_S)
    for supervisor in flow.members("supervisor"):
        supervisor.suspend()
    return flow


def _await_moment(
    arena: Arena, flow: Flow, kind: Kind, span: Span, quiet: Quiet, generator: random.Random
) -> bool:
    """Wait for a moment of `span`; False if the job ended before it came."""
    launch, (first, lasts) = quiet.parts[kind.part], quiet.writes
    step = generator.choice(range(EVERY, STEPS + 1, EVERY))
    at = generator.uniform(launch, first if span == "before" else quiet.end)

    def due(now: float) -> bool:
        if span == "write":
            return arena.writing(step) or arena.written() >= step
        return now >= at or (span == "before" and arena.writing())

    asked = 0.0
    while not due(now := time.monotonic() - flow.began):
        if now > asked + 0.5:
            asked = now
            if flow.ended():
                return False
        time.sleep(POLL_S)
    if span == "write":
        time.sleep(generator.uniform(0, lasts / 2))
    while kind.part in ("agent", "rank") and not flow.members(kind.part):  # slower than before
        if flow.ended():
            return False
    return not flow.ended()


def _await_end(arena: Arena, flow: Flow, kind: Kind, before: float) -> float:
    """Seconds until no process lives and every run has ended, at most `PATIENCE_S`."""
    began = time.monotonic()
    while (waited := time.monotonic() - began) < PATIENCE_S:
        # Without a worker nobody tells Prefect how the flow run ended.
        told = kind is KINDS["kill_worker"] or flow.ended()
        if told and not arena.strays() and "RUNNING" not in _statuses(arena, before):
            return waited
        time.sleep(0.2)
    return PATIENCE_S


def _statuses(arena: Arena, before: float) -> list[str]:
    """Of all MLflow runs since `before`, that of the flow and that of its arm."""
    sql = f"SELECT status FROM runs WHERE start_time >= {int(before * 1000)}"
    return [status for (status,) in arena.mlflow(sql)]


def _judge_status(arena: Arena, before: float) -> tuple[int, int]:
    """How many runs say what is not so, even after the next start; and 1 if it needs that start."""
    needed = "RUNNING" in _statuses(arena, before)
    if needed:
        code = (
            "import flows; from tasks import tracking as t; t.sync_pending(); print(t.reconcile())"
        )
        done = arena.execute("./run", "-c", code)
        if done.returncode != 0:
            raise RuntimeError(done.stdout + done.stderr)
    allowed = {"FAILED", "KILLED", "FINISHED"} if arena.finished() else {"FAILED", "KILLED"}
    wrong = [status for status in _statuses(arena, before) if status not in allowed]
    return len(wrong), int(needed)


def _resume(arena: Arena, before: float, expected: Outcome) -> tuple[int, int]:
    """Start again to the end: 1 if the outcome is another, and how many steps came twice."""
    again = arena.execute("./run", "-m", "flows", "pretrain", "--arm", "ddp", "--plain")
    if again.returncode != 0:
        print(again.stdout[-2000:] + again.stderr[-2000:])
    rows = arena.outcome()[1]
    logged = [row["step"] for row in rows]
    since = f"run_uuid IN (SELECT run_uuid FROM runs WHERE start_time >= {int(before * 1000)})"
    twice = arena.mlflow(
        f"SELECT key, step FROM metrics WHERE {since} GROUP BY run_uuid, key, step "
        "HAVING COUNT(*) > 1"
    )
    sent = arena.mlflow(
        f"SELECT step, value FROM metrics WHERE key = 'train/loss' AND {since} ORDER BY step"
    )
    whole = sent == [(row["step"], row["train/loss"]) for row in expected[1]]
    same = again.returncode == 0 and arena.outcome() == expected and whole
    return int(not same), len(twice) + len(logged) - len({*logged})
