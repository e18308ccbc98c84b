import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from algorithms.common.errors import InputError, Preempted
from tasks import environment, mlflow_run, mlflow_store, tracking
from tasks.mlflow_run import ArmRun, MetricsFile
from tasks.paths import PROJECT

FOLDER = "Räume und 100 %"  # spaces, letters beyond ASCII, and what URLs and alembic treat apart


@pytest.fixture(scope="module")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("store") / FOLDER
    return f"sqlite:///{folder / 'mlflow.db'}"


@pytest.fixture
def store(shared_store: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The MlflowClient of a store that all tests of this file share."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", shared_store)
    tracking.ensure_store()
    return mlflow_store.client()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "pretrain_lordo" / "ddp" / f"job{os.urandom(4).hex()}"
    folder.mkdir(parents=True)
    return folder


def row(step: int, loss: float, time: float = 0.0) -> dict[str, float]:
    return {
        "step": step,
        "time": time or 1000.0 + step,
        "elapsed": float(step),
        "tokens": 2048 * step,
        "train/loss": loss,
        "comm/payload_bytes": 4_000_000_000_000 * step,
    }


def write(run_dir: Path, rows: list[dict[str, float]], mode: str = "a") -> None:
    with (run_dir / "metrics.jsonl").open(mode) as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def opened(run_dir: Path, parent: str | None = None, **tags: str) -> ArmRun:
    params = tracking.flatten({"training": {"steps": 3, "extra": {"a": 1}}, "arm": "ddp"})
    return ArmRun.open(parent, "pretrain", "ddp", run_dir, params, {"job_id": run_dir.name, **tags})


def history(store: Any, run_id: str, key: str = "train/loss") -> list[tuple[int, float]]:
    return sorted((m.step, m.value) for m in store.get_metric_history(run_id, key))


def await_true(condition: Any, timeout_s: float = 20.0) -> None:
    give_up = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up, "waited too long"
        time.sleep(0.05)


def python(code: str, **more: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=PROJECT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        **more,
    )


@pytest.mark.slow
def test_six_first_users_at_once(tmp_path: Path) -> None:
    code = """
from tasks import mlflow_store
mlflow_store.ensure_store()
print("experiment", mlflow_store.experiment_id("pretrain"))
"""
    uri = f"sqlite:///{tmp_path / FOLDER / 'mlflow.db'}"
    users = [python(code, env={**os.environ, "MLFLOW_TRACKING_URI": uri}) for _ in range(6)]
    outputs = {user.communicate()[0] for user in users}
    assert outputs == {"experiment 1\n"}, outputs


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


def test_forward_is_cheap_and_sends_only_whole_lines(store: Any, run_dir: Path) -> None:
    arm = opened(run_dir)
    write(run_dir, [row(1, 5.0), row(2, 4.0)])
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row(3, 3.0))[:20])
    began = time.perf_counter()
    for _ in range(1000):
        arm.forward()
    assert time.perf_counter() - began < 0.1
    await_true(lambda: history(store, str(arm.run_id)) == [(1, 5.0), (2, 4.0)])
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row(3, 3.0))[20:] + "\n")
    assert arm.close("FINISHED")
    assert history(store, str(arm.run_id)) == [(1, 5.0), (2, 4.0), (3, 3.0)]


def test_more_rows_than_one_batch_takes(store: Any, run_dir: Path) -> None:
    write(run_dir, [row(step, 1 / step) for step in range(1, 1501)])
    arm = opened(run_dir)
    assert arm.close("FINISHED")
    assert history(store, str(arm.run_id)) == [(step, 1 / step) for step in range(1, 1501)]


def test_a_file_that_was_cut_and_grew_past_its_old_end(run_dir: Path) -> None:
    metrics = MetricsFile(run_dir / "metrics.jsonl")
    assert metrics.rows(after=-1) == []
    write(run_dir, [row(1, 5.0), row(2, 4.0), row(3, 3.0)])
    assert [r["step"] for r in metrics.rows(after=-1)] == [1, 2, 3]
    again = [row(step, 0.5, time=9000.0 + step) for step in (2, 3, 4)]
    write(run_dir, [row(1, 5.0), *again], mode="w")
    assert metrics.rows(after=3) == [again[-1]]
    write(run_dir, [row(1, 5.0)], mode="w")
    assert metrics.rows(after=4) == []


