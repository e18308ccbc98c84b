"""`flows serve` as a real process: both pages, the deployments, a worker; and its end."""

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from benchmarks.prefect_api import HTTP, ask
from tasks.config import load_params
from tests.processes import command_line, listening
from tests.project import Project
from tests.tasks.runs import await_true

GONE_S = 120
"""On a quiet machine all is gone in five seconds; each server has fifteen before it is killed."""
MLFLOW, PREFECT = "http://127.0.0.1:5000", "http://127.0.0.1:4200/api"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project(tmp_path_factory.mktemp("serve") / "project")


def gpu_limit() -> int:
    """How many GPUs the flows of the server may use at once."""
    [limit] = [
        each
        for each in ask(PREFECT, "v2/concurrency_limits/filter")
        if each["name"] == "shoestring-gpu"
    ]
    return int(limit["limit"])


@pytest.mark.slow
def test_pages_deployments_and_the_worker(project: Project, tmp_path: Path) -> None:
    with project.serving("serve", CUDA_VISIBLE_DEVICES="0,1,2") as process:
        assert gpu_limit() == 3
        assert "MLflow" in requests.get(MLFLOW, timeout=30).text
        assert "Prefect" in requests.get(PREFECT.removesuffix("/api"), timeout=30).text
        addresses = {address for ours in project.processes() for address in listening(ours)}
        assert addresses == {"127.0.0.1"}

        deployments = {each["name"]: each for each in ask(PREFECT, "deployments/filter")}
        arms = {arm for stage in load_params().stages.values() for arm in stage.arms}
        assert set(deployments) == {"nightly", *arms}
        for arm in arms:
            assert deployments[arm]["schedules"] == []
            assert deployments[arm]["parameters"] == {"arm": arm, "overrides": []}
        [nightly] = deployments["nightly"]["schedules"]
        assert nightly["active"]
        assert (nightly["schedule"]["cron"], nightly["schedule"]["timezone"]) == (
            "0 3 * * *",
            "UTC",
        )

        run = [".venv/bin/prefect", "deployment", "run", "pretrain/ddp", "--watch"]
        done = project.execute(*run, PREFECT_API_URL=PREFECT)
        assert done.returncode == 0, done.stdout + done.stderr
        assert {artifact["key"] for artifact in ask(PREFECT, "artifacts/filter")} == {"mlflow-ddp"}
        assert (project.root / "metrics" / "pretrain_lordo" / "ddp" / "quality.json").is_file()
        assert "up to date" in project.dvc("status", "pretrain_lordo@ddp").stdout

        use_from_elsewhere(Project(tmp_path / "elsewhere"))
        assert project.git("status", "--porcelain").split() == ["??", "dvc.lock"]

        os.killpg(process.pid, signal.SIGINT)  # what Ctrl-C does: the whole group gets it
        await_true(lambda: not project.processes(), timeout_s=GONE_S)
        assert process.wait() == 130
        assert process.stdout is not None
        assert process.stdout.read().endswith("shoestring: stopped; start again to resume\n")


def use_from_elsewhere(project: Project) -> None:
    """A flow of another clone works against the servers, and opens no store of its own."""
    servers = {"PREFECT_API_URL": PREFECT, "MLFLOW_TRACKING_URI": MLFLOW}
    done = project.execute("./run", "-m", "flows", "experiment", **servers)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (project.root / ".prefect" / "prefect.db").exists()
    assert not (project.root / ".mlflow" / "mlflow.db").exists()
    assert project.git("status", "--porcelain").split() == ["??", "dvc.lock"]
    names = {run["name"] for run in ask(PREFECT, "flow_runs/filter")}
    assert {"experiment", "prepare", "pretrain ddp", "report"} <= names
    assert {"arms-pretrain-lordo", "summary"} <= {
        artifact["key"] for artifact in ask(PREFECT, "artifacts/filter")
    }

    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=MLFLOW)
    experiment = client.get_experiment_by_name("experiment")
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    assert runs["ddp"].data.tags["mlflow.parentRunId"] == runs["experiment"].info.run_id
    assert runs["ddp"].data.metrics["tokens"] == 12 * 8 * 16
    files = {file.path for file in client.list_artifacts(runs["experiment"].info.run_id)}
    assert "index.html" in files


