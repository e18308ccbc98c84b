"""A flow run in the ways that people end one: Ctrl-C in a terminal, kill -9. Nothing is left."""

import os
import signal
import subprocess

import pytest

from flows import command, make
from flows.stages import context
from tests.processes import command_line, listening
from tests.project import Project
from tests.tasks.runs import await_true
from tests.tasks.trained import make_arm, make_pipeline

GONE_S = 60
"""On a quiet machine all is gone in five seconds."""

LONG = [
    "--set",
    "pretrain_lordo.training.steps=5000",
    "--set",
    "pretrain_lordo.training.log_every=1",
]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return Project(tmp_path_factory.mktemp("stopped") / "project")


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


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_stops_all_and_says_how_to_go_on(project):
    """A terminal sends SIGINT to the whole group, not to one process."""
    process = start_and_await_training(project)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "shoestring: stopped; start again to resume" in output
    await_true(lambda: not project.processes(), GONE_S)
    [job] = (project.root / "runs" / "pretrain_lordo" / "ddp").iterdir()
    assert list((job / "checkpoints").glob("step_*"))


@pytest.mark.slow
def test_kill_9_of_a_flow_leaves_no_process_not_even_its_temporary_server(project):
    process = start_and_await_training(project)
    assert len(project.processes()) >= 5, "flow, server, supervisor, agent, ranks"
    addresses = {
        address
        for each in project.processes()
        if "tasks.agent" not in command_line(each)  # torchrun's stores listen everywhere
        for address in listening(each)
    }
    assert addresses == {"127.0.0.1"}
    process.kill()
    process.wait()
    await_true(lambda: not project.processes(), GONE_S)


def test_gc_says_what_would_go_and_then_removes_it(tmp_path):
    project = Project(tmp_path / "project")
    job = project.root / "runs" / "pretrain_lordo" / "ddp" / "0123456789ab"
    for step in (1, 2):
        (job / "checkpoints" / f"step_{step:08}").mkdir(parents=True)
        (job / "checkpoints" / f"step_{step:08}" / "seal.json").write_text("x" * 2000)
    (job / "config.json").write_text("{}")
    (job / "result.json").write_text("{}")
    old = job / "checkpoints" / "step_00000001"
    said = f"{old.relative_to(project.root)}  2.00 kB  of a finished job\n"
    dry = project.flows("gc", "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert dry.stdout == f"would remove {said}would remove 2.00 kB in all\n"
    assert old.exists()
    done = project.flows("gc")
    assert done.stdout == f"removed {said}removed 2.00 kB in all\n"
    assert [path.name for path in (job / "checkpoints").iterdir()] == ["step_00000002"]
    assert project.flows("gc").stdout == "removed 0 B in all\n"


def test_notes_stand_below_the_table_once_each(tmp_path, monkeypatch, capsys):
    """In a cell of a table that fills the terminal they would be a column of single words."""
    made = [
        make_pipeline(tmp_path, "deep", 3.0, simulated=True),
        make_pipeline(tmp_path, "deeper", 3.1, simulated=True),
        make_arm(tmp_path, "async", 3.2, stage="pretrain_async"),
    ]
    folders = {name: path for each in made for name, path in each.items()}
    monkeypatch.setattr(make, "metrics_folders", lambda here, study: folders)
    command._show(context(), None, ["where"])
    said = capsys.readouterr().out
    assert said.count("times modelled") == 1
    assert "\n(1) times modelled: its stages were simulated in one process" in said
    rows = {line.split()[1]: line for line in said.splitlines() if line.startswith("│")}
    assert "(1)" in rows["deep"] and "(1)" in rows["deeper"] and "(1)" not in rows["async"]
