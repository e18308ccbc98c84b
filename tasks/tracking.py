"""MLflow, owned by the parent process; jobs know nothing of it.

One experiment per flow; a flow run is a parent run, an arm a child that follows its run directory.
This module is the door: runs, tags, artifacts, and the care of what others left behind.

`python -m tasks.tracking close RUN_ID STATUS` is for the supervisor of an owner that was killed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import Timeout

from algorithms.common.errors import InputError, Preempted
from algorithms.common.files import read_json, write_json
from tasks import environment, mlflow_store
from tasks.mlflow_courier import STATE, Courier, State
from tasks.mlflow_run import LOG, TrackedRun
from tasks.mlflow_store import Status, client, ensure_store, redact, tracking_uri
from tasks.paths import PROJECT, RUNS

__all__ = [
    "TrackedRun",
    "adopt",
    "arm_run",
    "ensure_store",
    "flatten",
    "log_artifact",
    "log_table",
    "parent_run",
    "reconcile",
    "standard_tags",
    "sync_pending",
]

USAGE = "usage: python -m tasks.tracking close RUN_ID FINISHED|FAILED|KILLED"


@contextlib.contextmanager
def parent_run(flow: str, *, tags: Mapping[str, str]) -> Iterator[TrackedRun]:
    """The run of one flow run in experiment `flow`; its `run_id` is the parent of arms.

    Ends FINISHED; FAILED when an error leaves the block, KILLED when an interrupt, an exit or a
    preemption does.
    """
    run_dir = mlflow_store.home() / "flows" / f"flow-{uuid.uuid4().hex[:12]}"
    run = TrackedRun.open(None, flow, flow, run_dir, {}, tags)
    try:
        with _closing(run):
            yield run
    finally:
        if run.delivered:
            _forget(run_dir)


@contextlib.contextmanager
def arm_run(
    parent: TrackedRun,
    *,
    name: str,
    run_dir: Path,
    params: Mapping[str, object],
    tags: Mapping[str, str],
) -> Iterator[TrackedRun]:
    """The child run of the job in `run_dir`, in its parent's experiment; ends like `parent_run`."""
    run = TrackedRun.open(parent.run_id, parent.experiment, name, run_dir, params, tags)
    with _closing(run):
        yield run


def adopt(run_dir: Path, parent: TrackedRun) -> bool:
    """Make the run of a job that is done a child of `parent`; whether that worked.

    A store that is away costs a warning, as everywhere.
    """
    path = run_dir / STATE
    run_id = read_json(path)["run_id"] if path.exists() else None
    if run_id is None or parent.run_id is None:
        return False
    try:
        client().set_tag(run_id, "mlflow.parentRunId", parent.run_id)
        client().update_run(run_id, status="FINISHED")  # its flow may have ended before it said so
    except Exception as error:  # or deleted by the user
        LOG.warning("%s: not moved in MLflow: %s", run_dir, redact(str(error)))
        return False
    return True


@contextlib.contextmanager
def _closing(run: TrackedRun) -> Iterator[None]:
    status: Status = "FINISHED"
    try:
        yield
    except BaseException as error:
        stopped = isinstance(error, Preempted) or not isinstance(error, Exception)
        status = "KILLED" if stopped else "FAILED"
        raise
    finally:
        run.close(status)


def _forget(run_dir: Path) -> None:
    """A flow's notes are of no use once the store has everything."""
    shutil.rmtree(run_dir)
    Path(mlflow_store.owner_lock(run_dir.name).lock_file).unlink(missing_ok=True)


def sync_pending(runs: Path = RUNS) -> int:
    """Send what earlier processes could not, end what they left open; how many runs that were.

    A run whose owner died before it could say how it ended is KILLED. The first failure of the
    store is logged and ends the round; the next start tries again.
    """
    from tasks.processes import alive

    count = 0
    flows = mlflow_store.home() / "flows"
    for path in sorted([*runs.glob(f"*/*/*/{STATE}"), *flows.glob(f"*/{STATE}")]):
        try:
            state = State(**read_json(path))
        except (TypeError, ValueError) as error:
            LOG.warning("%s: not what this version writes, left alone: %s", path, error)
            continue
        if state.done or state.store != mlflow_store.store_hash():
            continue
        if state.status is None and alive(path.parent.name):
            continue
        courier = Courier(path.parent)
        try:
            courier.deliver_orphan()
            count += 1
        except Timeout:
            continue  # its owner lives
        except Exception as error:  # the store is away: what we came for goes on without it
            LOG.warning("%s: MLflow does not answer: %s", path, redact(str(error)))
            break
        finally:
            courier.release()
        if path.parent.parent == flows:
            _forget(path.parent)
    return count


