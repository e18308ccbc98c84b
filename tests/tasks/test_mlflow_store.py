import os
import time
from pathlib import Path
from typing import Any

import pytest

from algorithms.common.errors import InputError
from tasks import mlflow_store
from tests.tasks.runs import FOLDER, close_process, opened, python


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


def test_the_supervisor_closes_a_run_without_importing_mlflow(store: Any, run_dir: Path) -> None:
    experiment = mlflow_store.experiment_id("pretrain")
    abandoned = store.create_run(experiment, tags={"owner_lock": run_dir.name}).info.run_id
    code = """
import sys
from tasks import tracking
assert tracking.main(["close", sys.argv[1], "KILLED"]) == 0
print([name for name in ("mlflow", "sqlalchemy", "torch") if name in sys.modules])
"""
    assert python(code, abandoned).communicate()[0] == "[]\n"
    info = store.get_run(abandoned).info
    assert info.status == "KILLED"
    assert abs(info.end_time / 1000 - time.time()) < 60
    assert close_process(abandoned, "FAILED") == (0, "")
    assert store.get_run(abandoned).info.status == "KILLED", "it had ended"
    returncode, message = close_process("0" * 32, "KILLED")
    assert returncode == 2
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
