"""`flows serve` as a real process: both pages, the deployments, a worker; and its end."""

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from tests.project import Project
from tests.tasks.runs import await_true

GONE_S = 30
"""On a quiet machine all is gone in five seconds."""
MLFLOW, PREFECT = "http://127.0.0.1:5000", "http://127.0.0.1:4200/api"


@contextlib.contextmanager
def started(project: Project, command: str) -> Iterator[subprocess.Popen[str]]:
    """The command in a terminal of its own, once all is up."""
    process = project.start("./run", "-m", "flows", command)
    last = {"ui": "Prefect: http://127.0.0.1:4200\n", "serve": "Ctrl-C ends all\n"}[command]
    try:
        assert process.stdout is not None
        said = ""
        while not said.endswith(last):
            line = process.stdout.readline()
            assert line, said
            said += line
        assert "MLflow:  http://127.0.0.1:5000\nPrefect: http://127.0.0.1:4200\n" in said
        yield process
    finally:
        project.kill()
        process.wait()


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project(tmp_path_factory.mktemp("serve") / "project")


def ask(path: str, **filters: Any) -> Any:
    answer = requests.post(f"{PREFECT}/{path}/filter", json=filters, timeout=30)
    answer.raise_for_status()
    return answer.json()


@pytest.mark.slow
def test_pages_deployments_and_the_worker(project: Project, tmp_path: Path) -> None:
    with started(project, "serve") as process:
        assert "MLflow" in requests.get(MLFLOW, timeout=30).text
        assert "Prefect" in requests.get(PREFECT.removesuffix("/api"), timeout=30).text
        addresses = {
            connection.laddr[0]
            for ours in project.processes()
            for connection in ours.net_connections()
            if connection.status == psutil.CONN_LISTEN
        }
        assert addresses == {"127.0.0.1"}

        deployments = {deployment["name"]: deployment for deployment in ask("deployments")}
        assert set(deployments) == {"nightly", "ddp"}
        assert deployments["ddp"]["schedules"] == []
        [nightly] = deployments["nightly"]["schedules"]
        assert nightly["active"]
        assert (nightly["schedule"]["cron"], nightly["schedule"]["timezone"]) == (
            "0 3 * * *",
            "UTC",
        )

        run = [".venv/bin/prefect", "deployment", "run", "pretrain/ddp", "--watch"]
        done = project.execute(*run, PREFECT_API_URL=PREFECT)
        assert done.returncode == 0, done.stdout + done.stderr
        assert {artifact["key"] for artifact in ask("artifacts")} == {"mlflow-ddp"}
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
    names = {run["name"] for run in ask("flow_runs")}
    assert {"experiment", "prepare", "pretrain ddp", "report"} <= names
    assert {"arms", "summary"} <= {artifact["key"] for artifact in ask("artifacts")}

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
    with started(project, "serve") as process:
        endless = 'overrides=["pretrain_lordo.training.steps=1000000"]'
        run = [".venv/bin/prefect", "deployment", "run", "pretrain/ddp", "-p", endless]
        done = project.execute(*run, PREFECT_API_URL=PREFECT)
        assert done.returncode == 0, done.stdout + done.stderr
        logs = project.root / "runs"
        before = {*logs.rglob("metrics.jsonl")}
        await_true(lambda: {*logs.rglob("metrics.jsonl")} - before, timeout_s=200)
        process.kill()
        await_true(lambda: not project.processes(), timeout_s=GONE_S)


@pytest.mark.slow
def test_the_pages_end_with_their_command(project: Project) -> None:
    with started(project, "ui") as process:
        assert requests.get(MLFLOW, timeout=30).ok
        assert len(project.processes()) <= 5, "MLflow would start ten for services we do not use"
        process.terminate()
        await_true(lambda: not project.processes(), timeout_s=GONE_S)
        assert process.wait() == 128 + signal.SIGTERM


def test_a_taken_port_is_one_line(project: Project) -> None:
    with socket.create_server(("127.0.0.1", 5000)):
        done = project.flows("ui")
    assert done.returncode == 2
    assert done.stderr == "shoestring: mlflow: 127.0.0.1:5000: Address already in use\n"
    assert done.stdout == ""
