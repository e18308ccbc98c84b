"""The tracking store: its address, its creation, its experiments and who still writes to it.

By default one sqlite file inside the project. MLflow creates its tables on first use, and several
first users at once would die of `duplicate column name`, so opening a store is done under a lock.
Importing mlflow costs seconds; it happens inside functions, and never just to close a run.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import sqlite3
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from filelock import FileLock, Timeout

from algorithms.common.errors import InputError, one_line
from tasks import environment
from tasks.paths import LOCKS

Status = Literal["FINISHED", "FAILED", "KILLED"]

SQLITE = "sqlite:///"


def tracking_uri() -> str:
    """The user's MLFLOW_TRACKING_URI, else the sqlite file of `environment.set_defaults`."""
    return os.environ["MLFLOW_TRACKING_URI"]


def is_server(uri: str) -> bool:
    return uri.startswith(("http://", "https://"))


def database(uri: str) -> Path | None:
    """File of a sqlite store, None for every other kind."""
    return Path(uri.removeprefix(SQLITE)).absolute() if uri.startswith(SQLITE) else None


def home() -> Path:
    """Folder for what we note about the store: next to its database, else the project's own."""
    file = database(tracking_uri())
    return environment.MLFLOW_HOME if file is None else file.parent


def store_hash() -> str:
    """Names the store without giving away a password in its address."""
    return hashlib.sha256(tracking_uri().encode()).hexdigest()[:16]


def redact(text: str) -> str:
    """One line of at most 300 letters, without the `user:password@` of addresses in it."""
    return one_line(re.sub(r"://[^/@\s]+@", "://", text))[:300]


def page_url() -> str:
    """Address of the server, or where `make ui` shows a local store."""
    uri = tracking_uri()
    return redact(uri).rstrip("/") if is_server(uri) else environment.page(environment.MLFLOW)


def run_url(experiment: str, run_id: str) -> str:
    return f"{page_url()}/#/experiments/{experiment}/runs/{run_id}"


def ensure_store() -> None:
    """Create the database of a local store once; safe for any number of first users at once."""
    client()


def client() -> Any:
    """An `MlflowClient` of the store; shared by the whole process, safe in threads."""
    return _client(tracking_uri())


@functools.cache
def _client(uri: str) -> Any:
    file = database(uri)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
    LOCKS.mkdir(exist_ok=True)
    with FileLock(LOCKS / "mlflow.lock"):
        from mlflow.tracking import MlflowClient

        return MlflowClient(tracking_uri=uri)  # creates the tables of a database without them


def experiment_id(name: str) -> str:
    """Id of the experiment `name`, created if missing, brought back if it was deleted.

    Artifacts of a sqlite store lie next to its database; a server decides for itself.
    """
    store = client()
    found = store.get_experiment_by_name(name)
    if found is None:
        from mlflow.exceptions import MlflowException

        local = database(tracking_uri())
        location = None if local is None else (local.parent / "artifacts" / name).as_uri()
        try:
            return str(store.create_experiment(name, artifact_location=location))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        found = store.get_experiment_by_name(name)  # another process was first
    if found.lifecycle_stage == "deleted":
        store.restore_experiment(found.experiment_id)
    return str(found.experiment_id)


def find_runs(where: str) -> list[Any]:
    """All runs of all experiments that match the filter `where`, deleted ones aside."""
    store = client()
    experiments = [each.experiment_id for each in store.search_experiments()]
    found: list[Any] = []
    token = None
    while experiments:
        page = store.search_runs(experiments, where, page_token=token)
        found += page
        if not (token := page.token):
            break
    return found


def close_abandoned(run_id: str, status: Status) -> None:
    """Set the final status of a run whose owner died. One that has ended, or has found a new
    owner, keeps its own.

    In sqlite by SQL: a supervisor that outlives a killed owner has seconds, and mlflow takes as
    many to import. Raises `InputError` when the store knows no such run.
    """
    file = database(tracking_uri())
    if file is None:
        run = client().get_run(run_id)
        if run.info.status == "RUNNING" and not owned(owner_name(run.data.tags)):
            client().set_terminated(run_id, status)
        return
    try:
        # mode=rw: a database that is not there must not come into being empty
        connection = sqlite3.connect(f"file:{quote(str(file))}?mode=rw", uri=True, timeout=20)
        with closing(connection), connection:
            if connection.execute("SELECT 1 FROM runs WHERE run_uuid = ?", (run_id,)).fetchone():
                query = "SELECT key, value FROM tags WHERE run_uuid = ?"
                if owned(owner_name(dict(connection.execute(query, (run_id,))))):
                    return
                connection.execute(
                    "UPDATE runs SET status = ?, end_time = ? "
                    "WHERE run_uuid = ? AND status = 'RUNNING'",
                    (status, int(time.time() * 1000), run_id),
                )
                return
    except sqlite3.OperationalError as error:
        raise InputError(f"{file}: {error}") from None
    raise InputError(f"{file}: no run {run_id}")


def owner_name(tags: Mapping[str, str]) -> str | None:
    """Name of the run's lock: its job or flow; None for a run that is not ours."""
    return tags.get("owner_lock")


def owner_lock(name: str) -> FileLock:
    """Held by the process that writes the run of job or flow `name`. The kernel drops it at death,
    so unlike a process id it cannot be stale or mean another container's process."""
    folder = home() / "live"
    folder.mkdir(parents=True, exist_ok=True)
    return FileLock(folder / f"{name}.lock", thread_local=False)


def owned(name: str | None) -> bool:
    """Whether a live process holds the lock of `name`."""
    if name is None:
        return False
    lock = owner_lock(name)
    try:
        with lock.acquire(timeout=0):
            return False
    except Timeout:
        return True
