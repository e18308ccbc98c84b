"""Commands at work in one project at the same time: they wait for each other, and all end well."""

import pytest

from algorithms.common.files import read_json
from tests.project import Project
from tests.tasks.runs import await_true

EXPERIMENT = ("./run", "-m", "flows", "experiment")
PRETRAIN = ("./run", "-m", "flows", "pretrain", "--arm", "ddp")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """An arm of each stage."""
    project = Project(tmp_path_factory.mktemp("at_once") / "project")
    params = project.root / "params.yaml"
    text = params.read_text()
    begin = text.index("    lordo_global:")
    params.write_text(text[:begin] + text[text.index("  study:") :])
    return project


def finish(*processes):
    said = [process.communicate(timeout=500)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), said


def attempts(project):
    return sorted(path.name for path in project.root.glob("runs/*/*/*/logs/*"))


def statuses(project):
    return {*project.query(".mlflow/mlflow.db", "SELECT name, status FROM runs")}


@pytest.mark.slow
def test_two_first_experiments_make_each_stage_once(project):
    finish(*[project.start(*EXPERIMENT) for _ in range(2)])
    assert attempts(project) == ["attempt_1"] * 4, "one each of three arms and a policy"
    assert "up to date" in project.dvc("status", "dvc.yaml").stdout
    summary = read_json(project.root / "reports" / "summary.json")
    assert set(summary) == {"pretrain_lordo/ddp", "pretrain_async/async", "post_train/exact"}
    names = ("experiment", "ddp", "async", "policy", "exact")
    assert statuses(project) == {(name, "FINISHED") for name in names}
    flows = project.query(".prefect/prefect.db", "SELECT state_type FROM flow_run")
    assert {*flows} == {("COMPLETED",)}


@pytest.mark.slow
def test_dvc_repro_beside_a_running_flow(project):
    """DVC has decided before it waits for the flow, so it makes the same once more."""
    project.set("lr: 1.0e-2", "lr: 2.0e-2")
    before = len(attempts(project))
    flow = project.start(*PRETRAIN)
    await_true(lambda: len(attempts(project)) > before or flow.poll() is not None, timeout_s=200)
    finish(flow, project.start(".venv/bin/dvc", "repro"))
    assert "up to date" in project.dvc("status", "dvc.yaml").stdout
    assert {status for _, status in statuses(project)} == {"FINISHED"}
    [job] = [
        path.parent
        for path in project.root.glob("runs/pretrain_lordo/ddp/*/config.json")
        if read_json(path)["arm"]["optimizer"]["lr"] == 0.02
    ]
    quality = read_json(project.root / "metrics" / "pretrain_lordo" / "ddp" / "quality.json")
    assert quality == read_json(job / "result.json")["quality"]
    summary = read_json(project.root / "reports" / "summary.json")
    assert summary["pretrain_lordo/ddp"]["val_loss"] == quality["val_loss"]
