"""MLflow, owned by the parent process; jobs know nothing of it.

One experiment per flow; a flow run is a parent run, an arm a child that follows its run directory
(`ArmRun`). This module is the door: parents, tags, links, and the care of what others left behind.

`python -m tasks.tracking close RUN_ID STATUS` is for the supervisor of an owner that was killed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shlex
import shutil
import subprocess
import sys
import typing
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

from filelock import Timeout

from algorithms.common.errors import InputError, Preempted
from algorithms.common.files import read_json
from tasks import environment, mlflow_store
from tasks.mlflow_run import LOG, STATE, ArmRun, State
from tasks.mlflow_store import (
    Status,
    client,
    ensure_store,
    redact,
    run_url,
    tracking_uri,
)
from tasks.paths import PROJECT, RUNS

__all__ = [
    "ArmRun",
    "Status",
    "arm_run",
    "ensure_store",
    "flatten",
    "log_artifact",
    "parent_run",
    "reconcile",
    "run_url",
    "standard_tags",
    "status_of",
    "sync_pending",
    "ui_command",
]

USAGE = "usage: python -m tasks.tracking close RUN_ID FINISHED|FAILED|KILLED"


@contextlib.contextmanager
def parent_run(flow: str, *, tags: Mapping[str, str]) -> Iterator[ArmRun]:
    """The run of one flow run in experiment `flow`; its `run_id` is the parent of arms.

    Ends FINISHED, or by `status_of` the exception that leaves the block.
    """
    run_dir = mlflow_store.home() / "flows" / f"flow-{uuid.uuid4().hex[:12]}"
    run = ArmRun.open(None, flow, flow, run_dir, {}, tags)
    try:
        with _closing(run):
            yield run
    finally:
        if run.delivered:
            _forget(run_dir)


@contextlib.contextmanager
def arm_run(
    parent: ArmRun,
    *,
    name: str,
    run_dir: Path,
    params: Mapping[str, object],
    tags: Mapping[str, str],
) -> Iterator[ArmRun]:
    """The child run of the job in `run_dir`, in its parent's experiment; ends like `parent_run`."""
    run = ArmRun.open(parent.run_id, parent.experiment, name, run_dir, params, tags)
    with _closing(run):
        yield run


@contextlib.contextmanager
def _closing(run: ArmRun) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        run.close(status_of(error))
        raise
    run.close("FINISHED")


def _forget(run_dir: Path) -> None:
    """A flow's notes are of no use once the store has everything."""
    shutil.rmtree(run_dir)
    Path(mlflow_store.owner_lock(run_dir.name).lock_file).unlink(missing_ok=True)


def status_of(error: BaseException | None) -> Status:
    """FINISHED without an error, FAILED for one, KILLED for an interrupt, exit or preemption."""
    if error is None:
        return "FINISHED"
    stopped = isinstance(error, Preempted) or not isinstance(error, Exception)
    return "KILLED" if stopped else "FAILED"


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
        run = ArmRun(path.parent, state.experiment)
        try:
            run.deliver_orphan()
            count += 1
        except Timeout:
            continue  # its owner lives
        except Exception as error:  # the store is away: what we came for goes on without it
            LOG.warning("%s: MLflow does not answer: %s", path, redact(str(error)))
            break
        finally:
            run.release()
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
    experiments = [e.experiment_id for e in client().search_experiments()]
    killed = []
    for run in _all_running(experiments):
        name = mlflow_store.owner_name(run.data.tags)
        if name is None or mlflow_store.owned(name) or alive(name):
            continue
        mlflow_store.close_abandoned(run.info.run_id, "KILLED")
        killed.append(run.info.run_id)
    return killed


def _all_running(experiments: list[str]) -> list[typing.Any]:
    found: list[typing.Any] = []
    token = None
    while True:
        page = client().search_runs(experiments, "attributes.status = 'RUNNING'", page_token=token)
        found.extend(page)
        token = page.token
        if not token:
            return found


def standard_tags(
    *,
    task_version: str,
    dvc_stage: str | None = None,
    job_id: str | None = None,
    prefect_flow_run: str | None = None,
    root: Path = PROJECT,
) -> dict[str, str]:
    """Tags that say what a run was made from. "none" where there is nothing to say.

    `ArmRun` adds device, world_size, backend and oversubscribed once the job has written env.json.
    Nothing here comes from the environment, so no secret can.
    """
    commit = _git(root, "rev-parse", "HEAD")
    changes = _git(root, "status", "--porcelain")
    tags = {
        "git_commit": commit or "none",
        "git_dirty": "none" if changes is None else str(bool(changes)).lower(),
        "dvc_stage": dvc_stage or "none",
        "dvc_lock": _dvc_lock(root, dvc_stage) if dvc_stage else "none",
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


def _dvc_lock(root: Path, stage: str) -> str:
    """Hash of the stage's entry in dvc.lock: its command, and hashes of all it read and made."""
    from ruamel.yaml import YAML

    path = root / "dvc.lock"
    loaded = YAML(typ="safe", pure=True).load(path.read_text("utf-8")) if path.exists() else None
    entry = ((loaded or {}).get("stages") or {}).get(stage)
    if entry is None:
        return "none"
    return hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest()[:16]


def flatten(values: Mapping[str, typing.Any], prefix: str = "") -> dict[str, object]:
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
    except Exception as error:  # as in ArmRun: whatever ails the store
        LOG.warning("%s: not copied to MLflow: %s", path, redact(str(error)))
        return False
    return True


def ui_command() -> str:
    """Shell command, to be run in the project's folder, that opens the MLflow page."""
    uri = tracking_uri()
    if mlflow_store.is_server(uri):
        return shlex.join([".venv/bin/python", "-m", "webbrowser", redact(uri)])
    page = [".venv/bin/mlflow", "ui", "--host", "127.0.0.1", "--port", "5000", "--workers", "1"]
    silent = "MLFLOW_DISABLE_TELEMETRY=true"  # a shell has not run tasks/environment.py
    return f"{silent} {shlex.join([*page, '--backend-store-uri', uri])}"


def main(arguments: list[str]) -> int:
    environment.prepare()
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
