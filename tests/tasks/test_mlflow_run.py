import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tasks import environment, mlflow_run, mlflow_store, servers, tracking
from tests.tasks.runs import await_true, history, opened, row, write


def test_forward_is_cheap_and_sends_only_whole_lines(store: Any, run_dir: Path) -> None:
    arm = opened(run_dir)
    write(run_dir, [row(1, 5.0), row(2, 4.0)])
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row(3, 3.0))[:20])
    began = time.perf_counter()
    for _ in range(1000):
        arm.forward()
    assert time.perf_counter() - began < 0.5
    await_true(lambda: history(store, str(arm.run_id)) == [(1, 5.0), (2, 4.0)])
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row(3, 3.0))[20:] + "\n")
    assert arm.close("FINISHED")
    assert history(store, str(arm.run_id)) == [(1, 5.0), (2, 4.0), (3, 3.0)]


def test_a_run_that_another_process_sends_is_left_to_it(
    store: Any, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(run_dir, [row(1, 5.0)])
    with mlflow_store.owner_lock(run_dir.name):
        arm = opened(run_dir)
        assert (arm.run_id, arm.url) == (None, None)
        assert arm.error == f"{run_dir}: another process sends this run to MLflow"
    assert "does not answer" not in caplog.text
    assert arm.close("FINISHED"), "the other is gone"
    assert history(store, str(arm.run_id)) == [(1, 5.0)]


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
    assert "s3cret" not in "".join(servers.where_to_look()) + mlflow_store.run_url("1", "2")


def test_stopped_while_it_waits_for_the_server_the_run_is_killed(
    away: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    with socket.create_server(("127.0.0.1", int(away.rsplit(":", 1)[1]))):  # which never answers
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            opened(run_dir)
        await_true(lambda: not mlflow_store.owned(run_dir.name))
    assert json.loads((run_dir / "mlflow.json").read_text())["status"] == "KILLED"


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
        mlflow_store.client().search_experiments()  # the first question takes a server longest
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
        assert slowest < 0.5, "a dead server takes seconds to answer"
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