CRASHES = """
import json, os, sys
from pathlib import Path
from tasks import mlflow_run
save = mlflow_run.ArmRun._save
def crash(self, **changes):
    if "sent_step" in changes and changes["sent_step"] >= 0:
        os._exit(9)  # the store has the rows, we do not know yet
    save(self, **changes)
mlflow_run.ArmRun._save = crash
run_dir = Path(sys.argv[1])
tags = {"job_id": run_dir.name}
arm = mlflow_run.ArmRun.open(sys.argv[2], "pretrain", "ddp", run_dir, {"a": 1}, tags)
arm.close("FINISHED")
"""


def test_no_step_twice_after_a_crash_while_sending(store: Any, run_dir: Path) -> None:
    write(run_dir, [row(1, 5.0), row(2, 4.0), row(3, 3.0)])
    crashed = subprocess.run(
        [sys.executable, "-c", CRASHES, str(run_dir), "0" * 32], cwd=PROJECT, capture_output=True
    )
    assert crashed.returncode == 9, crashed.stderr
    # The job went back to its checkpoint of step 1, and repeats steps 2 and 3 at other times.
    write(run_dir, [row(1, 5.0), row(2, 4.0, 7e3), row(3, 3.0, 8e3), row(4, 2.0)], mode="w")
    arm = opened(run_dir, parent="1" * 32)
    assert arm.close("FINISHED")
    run = store.get_run(arm.run_id)
    assert history(store, run.info.run_id) == [(1, 5.0), (2, 4.0), (3, 3.0), (4, 2.0)]
    assert run.data.tags["mlflow.parentRunId"] == "1" * 32
    assert run.data.tags["restart_count"] == "1"
    assert run.info.status == "FINISHED"
    assert len(runs_of(store, run_dir)) == 1


def runs_of(store: Any, run_dir: Path) -> list[Any]:
    experiments = [e.experiment_id for e in store.search_experiments()]
    return list(store.search_runs(experiments, f"tags.job_id = '{run_dir.name}'"))


def test_resume_reattaches_unless_the_run_was_deleted(store: Any, run_dir: Path) -> None:
    write(run_dir, [row(1, 5.0)])
    first = opened(run_dir)
    assert first.close("KILLED")
    second = opened(run_dir)
    assert second.run_id == first.run_id
    assert store.get_run(first.run_id).info.status == "RUNNING"
    write(run_dir, [row(2, 4.0)])
    assert second.close("FAILED")
    assert store.get_run(first.run_id).info.status == "FAILED"
    store.delete_run(first.run_id)
    third = opened(run_dir)
    assert third.close("FINISHED")
    assert third.run_id != first.run_id
    assert history(store, str(third.run_id)) == [(1, 5.0), (2, 4.0)]
    assert store.get_run(third.run_id).data.tags["restart_count"] == "2"


def close_process(run_id: str, status: str) -> tuple[int, str, float]:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "tasks.tracking", "close", run_id, status],
        cwd=PROJECT,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stderr, time.monotonic() - began


def test_the_supervisor_closes_a_run_without_importing_mlflow(store: Any, run_dir: Path) -> None:
    experiment = mlflow_store.experiment_id("pretrain")
    abandoned = store.create_run(experiment, tags={"owner_lock": run_dir.name}).info.run_id
    code, _, seconds = close_process(abandoned, "KILLED")
    assert code == 0
    assert seconds < 1.5
    info = store.get_run(abandoned).info
    assert info.status == "KILLED"
    assert abs(info.end_time / 1000 - time.time()) < 60
    assert close_process(abandoned, "FAILED")[0] == 0
    assert store.get_run(abandoned).info.status == "KILLED", "it had ended"
    code, message, _ = close_process("0" * 32, "KILLED")
    assert code == 2
    assert message.count("\n") == 1 and "no run" in message
    assert close_process(abandoned, "DONE")[0] == 2


def test_the_supervisor_leaves_a_run_that_was_resumed(store: Any, run_dir: Path) -> None:
    arm = opened(run_dir)
    assert arm.close_command("KILLED")[1:] == [
        "-m",
        "tasks.tracking",
        "close",
        arm.run_id,
        "KILLED",
    ]
    assert close_process(str(arm.run_id), "KILLED")[0] == 0
    assert store.get_run(arm.run_id).info.status == "RUNNING"
    assert arm.close("FINISHED")


