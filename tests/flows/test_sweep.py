"""A sweep in a project of its own: stopped in the middle, taken up again; and DVC's experiments."""

import json
import signal

import pytest

from tests.project import Project
from tests.tasks.runs import await_true

SWEEP = ("sweep", "pretrain", "--arm", "ddp", "--grid", "optimizer.lr=1e-2,3e-2", "--seeds", "2")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return Project(tmp_path_factory.mktemp("sweep") / "project")


def children(project):
    """Name of the parent -> statuses of its children."""
    sql = (
        "SELECT parents.run_uuid, children.status FROM runs AS children "
        "JOIN tags ON tags.run_uuid = children.run_uuid AND tags.key = 'mlflow.parentRunId' "
        "JOIN runs AS parents ON parents.run_uuid = tags.value"
    )
    found = {}
    for parent, status in project.query(".mlflow/mlflow.db", sql):
        found.setdefault(parent, []).append(status)
    return found


def results(project):
    return {*(project.root / "runs" / "pretrain_lordo" / "ddp").glob("*/result.json")}


@pytest.mark.slow
def test_stopped_and_started_again_it_does_what_is_left_under_one_parent(project):
    first = project.start("./run", "-m", "flows", *SWEEP)
    await_true(lambda: results(project) or first.poll() is not None, timeout_s=300)
    first.send_signal(signal.SIGINT)
    said, _ = first.communicate(timeout=120)
    assert first.returncode == 130, said
    done = {path: path.stat().st_mtime_ns for path in results(project)}
    assert 0 < len(done) < 4

    again = project.flows(*SWEEP)
    assert again.returncode == 0, again.stdout + again.stderr
    assert len(results(project)) == 4
    assert {path: path.stat().st_mtime_ns for path in done} == done, "what was done stays"
    table = [line.split() for line in again.stdout.splitlines() if "optimizer.lr=" in line]
    assert len(table) == 2 and sum("best" in line for line in table) == 1
    assert [*children(project).values()] == [["FINISHED"] * 4]
    losses = {}
    for path in results(project):
        config = json.loads(path.with_name("config.json").read_text())
        quality = json.loads(path.read_text())["quality"]
        losses.setdefault(config["arm"]["optimizer"]["lr"], []).append(quality["val_loss"])
    means = {lr: sum(found) / len(found) for lr, found in losses.items()}
    best = min(means, key=means.get)
    [line] = [line for line in table if "best" in line]
    assert f"optimizer.lr={best}" in line and f"{means[best]:.4f}" in line


@pytest.mark.slow
def test_points_read_data_that_is_not_the_projects(project):
    """Made by `--set`, or by a profile."""
    small = ("pretrain_async.training.steps=3", "pretrain_async.training.warmup_steps=1")
    settings = [word for each in (*small, "tokens.vocab_size=290") for word in ("--set", each)]
    grid = ("--grid", "optimizer.optimizer.lr=1e-3,2e-3")
    done = project.flows("sweep", "pretrain", "--arm", "async", *grid, *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len([*project.root.glob("runs/set/*/data/tokens")]) == 1
    assert len([*project.root.glob("runs/set/*/models/pretrain_async/async")]) == 2


def test_bad_grids_are_one_line(project):
    done = project.flows("sweep", "pretrain", "--arm", "ddp", "--grid", "optimizer.rl=1")
    assert done.returncode == 2
    assert "ddp.optimizer.rl: unknown key" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_experiments_of_dvc_take_params_and_keep_what_they_found(project):
    assert project.dvc("repro", "tokens").returncode == 0
    project.git("add", "-A")
    project.git("commit", "-qm", "tokens")
    for lr in (0.02, 0.05):
        setting = f"pretrain_lordo.arms.ddp.optimizer.lr={lr}"
        done = project.dvc("exp", "run", "-S", setting, "-n", f"lr-{lr}", "pretrain_lordo@ddp")
        assert done.returncode == 0, done.stdout + done.stderr
    shown = project.dvc("exp", "show", "--json")
    assert shown.returncode == 0, shown.stderr
    found = {}

    def collect(node):
        if isinstance(node, dict):
            if str(node.get("name")).startswith("lr-") and node.get("data"):
                metrics = node["data"]["metrics"]["metrics/pretrain_lordo/ddp/quality.json"]
                found[node["name"]] = metrics["data"]["val_loss"]
            for value in node.values():
                collect(value)
        elif isinstance(node, list):
            for value in node:
                collect(value)

    collect(json.loads(shown.stdout))
    assert set(found) == {"lr-0.02", "lr-0.05"}, shown.stdout
    assert len({*found.values()}) == 2
