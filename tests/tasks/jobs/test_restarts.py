"""The thin parent of an elastic rank, without torchrun and with it."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from algorithms.common.files import read_json
from tasks.jobs.restarts import RESTARTS, WORKER
from tasks.paths import PROJECT
from tasks.processes import alive
from tasks.torchrun import JobFailed, run_job
from tests.processes import environment, living

START_S = 120
"""Patience for the start of a job on a busy machine."""


def start(tmp_path: Path, *starts: str, elastic: bool = True, **env: str) -> subprocess.Popen[str]:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"elastic": elastic, "starts": starts}))
    return subprocess.Popen(
        [sys.executable, "-m", "tests.jobs.restarted", str(config)],
        cwd=PROJECT,
        env={**os.environ, "RANK": "3", "SHOESTRING_LOG_DIR": str(tmp_path), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def starts(tmp_path: Path) -> list[list[str]]:
    """Pid, parent and agent of each start."""
    path = tmp_path / "starts_3.txt"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def eventually(condition: Callable[[], bool], timeout_s: float = START_S) -> None:
    give_up = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up, "did not come true"
        time.sleep(0.02)


def log(tmp_path: Path) -> list[str]:
    return (tmp_path / "rank_3.log").read_text().splitlines()


def test_a_worker_that_dies_is_started_again_and_both_write_one_log(tmp_path: Path) -> None:
    process = start(tmp_path, "kill 9", "exit 7", "exit 0")
    assert process.communicate(timeout=START_S) == ("", "")
    assert process.returncode == 0
    pids = [pid for pid, _, _ in starts(tmp_path)]
    assert {tuple(parents) for _, *parents in starts(tmp_path)} == {(str(process.pid),) * 2}
    assert [line for line in log(tmp_path) if "start " in line] == [
        "start 1: kill 9",
        f"rank 3: worker {pids[0]} was killed by SIGKILL; start 2 of {RESTARTS + 1}",
        "start 2: exit 7",
        f"rank 3: worker {pids[1]} exited with code 7; start 3 of {RESTARTS + 1}",
        "start 3: exit 0",
    ]
    assert not (tmp_path / "rank_3.error.json").exists(), "of a start that was followed by another"


@pytest.mark.parametrize(("action", "code"), [("kill 9", -9), ("kill 6", -6), ("raise boom", 1)])
def test_after_the_last_start_the_parent_ends_as_the_worker_did(
    tmp_path: Path, action: str, code: int
) -> None:
    process = start(tmp_path, *[action] * (RESTARTS + 1))
    process.communicate(timeout=START_S)
    assert process.returncode == code
    assert len(starts(tmp_path)) == RESTARTS + 1
    assert f"; it was the last of {RESTARTS + 1}" in log(tmp_path)[-1]
    if action == "raise boom":
        assert read_json(tmp_path / "rank_3.error.json")["message"] == "RuntimeError: boom"


def test_what_would_only_be_said_again_is_said_once(tmp_path: Path) -> None:
    process = start(tmp_path, "kill 9", "input data/x: no such file")
    process.communicate(timeout=START_S)
    assert process.returncode == 2
    assert len(starts(tmp_path)) == 2
    said = read_json(tmp_path / "rank_3.error.json")
    assert (said["kind"], said["message"]) == ("input", "data/x: no such file")


def test_a_signal_is_passed_on_and_ends_it(tmp_path: Path) -> None:
    process = start(tmp_path, "kill 9", "wait")
    eventually(lambda: len(starts(tmp_path)) == 2)
    time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=START_S)
    assert process.returncode == 75
    assert len(starts(tmp_path)) == 2
    assert read_json(tmp_path / "rank_3.error.json")["kind"] == "preempted"


def test_a_worker_dies_with_its_parent(tmp_path: Path) -> None:
    process = start(tmp_path, "ignore")
    eventually(lambda: len(starts(tmp_path)) == 1)
    [[worker, parent, _]] = starts(tmp_path)
    assert int(parent) == process.pid
    process.kill()
    process.communicate(timeout=START_S)
    eventually(lambda: not psutil.pid_exists(int(worker)), 10)


def test_without_elastic_there_is_no_parent(tmp_path: Path) -> None:
    process = start(tmp_path, "exit 7", elastic=False)
    process.communicate(timeout=START_S)
    assert process.returncode == 7
    assert [int(pid) for pid, _, _ in starts(tmp_path)] == [process.pid]


@pytest.mark.parametrize("text", [None, "[]", "{", '{"starts": []}'])
def test_a_config_that_cannot_be_read_is_the_jobs_to_refuse(
    tmp_path: Path, text: str | None
) -> None:
    config = tmp_path / "config.json"
    if text is not None:
        config.write_text(text)
    command = [sys.executable, "-m", "tests.jobs.restarted", str(config)]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode != 0
    assert "rank 0: worker" not in done.stdout


def test_the_parent_imports_nothing_heavy() -> None:
    code = (
        "import sys, tasks.jobs.restarts;"
        " print(sorted({'torch', 'psutil', 'numpy'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True)
    assert done.stdout == "[]\n"


def workers(job_id: str, rank: int) -> list[psutil.Process]:
    """The worker processes of that rank."""
    return [
        each
        for each in living(alive(job_id))
        if WORKER in (variables := environment(each)) and variables.get("RANK") == str(rank)
    ]


@pytest.mark.slow
def test_one_of_four_is_killed_twice_under_torchrun(tmp_path: Path) -> None:
    from tests.crew import Crew

    run_dir, job_id = tmp_path / "job", uuid.uuid4().hex
    run_dir.mkdir()
    (run_dir / "config.json").write_text('{"elastic": true, "timeout_s": 60.0}')
    crew = Crew(run_dir)
    plan: list[tuple[int, int]] = [(2, 1), (2, 2), (0, 1)]
    """Rank, and how often it has been in."""

    def tick() -> None:
        joined = [event["rank"] for event in crew.events("joined")]
        rounds = crew.events("round")
        together = bool(rounds) and rounds[-1]["members"] == [0, 1, 2, 3]
        if plan and together and joined.count(plan[0][0]) == plan[0][1]:
            [worker] = workers(job_id, plan.pop(0)[0])
            worker.kill()
        elif not plan and together and joined.count(0) == 2:
            (run_dir / "quit").touch()

    run_job(
        "tests.jobs.elastic",
        run_dir,
        ranks=4,
        job_id=job_id,
        deadline_s=3 * START_S,
        stop_s=5,
        on_tick=tick,
    )
    assert plan == []
    assert alive(job_id) == []
    ends = crew.events("end")
    assert [event["rank"] for event in sorted(ends, key=lambda e: e["rank"])] == [0, 1, 2, 3]
    assert len({tuple(event["x"]) for event in (*ends, *crew.events("result"))}) == 1
    waited = max(event["seconds"] for event in crew.events("synced"))
    assert waited < 60, "a worker's return ends the wait for it"
    said = (run_dir / "logs" / "attempt_1" / "rank_2.log").read_text()
    assert said.count("was killed by SIGKILL; start") == 2


@pytest.mark.slow
def test_a_rank_that_dies_for_good_ends_the_job(tmp_path: Path) -> None:
    run_dir, job_id = tmp_path / "job", uuid.uuid4().hex
    run_dir.mkdir()
    config = {"elastic": True, "starts": ["kill 9"] * (RESTARTS + 1)}
    (run_dir / "config.json").write_text(json.dumps(config))
    with pytest.raises(JobFailed, match="rank 0 was killed by SIGKILL"):
        run_job(
            "tests.jobs.restarted", run_dir, ranks=1, job_id=job_id, deadline_s=START_S, stop_s=5
        )
    assert alive(job_id) == []