def test_close_makes_no_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/none.db")
    with pytest.raises(InputError, match=r"none\.db"):
        mlflow_store.close_abandoned("0" * 32, "KILLED")
    assert list(tmp_path.iterdir()) == []


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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Address of a server that does not run, with a password in it."""
    uri = f"http://ann:s3cret@127.0.0.1:{free_port()}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setattr(environment, "MLFLOW_HOME", tmp_path / ".mlflow")
    monkeypatch.setattr(mlflow_run, "PATIENCE_S", 2.0)
    return uri


def test_a_server_that_never_comes_back_stops_nobody(
    away: str, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="shoestring.tracking")
    began = time.monotonic()
    arm = opened(run_dir)
    write(run_dir, [row(1, 5.0)])
    assert arm.run_id is None and arm.close_command("KILLED") == []
    for _ in range(100):
        arm.forward()
    assert arm.close("FINISHED") is False
    assert time.monotonic() - began < 15
    # Until the thread is done with its last request it owns the run, then the next start may.
    await_true(lambda: not mlflow_store.owned(run_dir.name))
    assert tracking.sync_pending(run_dir.parents[2]) == 0
    assert tracking.log_artifact("0" * 32, run_dir) is False
    state = json.loads((run_dir / "mlflow.json").read_text())
    assert (state["status"], state["done"], state["sent_step"]) == ("FINISHED", False, -1)
    everything = caplog.text + (run_dir / "mlflow.json").read_text() + str(arm.error)
    assert "s3cret" not in everything
    assert caplog.text.count("will be retried") == 1
    assert "s3cret" not in tracking.ui_command() + mlflow_store.run_url("1", "2")


def serve(uri: str, database: Path, log: Path) -> subprocess.Popen[str]:
    host, port = "127.0.0.1", uri.rsplit(":", 1)[1]
    mlflow = [str(Path(sys.executable).with_name("mlflow")), "server", "--workers", "1"]
    store = ["--backend-store-uri", f"sqlite:///{database}"]
    server = subprocess.Popen(
        [*mlflow, "--host", host, "--port", port, *store],
        stdout=log.open("a"),
        stderr=subprocess.STDOUT,
        text=True,
        cwd=database.parent,
        start_new_session=True,
    )

    def up() -> bool:
        assert server.poll() is None, log.read_text()
        with socket.socket() as probe:
            return probe.connect_ex((host, int(port))) == 0

    await_true(up, timeout_s=120)
    return server


@pytest.mark.slow
def test_a_server_that_goes_away_and_comes_back_gets_everything(
    away: str, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_run, "LONGEST_PAUSE_S", 4.0)
    monkeypatch.setattr(mlflow_run, "PATIENCE_S", 20.0)
    log = tmp_path / "server.log"
    server = serve(away, tmp_path / "server.db", log)
    slowest = 0.0
    try:
        arm = opened(run_dir)
        assert arm.run_id is not None
        for step in range(1, 121):  # 24 seconds of a job
            write(run_dir, [row(step, 1 / step)])
            if step == 30:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()
            if step == 60:
                server = serve(away, tmp_path / "server.db", log)
            began = time.perf_counter()
            arm.forward()
            slowest = max(slowest, time.perf_counter() - began)
            time.sleep(0.2)
        assert arm.close("FINISHED"), arm.error
        client = mlflow_store.client()
        assert client.get_run(arm.run_id).info.status == "FINISHED"
        assert history(client, arm.run_id) == [(step, 1 / step) for step in range(1, 121)]
        assert slowest < 0.05
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


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
        task_version="1", dvc_stage="tokens", job_id="j", prefect_flow_run="f", root=tmp_path
    )
    assert len(clean["git_commit"]) == 40
    assert clean["git_dirty"] == "false"
    assert (clean["job_id"], clean["prefect_flow_run"]) == ("j", "f")
    (tmp_path / "dvc.lock").write_text(lock.format(2))
    changed = tracking.standard_tags(task_version="1", dvc_stage="tokens", root=tmp_path)
    assert changed["git_dirty"] == "true"
    assert changed["dvc_lock"] != clean["dvc_lock"] != "none"
    assert (
        tracking.standard_tags(task_version="1", dvc_stage="b", root=tmp_path)["dvc_lock"] == "none"
    )


def test_the_page_opens_on_loopback_without_telemetry(store: Any) -> None:
    command = tracking.ui_command()
    assert "--host 127.0.0.1" in command
    assert "MLFLOW_DISABLE_TELEMETRY=true" in command
    assert f"'{os.environ['MLFLOW_TRACKING_URI']}'" in command, "quoted for the shell"
