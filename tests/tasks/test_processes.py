"""The mark finds a job's processes wherever they went, and the kernel keeps its two promises."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable

import pytest

from tasks.paths import PROJECT
from tasks.processes import MARK, SUPERVISOR_MARK, alive, sweep

linux = pytest.mark.skipif(sys.platform != "linux", reason="prctl is of Linux")


def start(job_id: str, code: str, mark: str = MARK) -> subprocess.Popen[str]:
    """Python running `code` in a session of its own; returns when it has printed a line."""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=PROJECT,
        env={**os.environ, mark: job_id},
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


def test_alive_finds_only_this_job() -> None:
    one, other = uuid.uuid4().hex, uuid.uuid4().hex
    code = "import time; print(1, flush=True); time.sleep(60)"
    processes = [start(one, code), start(other, code), start(one, code, SUPERVISOR_MARK)]
    try:
        assert sorted(alive(one)) == sorted([processes[0].pid, processes[2].pid])
        assert alive(other) == [processes[1].pid]
        assert alive(one[:-1]) == []
        assert sweep(one) == []
        assert processes[0].wait(10) == -signal.SIGKILL
        assert processes[1].poll() is None
        assert processes[2].poll() is None  # a supervisor is not swept
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert alive(one) == alive(other) == []


def test_sweep_reaches_orphans_in_sessions_of_their_own_that_ignore_sigterm() -> None:
    job_id = uuid.uuid4().hex
    child = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
    code = (
        "import subprocess, sys\n"
        f"for _ in range(3): subprocess.Popen([sys.executable, '-c', {child!r}], "
        "start_new_session=True, stdout=subprocess.DEVNULL)\n"
        "print(1, flush=True)"
    )
    assert start(job_id, code).wait(10) == 0
    assert len(alive(job_id)) == 3
    assert sweep(job_id) == []
    assert alive(job_id) == []


@linux
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


@linux
def test_die_with_parent_when_it_is_dead_already() -> None:
    code = "from tasks.prctl import die_with_parent; die_with_parent(1 << 22); print('lives')"
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == b""


@linux
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
