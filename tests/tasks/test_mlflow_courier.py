import subprocess
import sys
from pathlib import Path
from typing import Any

from tasks.paths import PROJECT
from tests.tasks.runs import history, opened, row, runs_of, write


def test_more_rows_than_one_batch_takes(store: Any, run_dir: Path) -> None:
    more = {f"more/{index}": 0.0 for index in range(5)}
    write(run_dir, [row(step, 1 / step) | more for step in range(1, 1501)])
    arm = opened(run_dir)
    assert arm.close("FINISHED")
    assert history(store, str(arm.run_id)) == [(step, 1 / step) for step in range(1, 1501)]


CRASHES = """
import json, os, sys
from pathlib import Path
from tasks import mlflow_courier, mlflow_run
save = mlflow_courier.Courier._save
def crash(self, **changes):
    if "sent_step" in changes and changes["sent_step"] >= 0:
        os._exit(9)  # the store has the rows, we do not know yet
    save(self, **changes)
mlflow_courier.Courier._save = crash
run_dir = Path(sys.argv[1])
tags = {"job_id": run_dir.name}
arm = mlflow_run.TrackedRun.open(sys.argv[2], "pretrain", "ddp", run_dir, {"a": 1}, tags)
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
