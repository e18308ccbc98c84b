"""Real jobs with every outcome; after each of them no process of the job is left."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from algorithms.common.errors import InputError
from algorithms.common.files import read_json
from tasks.paths import PROJECT
from tasks.processes import alive
from tasks.torchrun import DeadlineExceeded, JobFailed, JobStopped, Terminated, run_job
from tests.processes import command_line, living

START_S = 120
"""Patience for the start of a job on a busy machine."""


@pytest.fixture
def job_id() -> Iterator[str]:
    job_id = uuid.uuid4().hex
    yield job_id
    assert alive(job_id) == []


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "runs" / "a job"
    path.mkdir(parents=True)
    return path


def scripted(run_dir: Path, job_id: str, actions: list[str], **options: Any) -> None:
    """Run tests/jobs/scripted.py with one action per rank."""
    config = {str(rank): action for rank, action in enumerate(actions)}
    (run_dir / "config.json").write_text(json.dumps(config))
    options = {"deadline_s": START_S, "stop_s": 5, **options}
    run_job("tests.jobs.scripted", run_dir, ranks=len(actions), job_id=job_id, **options)


def ready(run_dir: Path, ranks: int = 2) -> bool:
    return all((run_dir / f"ready_{rank}").exists() for rank in range(ranks))


def eventually(condition: Callable[[], bool], timeout_s: float) -> None:
    give_up = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up, "did not come true"
        time.sleep(0.05)


def raise_when(condition: Callable[[], bool], error: BaseException) -> Callable[[], None]:
    """An `on_tick` that stands for a cancel from outside."""

    def tick() -> None:
        if condition():
            raise error

    return tick


def start_owner(run_dir: Path, job_id: str, actions: list[str], *on_orphaned: str) -> Any:
    """tests/jobs/owner.py with a running job."""
    config = {str(rank): action for rank, action in enumerate(actions)}
    (run_dir / "config.json").write_text(json.dumps(config))
    owner = subprocess.Popen(
        [sys.executable, "-m", "tests.jobs.owner", job_id, str(run_dir), *on_orphaned],
        cwd=PROJECT,
        stderr=subprocess.PIPE,
        text=True,
    )
    eventually(lambda: ready(run_dir) or owner.poll() is not None, START_S)
    assert ready(run_dir)
    return owner


def members(job_id: str, word: str) -> list[psutil.Process]:
    """Processes of the job with `word` in their command line."""
    return [each for each in living(alive(job_id)) if word in command_line(each)]


def send(number: int, job_id: str, word: str) -> None:
    """Send a signal to those `members`."""
    for process in members(job_id, word):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def exit_json(run_dir: Path, attempt: int = 1) -> dict[str, Any]:
    outcome: dict[str, Any] = read_json(run_dir / "logs" / f"attempt_{attempt}" / "exit.json")
    return outcome


def test_finished(run_dir: Path, job_id: str) -> None:
    (run_dir / "config.json").write_text('{"rounds": 3, "die": null}')
    lines: list[str] = []
    ticks: list[float] = []
    run_job(
        "tests.jobs.ring",
        run_dir,
        ranks=2,
        job_id=job_id,
        deadline_s=START_S,
        stop_s=5,
        on_tick=lambda: ticks.append(time.monotonic()),
        on_log=lines.append,
    )
    assert lines == ["step 0: 3.0", "step 1: 3.0", "step 2: 3.0"]
    assert len(ticks) > 3
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    for rank in range(2):
        facts = read_json(run_dir / f"sum_{rank}.json")
        assert facts == {"sum": 3.0, "threads": threads, "cwd": str(PROJECT)}
    assert exit_json(run_dir) == {
        "reason": "finished",
        "returncode": 0,
        "failures": [],
        "survivors": [],
    }
    logs = {path.name for path in (run_dir / "logs" / "attempt_1").iterdir()}
    assert logs == {"agent.log", "exit.json", "rank_0.log", "rank_1.log"}


def test_first_failing_rank_is_named_when_connections_break(run_dir: Path, job_id: str) -> None:
    (run_dir / "config.json").write_text('{"rounds": 100000, "die": 1}')
    with pytest.raises(JobFailed, match=r"(?s)rank 1 exited with code 9; .*step 0: 3.0$") as caught:
        run_job("tests.jobs.ring", run_dir, ranks=2, job_id=job_id, deadline_s=START_S, stop_s=5)
    assert (caught.value.rank, caught.value.exitcode, caught.value.signal) == (1, 9, None)
    assert caught.value.tail == "step 0: 3.0"


def test_input_error_and_the_next_attempt(run_dir: Path, job_id: str) -> None:
    with pytest.raises(InputError, match="^data/tokens: no such folder$"):
        scripted(run_dir, job_id, ["wait", "input data/tokens: no such folder"])
    assert exit_json(run_dir)["reason"] == "failed"
    # Its run directory is free again, and a flood of lines is cut short.
    lines: list[str] = []
    scripted(run_dir, job_id, ["print 3000"], on_log=lines.append)
    assert exit_json(run_dir, attempt=2)["reason"] == "finished"
    assert lines[:2] == ["rank 0: print 3000", "line 0"]
    assert sum("more lines in" in line for line in lines) >= 1
    assert len(lines) < 1000


def test_owner_killed(run_dir: Path, job_id: str, tmp_path: Path) -> None:
    note = tmp_path / "orphaned"
    tell = f"from pathlib import Path; Path({str(note)!r}).write_text('told')"
    owner = start_owner(run_dir, job_id, ["wait", "ignore"], sys.executable, "-c", tell)

    # Meanwhile a second start is refused at once, and the first one is left alone.
    began = time.monotonic()
    with pytest.raises(InputError, match=r"a job: already in use by process \d+$") as caught:
        scripted(run_dir, job_id, ["print 1"])
    assert time.monotonic() - began < 15  # whoever waits does so for 20
    assert str(members(job_id, "tasks.supervisor")[0].pid) in str(caught.value)
    assert len(members(job_id, "tests.jobs.scripted")) >= 2

    owner.kill()
    owner.communicate()
    eventually(lambda: alive(job_id) == [], timeout_s=30)
    assert note.read_text() == "told"
    assert exit_json(run_dir)["reason"] == "orphaned"


def test_cancel(run_dir: Path, job_id: str) -> None:
    """Any exception in the waiting thread stops the job, with time to write a checkpoint."""
    cancel = KeyError("cancelled")
    with pytest.raises(KeyError) as caught:
        scripted(
            run_dir,
            job_id,
            ["checkpoint", "checkpoint"],
            on_tick=raise_when(lambda: ready(run_dir), cancel),
        )
    assert caught.value is cancel
    assert alive(job_id) == []
    assert (run_dir / "checkpoint_0").exists() and (run_dir / "checkpoint_1").exists()
    assert exit_json(run_dir)["reason"] == "stopped"


def test_deadline(run_dir: Path, job_id: str) -> None:
    with pytest.raises(DeadlineExceeded, match=r"deadline of 0\.05 minutes"):
        scripted(run_dir, job_id, ["wait", "ignore"], deadline_s=3, stop_s=1)
    assert exit_json(run_dir)["reason"] == "deadline"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("action", "exitcode", "name", "text"),
    [
        ("exit 7", 7, None, "rank 1 exited with code 7 (SystemExit: 7)"),
        ("raise boom", 1, None, "rank 1 exited with code 1 (RuntimeError: boom)"),
        ("kill 9", -9, "SIGKILL", "rank 1 was killed by SIGKILL"),
        ("kill 11", -11, "SIGSEGV", "rank 1 was killed by SIGSEGV"),
        ("non_finite step 7: w is nan", 3, None, "rank 1 exited with code 3 (step 7: w is nan)"),
    ],
    ids=["exit", "raise", "sigkill", "sigsegv", "non_finite"],
)
def test_failure(
    run_dir: Path, job_id: str, action: str, exitcode: int, name: str | None, text: str
) -> None:
    with pytest.raises(JobFailed) as caught:
        scripted(run_dir, job_id, ["wait", action])
    error = caught.value
    assert (error.rank, error.exitcode, error.signal) == (1, exitcode, name)
    assert text in str(error) and str(error).endswith(error.tail)
    log = (run_dir / "logs" / "attempt_1" / "rank_1.log").read_text().splitlines()
    assert error.tail.splitlines() == log[-20:]


@pytest.mark.slow
def test_failure_beside_a_rank_that_ignores_sigterm(run_dir: Path, job_id: str) -> None:
    began = time.monotonic()
    with pytest.raises(JobFailed, match="rank 1 exited with code 1"):
        scripted(run_dir, job_id, ["ignore", "raise boom"], stop_s=2)
    assert time.monotonic() - began < 25  # torch's own patience is 30 s
    assert [f["rank"] for f in exit_json(run_dir)["failures"]] == [1, 0]


@pytest.mark.slow
def test_ranks_that_stop_by_themselves_are_resumable(run_dir: Path, job_id: str) -> None:
    def tick() -> None:
        if ready(run_dir):
            send(signal.SIGTERM, job_id, "-u -m tests.jobs.scripted")

    with pytest.raises(JobStopped, match="stopped at step 5"):
        scripted(run_dir, job_id, ["checkpoint", "checkpoint"], on_tick=tick)


@pytest.mark.slow
def test_ranks_that_ignore_sigterm_and_leave_children(run_dir: Path, job_id: str) -> None:
    cancel = KeyboardInterrupt()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        scripted(
            run_dir,
            job_id,
            ["ignore", "ignore"],
            stop_s=2,
            on_tick=raise_when(lambda: ready(run_dir), cancel),
        )
    assert alive(job_id) == []
    assert time.monotonic() - began < START_S
    scripted(run_dir, job_id, ["leave 0", "leave 0"])
    assert alive(job_id) == []


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["tasks.supervisor", "tasks.agent"])
def test_supervisor_or_agent_killed(run_dir: Path, job_id: str, victim: str) -> None:
    def tick() -> None:
        if ready(run_dir):
            send(signal.SIGKILL, job_id, victim)

    with pytest.raises(JobFailed, match="was killed by SIGKILL") as caught:
        scripted(run_dir, job_id, ["ignore", "wait"], on_tick=tick)
    assert caught.value.rank is None


@pytest.mark.slow
def test_owner_and_supervisor_killed_at_once(run_dir: Path, job_id: str) -> None:
    owner = start_owner(run_dir, job_id, ["ignore", "leave 600"])
    supervisor = members(job_id, "tasks.supervisor")[0]
    supervisor.suspend()
    owner.kill()
    supervisor.kill()
    owner.communicate()
    # Only what a rank had put aside is left, until the next start; the lock died with its holder.
    eventually(lambda: len(alive(job_id)) == 1, timeout_s=30)
    assert len(members(job_id, "sleep 600")) == 1
    scripted(run_dir, job_id, ["print 1"])


@pytest.mark.slow
def test_restart_right_after_the_owner_was_killed_waits_for_the_end(
    run_dir: Path, job_id: str
) -> None:
    owner = start_owner(run_dir, job_id, ["wait", "ignore"], "sleep", "3")
    owner.kill()
    owner.communicate()
    scripted(run_dir, job_id, ["print 1"])
    assert exit_json(run_dir)["reason"] == "orphaned"
    assert exit_json(run_dir, attempt=2)["reason"] == "finished"


@pytest.mark.slow
def test_signals_to_an_owner_without_handlers(run_dir: Path, job_id: str) -> None:
    expected = {signal.SIGTERM: 143, signal.SIGHUP: 129, signal.SIGINT: -signal.SIGINT}
    for attempt, (number, code) in enumerate(expected.items(), start=1):
        owner = start_owner(run_dir, job_id, ["checkpoint", "checkpoint"])
        owner.send_signal(number)
        owner.communicate(timeout=60)
        assert owner.returncode == code
        assert alive(job_id) == []
        assert exit_json(run_dir, attempt)["reason"] == "stopped"
        for rank in range(2):
            (run_dir / f"checkpoint_{rank}").unlink()
            (run_dir / f"ready_{rank}").unlink()


@pytest.mark.slow
def test_signal_handlers_come_and_go(run_dir: Path, job_id: str) -> None:
    def kill_self() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with pytest.raises(Terminated) as caught:
        scripted(run_dir, job_id, ["wait"], on_tick=kill_self)
    assert caught.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    def handler(signum: int, frame: object) -> None:
        raise TimeoutError("a handler like Prefect's")

    signal.signal(signal.SIGTERM, handler)
    try:
        with pytest.raises(TimeoutError):
            scripted(run_dir, job_id, ["wait"], on_tick=kill_self)
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.mark.slow
def test_two_jobs_at_once(tmp_path: Path, job_id: str) -> None:
    errors: list[BaseException] = []

    def launch(name: str) -> None:
        run_dir = tmp_path / name
        run_dir.mkdir()
        (run_dir / "config.json").write_text('{"rounds": 20, "die": null}')
        try:
            run_job(
                "tests.jobs.ring",
                run_dir,
                ranks=2,
                job_id=f"{job_id}-{name}",
                deadline_s=START_S,
                stop_s=5,
            )
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=launch, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for name in ("a", "b"):
        assert read_json(tmp_path / name / "sum_0.json")["sum"] == 3.0
        assert alive(f"{job_id}-{name}") == []


def test_run_directory_that_does_not_exist(tmp_path: Path, job_id: str) -> None:
    missing = tmp_path / "none"
    with pytest.raises(InputError, match="none/.lock"):
        run_job("tests.jobs.ring", missing, ranks=1, job_id=job_id, deadline_s=9, stop_s=1)


@pytest.mark.slow
def test_job_that_cannot_be_imported(run_dir: Path, job_id: str) -> None:
    (run_dir / "config.json").write_text("{}")
    with pytest.raises(JobFailed, match="No module named tests.jobs.none") as caught:
        run_job("tests.jobs.none", run_dir, ranks=2, job_id=job_id, deadline_s=START_S, stop_s=5)
    assert caught.value.exitcode == 1