def reconcile() -> list[str]:
    """Set RUNNING runs of ours in a local store to KILLED when nobody works on them; their ids.

    Catches what `sync_pending` cannot see: runs whose run directory is gone. A server may hold
    runs of other machines, so nothing is touched there.
    """
    from tasks.processes import alive

    file = mlflow_store.database(tracking_uri())
    if file is None or not file.exists():
        return []
    killed = []
    for run in mlflow_store.find_runs("attributes.status = 'RUNNING'"):
        name = mlflow_store.owner_name(run.data.tags)
        if name is None or mlflow_store.owned(name) or alive(name):
            continue
        mlflow_store.close_abandoned(run.info.run_id, "KILLED")
        killed.append(run.info.run_id)
    return killed


def standard_tags(
    *,
    task_version: str,
    dvc_stage: str | None = None,
    locked: Sequence[str] = (),
    job_id: str | None = None,
    prefect_flow_run: str | None = None,
    root: Path = PROJECT,
) -> dict[str, str]:
    """Tags that say what a run was made from. "none" where there is nothing to say.

    `locked` names the DVC stages whose entries in dvc.lock identify what it reads.

    A job's run gets device, world_size, backend and oversubscribed too once env.json is there.
    Nothing here comes from the environment, so no secret can.
    """
    commit = _git(root, "rev-parse", "HEAD")
    changes = _git(root, "status", "--porcelain")
    tags = {
        "git_commit": commit or "none",
        "git_dirty": "none" if changes is None else str(bool(changes)).lower(),
        "dvc_stage": dvc_stage or "none",
        "dvc_lock": _dvc_lock(root, locked),
        "prefect_flow_run": prefect_flow_run or "none",
        "task_version": task_version,
    }
    return tags if job_id is None else {**tags, "job_id": job_id}


def _git(root: Path, *arguments: str) -> str | None:
    """Output of a git command, None outside a repository or without git."""
    command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _dvc_lock(root: Path, stages: Sequence[str]) -> str:
    """Hash of these stages' entries in dvc.lock: their commands, and hashes of what they made."""
    from ruamel.yaml import YAML

    path = root / "dvc.lock"
    loaded = YAML(typ="safe", pure=True).load(path.read_text("utf-8")) if path.exists() else None
    entries = (loaded or {}).get("stages") or {}
    if not stages or any(stage not in entries for stage in stages):
        return "none"
    described = json.dumps([entries[stage] for stage in stages], sort_keys=True)
    return hashlib.sha256(described.encode()).hexdigest()[:16]


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """{"a": {"b": 1}} -> {"a.b": 1}: a config's `to_dict` as MLflow params."""
    flat: dict[str, object] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def log_artifact(run_id: str | None, path: Path) -> bool:
    """Copy a file, or all that is in a folder, into a run's artifacts; whether that worked.

    A store that is away costs a warning, as everywhere.
    """
    if run_id is None:
        return False
    try:
        copy = client().log_artifacts if path.is_dir() else client().log_artifact
        copy(run_id, str(path))
    except Exception as error:  # as in TrackedRun: whatever ails the store
        LOG.warning("%s: not copied to MLflow: %s", path, redact(str(error)))
        return False
    return True


def log_table(run_id: str | None, rows: Sequence[Mapping[str, object]], path: Path) -> bool:
    """Write rows of equal keys to `path` as MLflow keeps tables, and copy that into a run's
    artifacts, whose page shows it; whether that worked."""
    columns = list(rows[0])
    write_json(path, {"columns": columns, "data": [[row[key] for key in columns] for row in rows]})
    if not log_artifact(run_id, path):
        return False
    assert run_id is not None
    tables = json.dumps([{"path": path.name, "type": "table"}])
    client().set_tag(run_id, "mlflow.loggedArtifacts", tables)
    return True


def main(arguments: list[str]) -> int:
    environment.set_defaults()
    match arguments:
        case ["close", run_id, ("FINISHED" | "FAILED" | "KILLED") as status]:
            try:
                mlflow_store.close_abandoned(run_id, status)
            except InputError as error:
                print(f"shoestring: {error}", file=sys.stderr)
                return 2
            return 0
        case _:
            print(USAGE, file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