@pytest.mark.slow
def test_killed_while_the_worker_trains_it_leaves_no_process(project: Project) -> None:
    with project.serving("serve") as process:
        endless = 'overrides=["pretrain_lordo.training.steps=1000000"]'
        run = [".venv/bin/prefect", "deployment", "run", "pretrain/ddp", "-p", endless]
        done = project.execute(*run, PREFECT_API_URL=PREFECT)
        assert done.returncode == 0, done.stdout + done.stderr
        logs = project.root / "runs"
        before = {*logs.rglob("metrics.jsonl")}
        await_true(lambda: {*logs.rglob("metrics.jsonl")} - before, timeout_s=200)
        process.kill()
        await_true(lambda: not project.processes(), timeout_s=GONE_S)


@contextlib.contextmanager
def every_ten_seconds(*overrides: str) -> Iterator[str]:
    """A schedule of the deployment ddp; its id. It ends with the block."""
    [found] = ask(PREFECT, "deployments/filter", deployments={"name": {"any_": ["ddp"]}})
    where = f"{PREFECT}/deployments/{found['id']}/schedules"
    parameters = {"arm": "ddp", "overrides": list(overrides)}
    wanted = {"schedule": {"interval": 10}, "active": True, "parameters": parameters}
    answer = HTTP.post(where, json=[wanted], timeout=30)
    answer.raise_for_status()
    try:
        yield found["id"]
    finally:
        HTTP.delete(f"{where}/{answer.json()[0]['id']}", timeout=30).raise_for_status()


def scheduled(deployment: str, *states: str) -> list[Any]:
    """Flow runs that the schedule made, in one of these states."""
    runs = ask(PREFECT, "flow_runs/filter", flow_runs={"deployment_id": {"any_": [deployment]}})
    return [run for run in runs if run["auto_scheduled"] and run["state_type"] in states]


@pytest.mark.slow
def test_a_schedule_fires_by_itself_and_leaves_its_artifacts(project: Project) -> None:
    with project.serving("serve", CUDA_VISIBLE_DEVICES="0"):
        assert gpu_limit() == 1, "or as many as there are now"
        with every_ten_seconds() as deployment:
            await_true(lambda: scheduled(deployment, "COMPLETED"), timeout_s=200)
        runs = {run["id"] for run in scheduled(deployment, "COMPLETED")}
        mine = [each for each in ask(PREFECT, "artifacts/filter") if each["flow_run_id"] in runs]
        assert {each["key"] for each in mine} == {"mlflow-ddp"}
        assert (project.root / "metrics" / "pretrain_lordo" / "ddp" / "quality.json").is_file()


@pytest.mark.slow
def test_a_scheduled_run_that_is_cancelled_leaves_nothing(project: Project) -> None:
    with project.serving("serve"):
        before = {*project.root.glob("runs/*/*/*/metrics.jsonl")}
        # The schedule stays until its run trains: a run of an earlier server, killed with it,
        # is RUNNING for ever in the same database.
        with every_ten_seconds("pretrain_lordo.training.steps=999999") as deployment:
            await_true(
                lambda: {*project.root.glob("runs/*/*/*/metrics.jsonl")} - before, timeout_s=200
            )
        cancelling = {"state": {"type": "CANCELLING", "name": "Cancelling"}}

        def cancelled() -> bool:
            """One that the scheduler made while its schedule was removed begins a little later."""
            for run in scheduled(deployment, "RUNNING", "PENDING", "SCHEDULED"):
                where = f"{PREFECT}/flow_runs/{run['id']}/set_state"
                HTTP.post(where, json=cancelling, timeout=30).raise_for_status()
            lines = map(command_line, project.processes())
            return not any("tasks." in line or "engine" in line for line in lines)

        await_true(cancelled, timeout_s=GONE_S)
        await_true(lambda: scheduled(deployment, "CANCELLED"), timeout_s=GONE_S)
        statuses = project.query(".mlflow/mlflow.db", "SELECT status FROM runs WHERE name = 'ddp'")
        assert ("KILLED",) in statuses and ("RUNNING",) not in statuses


@pytest.mark.slow
def test_the_pages_end_with_their_command(project: Project) -> None:
    with project.serving("ui") as process:
        assert requests.get(MLFLOW, timeout=30).ok
        # MLflow would start ten for services we do not use.
        await_true(lambda: len(project.processes()) <= 5)
        process.terminate()
        await_true(lambda: not project.processes(), timeout_s=GONE_S)
        assert process.wait() == 128 + signal.SIGTERM


def test_a_taken_port_is_one_line(project: Project) -> None:
    with socket.create_server(("127.0.0.1", 5000)):
        done = project.flows("ui")
    assert done.returncode == 2
    assert done.stderr == "shoestring: mlflow: 127.0.0.1:5000: Address already in use\n"
    assert done.stdout == ""
