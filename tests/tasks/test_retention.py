"""What may go, and what may not: built run directories, a real store, a real DVC lock."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from algorithms.common.errors import InputError
from tasks import mlflow_store
from tasks.config import RetentionConfig
from tasks.retention import expired, jobs_of_mlflow, remove
from tests.tasks.runs import opened

LIMITS = RetentionConfig(runs=1, workspaces=1, checkpoints=1, attempts=2)


def make_job(
    runs: Path,
    name: str,
    age: int,
    *,
    finished: bool = True,
    arm: str = "ddp",
    checkpoints: int = 3,
) -> Path:
    job = runs / "pretrain_lordo" / arm / name
    for step in range(1, checkpoints + 1):
        (job / "checkpoints" / f"step_{step:08}").mkdir(parents=True)
        (job / "checkpoints" / f"step_{step:08}" / "seal.json").write_text("{}")
    for attempt in (1, 2, 10):
        (job / "logs" / f"attempt_{attempt}").mkdir(parents=True)
        (job / "logs" / f"attempt_{attempt}" / "rank_0.log").write_text("12345")
    (job / "config.json").write_text("{}")
    (job / ".lock").touch()
    if finished:
        (job / "result.json").write_text("{}")
    for path in (*job.glob("*"), job):
        os.utime(path, (1e9 - age, 1e9 - age))
    return job


@contextlib.contextmanager
def at_work(job: Path) -> Iterator[None]:
    """Another process holds the job's lock, as its supervisor does."""
    code = (
        "import fcntl, sys; file = open(sys.argv[1]); fcntl.flock(file, fcntl.LOCK_EX);"
        "print(1, flush=True); sys.stdin.read()"
    )
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code, str(job / ".lock")], **pipes) as worker:
        assert worker.stdout is not None
        worker.stdout.readline()
        yield


def names(runs: Path, jobs: set[str], limits: RetentionConfig = LIMITS) -> set[str]:
    found = expired(limits, jobs, runs, project=runs.parent)
    return {each.path.relative_to(runs).as_posix() for each in found}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def test_without_runs_nothing_goes(runs: Path) -> None:
    assert names(runs, set()) == set()


def test_a_finished_job_keeps_its_newest_checkpoint_and_logs(runs: Path) -> None:
    job = make_job(runs, "one", 0)
    (job / "checkpoints" / ".writing_step_00000009").mkdir()
    here = "pretrain_lordo/ddp/one"
    assert names(runs, {"one"}) == {
        f"{here}/logs/attempt_1",
        f"{here}/checkpoints/step_00000002",
        f"{here}/checkpoints/step_00000001",
        f"{here}/checkpoints/.writing_step_00000009",
    }
    found = expired(LIMITS, {"one"}, runs, project=runs.parent)
    assert {each.bytes for each in found} == {5, 2, 0}
    assert all(remove(each) for each in found)
    assert names(runs, {"one"}) == set()
    kept = {path.relative_to(job).as_posix() for path in job.rglob("*") if path.is_file()}
    assert kept == {
        ".lock",
        "config.json",
        "result.json",
        "checkpoints/step_00000003/seal.json",
        "logs/attempt_2/rank_0.log",
        "logs/attempt_10/rank_0.log",
    }


def test_a_job_that_can_be_resumed_keeps_all_its_checkpoints(runs: Path) -> None:
    make_job(runs, "one", 0, finished=False)
    assert names(runs, set()) == {"pretrain_lordo/ddp/one/logs/attempt_1"}


def test_old_jobs_go_unless_mlflow_has_a_run_of_them(runs: Path) -> None:
    for age, name in enumerate(("new", "old", "older", "oldest")):
        make_job(runs, name, age, checkpoints=0)
    make_job(runs, "other", 9, arm="lordo_global", checkpoints=0)
    whole = {name for name in names(runs, {"older"}) if "logs" not in name}
    assert whole == {"pretrain_lordo/ddp/old", "pretrain_lordo/ddp/oldest"}


