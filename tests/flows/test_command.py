"""A flow run in the ways that people end one: Ctrl-C in a terminal, kill -9. Nothing is left."""

import os
import signal
import subprocess
import time

import psutil
import pytest

from tests.project import Project

LONG = [
    "--set",
    "pretrain_lordo.training.steps=5000",
    "--set",
    "pretrain_lordo.training.log_every=1",
]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return Project(tmp_path_factory.mktemp("stopped") / "project")


def processes(project):
    """All that run from the project's folder or work in it."""
    found = []
    for process in psutil.process_iter():
        try:
            text = " ".join([*process.cmdline(), process.cwd()])
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
        if str(project.root) in text:
            found.append(process.pid)
    return found


def start_and_await_training(project):
    """A flow run as a terminal starts it, in a process group of its own, once a step is logged."""
    process = subprocess.Popen(
        ["./run", "-m", "flows", "pretrain", "--arm", "ddp", *LONG],
        cwd=project.root,
        env={k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "LANG")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    )
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if "/5000  loss" in line:  # a resumed one does not begin at step 1
            return process
    raise AssertionError("".join(seen))


def await_none(project, seconds):
    deadline = time.monotonic() + seconds
    while processes(project) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert processes(project) == []


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_stops_all_and_says_how_to_go_on(project):
    """A terminal sends SIGINT to the whole group, not to one process."""
    process = start_and_await_training(project)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "shoestring: stopped; start again to resume" in output
    await_none(project, 20)
    [job] = (project.root / "runs" / "pretrain_lordo" / "ddp").iterdir()
    assert list((job / "checkpoints").glob("step_*"))


@pytest.mark.slow
def test_kill_9_of_a_flow_leaves_no_process_not_even_its_temporary_server(project):
    process = start_and_await_training(project)
    assert len(processes(project)) >= 5, "flow, server, supervisor, agent, ranks"
    process.kill()
    process.wait()
    await_none(project, 20)
