"""The mark finds a job's processes wherever they went, and the kernel keeps its two promises."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from tasks.paths import PROJECT
from tasks.processes import MARK, RUN_DIR_MARK, alive, sweep


def start(job_id: str, code: str, **env: str) -> subprocess.Popen[str]:
    """Python running `code` in a session of its own; returns when it has printed a line."""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=PROJECT,
        env={**os.environ, MARK: job_id, **env},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def eventually(condition: Callable[[], bool], timeout_s: float = 10) -> None:
    give_up = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up, "did not come true"
        time.sleep(0.05)


def test_only_the_job_of_this_run_directory_is_killed(tmp_path: Path) -> None:
    one, other = uuid.uuid4().hex, uuid.uuid4().hex
    here, clone = tmp_path / "here", tmp_path / "clone"
    code = "import time; print(1, flush=True); time.sleep(60)"
    rank = start(one, code, **{RUN_DIR_MARK: str(here)})
    supervisor = start(one, code)
    same_job_elsewhere = start(one, code, **{RUN_DIR_MARK: str(clone)})
    other_job = start(other, code, **{RUN_DIR_MARK: str(tmp_path)})
    spared = [supervisor, same_job_elsewhere, other_job]
    try:
        assert sorted(alive(one)) == sorted(
            [rank.pid, supervisor.pid, same_job_elsewhere.pid],
        )
        assert alive(other) == [other_job.pid]
        assert alive(one[:-1]) == []
        assert sweep(here) == []
        assert rank.wait(10) == -signal.SIGKILL
        assert [process.poll() for process in spared] == [None, None, None]
    finally:
        for process in (rank, *spared):
            process.kill()
            process.wait()
    assert alive(one) == alive(other) == []


def test_sweep_reaches_orphans_in_sessions_of_their_own_that_ignore_sigterm(tmp_path: Path) -> None:
    job_id = uuid.uuid4().hex
    child = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
    code = (
        "import subprocess, sys\n"
        f"for _ in range(3): subprocess.Popen([sys.executable, '-c', {child!r}], "
        "start_new_session=True, stdout=subprocess.DEVNULL)\n"
        "print(1, flush=True)"
    )
    assert start(job_id, code, **{RUN_DIR_MARK: str(tmp_path)}).wait(10) == 0
    assert len(alive(job_id)) == 3
    assert sweep(tmp_path) == []
    assert alive(job_id) == []


def test_die_with_parent() -> None:
    job_id = uuid.uuid4().hex
    child = (
        "import os, time; from tasks.prctl import die_with_parent; "
        "die_with_parent(os.getppid()); print(1, flush=True); time.sleep(600)"
    )
    parent = start(
        job_id,
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True)\n"
        "time.sleep(600)",
    )
    assert len(alive(job_id)) == 2
    parent.kill()
    parent.wait()
    eventually(lambda: alive(job_id) == [])


def test_die_with_parent_when_it_is_dead_already() -> None:
    code = "from tasks.prctl import die_with_parent; die_with_parent(1 << 22); print('lives')"
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == b""


def test_a_flow_run_gets_sigterm_when_its_worker_is_killed() -> None:
    job_id = uuid.uuid4().hex
    flow = (
        "import signal, sys, time, flows\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('told', flush=True), sys.exit()))\n"
        "print('up', flush=True)\n"
        "time.sleep(600)"
    )
    worker = start(
        job_id,
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {flow!r}], start_new_session=True)\n"
        "time.sleep(600)",
        PREFECT__FLOW_RUN_ID="1",
    )
    worker.kill()
    said, _ = worker.communicate(timeout=20)
    assert said == "told\n"
    eventually(lambda: alive(job_id) == [])


def test_a_flow_run_whose_worker_is_dead_already_does_not_begin() -> None:
    job_id = uuid.uuid4().hex
    orphan = (
        "import os, time\n"
        "print('up', flush=True)\n"
        "while os.getppid() != 1: time.sleep(0.05)\n"
        "import flows\n"
        "print('began', flush=True)"
    )
    worker = start(
        job_id,
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {orphan!r}], start_new_session=True)\n"
        "time.sleep(600)",
        PREFECT__FLOW_RUN_ID="1",
    )
    worker.kill()
    said, _ = worker.communicate(timeout=20)
    assert said == ""
    assert alive(job_id) == []


def test_subreaper_gets_the_orphans() -> None:
    code = (
        "import os, time\n"
        "from tasks.prctl import become_subreaper\n"
        "become_subreaper()\n"
        "if os.fork() == 0:\n"
        "    if os.fork() == 0:\n"
        "        time.sleep(0.2)\n"
        "        os._exit(5)\n"
        "    os._exit(4)\n"
        "codes = {os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(2)}\n"
        "print(sorted(codes))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True)
    assert done.stdout.strip() == "[4, 5]", done.stderr
