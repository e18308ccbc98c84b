import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from algorithms.common.errors import InputError, Preempted
from tasks import environment, mlflow_store, servers, tracking
from tasks.paths import PROJECT
from tests.tasks.runs import FOLDER, await_true, close_process, history, python, row, write


def test_a_tree_of_runs_with_params_tags_metrics_and_artifacts(store: Any, run_dir: Path) -> None:
    env = {"device": "cpu", "world_size": 2, "backend": "gloo", "oversubscribed": True}
    report = run_dir / "reports"
    report.mkdir()
    (report / "index.html").write_text("<p>")
    with tracking.parent_run("pretrain", tags={"git_commit": "abc"}) as parent:
        assert store.get_run(parent.run_id).info.status == "RUNNING"
        tags = {"job_id": run_dir.name}
        with tracking.arm_run(
            parent, name="ddp", run_dir=run_dir, params={"training.steps": 3}, tags=tags
        ) as arm:
            (run_dir / "env.json").write_text(json.dumps(env | {"torch": "2.13.0"}))
            write(run_dir, [row(1, 5.5, time=1234.5678), row(2, 5.0) | {"val/loss": 4.5}])
        assert tracking.log_artifact(parent.run_id, report)
    top, child = store.get_run(parent.run_id), store.get_run(arm.run_id)
    assert (top.info.status, child.info.status) == ("FINISHED", "FINISHED")
    assert top.data.tags["git_commit"] == "abc"
    assert child.data.tags["mlflow.parentRunId"] == parent.run_id
    assert child.info.run_name == "ddp"
    assert child.info.experiment_id == top.info.experiment_id
    assert child.data.params == {"training.steps": "3"}
    words = {"device": "cpu", "world_size": "2", "backend": "gloo", "oversubscribed": "true"}
    assert words.items() <= child.data.tags.items()
    assert set(child.data.metrics) == {"tokens", "train/loss", "val/loss", "comm/payload_bytes"}
    assert child.data.metrics["comm/payload_bytes"] == 8e12
    first = min(store.get_metric_history(arm.run_id, "train/loss"), key=lambda m: m.step)
    assert (first.step, first.value, first.timestamp) == (1, 5.5, 1_234_567)
    assert [f.path for f in store.list_artifacts(parent.run_id)] == ["index.html"]
    assert FOLDER in str(mlflow_store.home())
    assert (mlflow_store.home() / "artifacts" / "pretrain" / str(parent.run_id)).is_dir()
    assert list((mlflow_store.home() / "flows").iterdir()) == []
    assert arm.url == f"http://127.0.0.1:5000/#/experiments/1/runs/{arm.run_id}"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (None, "FINISHED"),
        (RuntimeError("rank 1"), "FAILED"),
        (Preempted(), "KILLED"),
        (KeyboardInterrupt(), "KILLED"),
        (SystemExit(1), "KILLED"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_the_exception_decides_the_status(
    store: Any, error: BaseException | None, status: str
) -> None:
    def flow() -> None:
        nonlocal run_id
        with tracking.parent_run("prepare", tags={}) as run:
            run_id = run.run_id
            if error is not None:
                raise error

    run_id = None
    if error is None:
        flow()
    else:
        with pytest.raises(type(error)):
            flow()
    assert store.get_run(run_id).info.status == status


OWNER = """
import sys, time
from pathlib import Path
from tasks import tracking
run_dir = Path(sys.argv[1])
with tracking.parent_run("pretrain", tags={}) as parent:
    with tracking.arm_run(
        parent, name="ddp", run_dir=run_dir, params={}, tags={"job_id": run_dir.name}
    ) as arm:
        print(parent.run_id, arm.run_id, flush=True)
        time.sleep(600)
"""


@pytest.fixture
def owner(store: Any, run_dir: Path) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """A process that runs a flow with one arm; its parent and child run."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(run_dir)], cwd=PROJECT, text=True, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    parent, child = process.stdout.readline().split()
    yield process, parent, child
    process.kill()
    process.communicate()


def test_what_a_killed_owner_left_is_sent_and_ended(
    store: Any, run_dir: Path, owner: tuple[subprocess.Popen[str], str, str]
) -> None:
    process, parent, child = owner
    runs = run_dir.parents[2]
    write(run_dir, [row(1, 5.0), row(2, 4.0)])
    assert tracking.sync_pending(runs) == 0, "its owner lives"
    assert tracking.reconcile() == []
    process.send_signal(signal.SIGKILL)
    process.wait()
    # The job still has a process, as when a supervisor is stopping it: hands off.
    job = python("import time; time.sleep(600)", env={**os.environ, "SHOESTRING_JOB": run_dir.name})
    await_true(lambda: Path(f"/proc/{job.pid}/cmdline").read_bytes().endswith(b"(600)\0"))
    assert tracking.sync_pending(runs) == 1, "only the flow's own run"
    assert child not in tracking.reconcile()
    assert store.get_run(child).info.status == "RUNNING"
    job.kill()
    job.communicate()
    assert close_process(child, "FAILED")[0] == 0, "the supervisor's last act"
    assert tracking.sync_pending(runs) == 1
    assert history(store, child) == [(1, 5.0), (2, 4.0)]
    assert [store.get_run(run).info.status for run in (parent, child)] == ["KILLED", "FAILED"]
    assert tracking.sync_pending(runs) == 0, "nothing is left to do"
    (run_dir / "mlflow.json").write_text('{"of": "another version"}')
    assert tracking.sync_pending(runs) == 0, "and nothing is stopped by a file that is strange"


def test_reconcile_ends_runs_whose_directory_is_gone(
    store: Any, run_dir: Path, owner: tuple[subprocess.Popen[str], str, str]
) -> None:
    process, parent, child = owner
    stranger = store.create_run(mlflow_store.experiment_id("pretrain")).info.run_id
    process.send_signal(signal.SIGINT)
    process.wait()
    assert [store.get_run(run).info.status for run in (parent, child)] == ["KILLED", "KILLED"]
    for run in (parent, child):
        store.update_run(run, status="RUNNING")
    (run_dir / "mlflow.json").unlink()
    assert sorted(tracking.reconcile()) == sorted([parent, child])
    assert [store.get_run(run).info.status for run in (parent, child)] == ["KILLED", "KILLED"]
    assert store.get_run(stranger).info.status == "RUNNING", "not ours"


def test_tags_say_what_a_run_was_made_from(tmp_path: Path) -> None:
    none = tracking.standard_tags(task_version="1", dvc_stage="tokens", root=tmp_path)
    assert none == {
        "git_commit": "none",
        "git_dirty": "none",
        "dvc_stage": "tokens",
        "dvc_lock": "none",
        "prefect_flow_run": "none",
        "task_version": "1",
    }
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    lock = (
        "schema: '2.0'\nstages:\n  tokens:\n    cmd: x\n    outs:\n    - path: a\n      md5: {}\n"
    )
    (tmp_path / "dvc.lock").write_text(lock.format(1))
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *command], check=True)
    clean = tracking.standard_tags(
        task_version="1", locked=["tokens"], job_id="j", prefect_flow_run="f", root=tmp_path
    )
    assert len(clean["git_commit"]) == 40
    assert clean["git_dirty"] == "false"
    assert (clean["job_id"], clean["prefect_flow_run"]) == ("j", "f")
    (tmp_path / "dvc.lock").write_text(lock.format(2))
    changed = tracking.standard_tags(task_version="1", locked=["tokens"], root=tmp_path)
    assert changed["git_dirty"] == "true"
    assert changed["dvc_lock"] != clean["dvc_lock"] != "none"
    other = tracking.standard_tags(task_version="1", locked=["tokens", "b"], root=tmp_path)
    assert other["dvc_lock"] == "none"


def test_the_commands_open_the_projects_own_pages_on_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("MLFLOW_TRACKING_URI", "PREFECT_HOME"):
        monkeypatch.setenv(name, environment.DEFAULTS[name])
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    mlflow, prefect, _, *commands = servers.where_to_look()
    assert (mlflow, prefect) == ("MLflow:  http://127.0.0.1:5000", "Prefect: http://127.0.0.1:4200")
    assert commands == [
        "MLFLOW_DISABLE_TELEMETRY=true .venv/bin/mlflow ui --host 127.0.0.1"
        " --backend-store-uri sqlite:///.mlflow/mlflow.db",
        "PREFECT_SERVER_ANALYTICS_ENABLED=false PREFECT_HOME=.prefect"
        " .venv/bin/prefect server start --host 127.0.0.1",
    ]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql://ann:s3cret@host/db")
    assert servers.where_to_look()[3].endswith('--backend-store-uri "$MLFLOW_TRACKING_URI"')


def test_servers_of_the_user_have_pages_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://ann:s3cret@mlflow.example/")
    monkeypatch.setenv("PREFECT_API_URL", "https://prefect.example/api")
    assert servers.where_to_look() == [
        "MLflow:  https://mlflow.example",
        "Prefect: https://prefect.example",
    ]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(servers, "PREFECT", taken.getsockname())
        with pytest.raises(InputError, match="^prefect: .* already in use"), servers.pages(print):
            pass  # so no page of MLflow was started before