def test_a_job_at_work_is_left_alone_and_does_not_count(runs: Path) -> None:
    for age, name in enumerate(("working", "new", "old")):
        make_job(runs, name, age, checkpoints=0)
    before = expired(LIMITS, set(), runs, project=runs.parent)
    with at_work(runs / "pretrain_lordo" / "ddp" / "working"):
        whole = {name for name in names(runs, set()) if "logs" not in name}
        assert whole == {"pretrain_lordo/ddp/old"}
        [logs] = [each for each in before if "working" in str(each.path)]
        assert not remove(logs) and logs.path.exists(), "it began to work in the meantime"


def test_an_old_workspace_that_a_job_at_work_reads_stays(runs: Path) -> None:
    for age, name in enumerate(("new", "read", "old")):
        (runs / "set" / name).mkdir(parents=True)
        os.utime(runs / "set" / name, (1e9 - age, 1e9 - age))
    job = make_job(runs, "working", 0)
    tokens = str(runs / "set" / "read" / "data" / "tokens")
    (job / "config.json").write_text(json.dumps({"tokens_dir": tokens}))
    places = {"set/read", "set/old"}
    assert names(runs, set()) & places == places, "it does not work yet"
    with at_work(job):
        assert names(runs, set()) & places == {"set/old"}


def test_what_a_dvc_lock_names_stays(runs: Path) -> None:
    for age, name in enumerate(("a", "b", "c")):
        (runs / "set" / name / "models").mkdir(parents=True)
        for path in (runs / "set" / name / "models", runs / "set" / name):
            os.utime(path, (1e9 - age, 1e9 - age))
    assert names(runs, set()) == {"set/b", "set/c"}
    lock = {"stages": {"mine": {"cmd": "x", "outs": [{"path": "../../runs/set/b/models"}]}}}
    study = runs.parent / "studies" / "mine"
    study.mkdir(parents=True)
    (study / "dvc.lock").write_text(json.dumps(lock))
    assert names(runs, set()) == {"set/c"}


@pytest.mark.parametrize(
    "text", ["<<<<<<< HEAD", "- a", "stages: 3", "stages: {mine: {outs: [x]}}", "{}", ""]
)
def test_a_damaged_dvc_lock_is_named_and_nothing_goes(runs: Path, text: str) -> None:
    lock = runs.parent / "studies" / "mine" / "dvc.lock"
    lock.parent.mkdir(parents=True)
    lock.write_text(text)
    with pytest.raises(InputError, match=f"^{lock}: "):
        expired(LIMITS, set(), runs, project=runs.parent)


def test_what_is_no_run_directory_stays(runs: Path, tmp_path: Path) -> None:
    """Notes, copies and links that somebody has put there."""
    job = make_job(runs, "new", 0, checkpoints=0)
    make_job(runs, "old", 1, checkpoints=0)
    (tmp_path / "elsewhere" / "mine").mkdir(parents=True)
    (runs / "pretrain_lordo" / "elsewhere").symlink_to(tmp_path / "elsewhere")
    for place in (runs, runs / "pretrain_lordo", runs / "pretrain_lordo" / "ddp", job / "logs"):
        (place / "notes.txt").write_text("mine")
        (place / "copies" / "of" / "mine").mkdir(parents=True)
    (job / "logs" / "attempt_1_copy").mkdir()
    here = "pretrain_lordo/ddp"
    assert names(runs, set()) == {f"{here}/old", f"{here}/new/logs/attempt_1"}
    (runs / "set").write_text("mine")
    assert names(runs, set()) == {f"{here}/old", f"{here}/new/logs/attempt_1"}


def test_mlflow_says_which_jobs_it_has_runs_of(store: Any, run_dir: Path) -> None:
    run = opened(run_dir)
    assert run.close("FINISHED")
    assert run_dir.name in jobs_of_mlflow()
    store.delete_run(run.run_id)
    assert run_dir.name not in jobs_of_mlflow()


def test_a_store_that_is_not_there_is_not_made_and_one_that_is_away_stops_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/none.db")
    assert jobs_of_mlflow() == set()
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://ann:s3cret@127.0.0.1:9")
    monkeypatch.setattr(mlflow_store, "LOCKS", tmp_path)
    with pytest.raises(InputError, match="^MLflow does not answer: ") as caught:
        jobs_of_mlflow()
    assert "s3cret" not in str(caught.value)
