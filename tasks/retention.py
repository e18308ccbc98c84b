"""What lies in runs/ beyond the limits of params.yaml, and may go.

Nothing goes that a process works in, that a running job reads, that a DVC lock names, that is no
run directory, or that belongs to a run MLflow still has: of such a job only the checkpoints that a
finished one needs no more, and the logs of early attempts. Delete a run on the MLflow page, and its
directory may go too.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from algorithms.common.errors import InputError
from tasks import mlflow_store
from tasks.config import RetentionConfig, load_yaml
from tasks.mlflow_store import redact, tracking_uri
from tasks.paths import PROJECT, RUNS
from tasks.supervisor import attempts

CONFIG = "config.json"
"""What makes a folder a run directory."""


@dataclass(frozen=True)
class Expired:
    """A folder that may go."""

    path: Path
    why: str

    @property
    def bytes(self) -> int:
        """Of all files in it."""
        return sum(file.lstat().st_size for file in self.path.rglob("*") if not file.is_dir())


def expired(
    limits: RetentionConfig, jobs: set[str], runs: Path = RUNS, project: Path = PROJECT
) -> list[Expired]:
    """What is beyond `limits`; `jobs` are the ids of those that MLflow has a run of."""
    found = []
    working = []
    for arm in sorted(path for path in runs.glob("*/*") if path.parent.name != "set"):
        kept = 0
        for job in _newest_first(path for path in arm.glob("*") if (path / CONFIG).is_file()):
            if _in_use(job):
                working.append((job / CONFIG).read_text(encoding="utf-8"))
                continue
            kept += 1
            if kept > limits.runs and job.name not in jobs:
                found.append(Expired(job, "unknown to MLflow"))
            else:
                found += _parts(job, limits)
    for place in _newest_first((runs / "set").glob("*"))[limits.workspaces :]:
        if not any(f"/set/{place.name}/" in config for config in working):
            found.append(Expired(place, "outputs of an old --set"))
    locked = list(_locked(project))
    return [each for each in found if not _touches(each.path, locked)]


def remove(each: Expired) -> bool:
    """Remove it, unless a process has begun to work there; whether it is gone."""
    job = next((path for path in (each.path, *each.path.parents) if _is_job(path)), None)
    with _locking(job) as free:
        if free:
            shutil.rmtree(each.path)
    return free


def jobs_of_mlflow() -> set[str]:
    """Ids of the jobs that a run of the tracking store belongs to, deleted runs aside.

    Raises `InputError` when the store does not answer: then nobody knows.
    """
    file = mlflow_store.database(tracking_uri())
    if file is not None and not file.exists():
        return set()
    try:
        runs = mlflow_store.find_runs("tags.job_id != ''")
    except Exception as error:  # whatever ails the store
        raise InputError(f"MLflow does not answer: {redact(str(error))}") from None
    return {str(run.data.tags["job_id"]) for run in runs}


def _parts(job: Path, limits: RetentionConfig) -> list[Expired]:
    """Of a job that stays."""
    early = [*attempts(job).values()][: -limits.attempts]
    found = [Expired(path, "an early attempt") for path in early]
    if (job / "result.json").exists():
        checkpoints = sorted(job.glob("checkpoints/step_*"), reverse=True)
        found += [Expired(path, "of a finished job") for path in checkpoints[limits.checkpoints :]]
    halves = job.glob("checkpoints/.writing_*")
    return found + [Expired(path, "half written") for path in halves]


def _newest_first(folders: Iterator[Path]) -> list[Path]:
    known = [path for path in folders if path.is_dir() and not path.is_symlink()]
    return sorted(known, key=lambda path: (_touched(path), path.name), reverse=True)


def _touched(folder: Path) -> float:
    """When something was last made in it."""
    return max(path.lstat().st_mtime for path in (folder, *folder.glob("*")))


def _is_job(path: Path) -> bool:
    return (path / CONFIG).is_file() and path.parent.parent.parent.name == RUNS.name


def _in_use(job: Path) -> bool:
    with _locking(job) as free:
        return not free


@contextlib.contextmanager
def _locking(job: Path | None) -> Iterator[bool]:
    """Hold the lock that a job's supervisor holds; False if it does."""
    if job is None or not (job / ".lock").exists():
        yield True
        return
    lock = os.open(job / ".lock", os.O_RDWR)
    try:
        free = True
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            free = False
        yield free
    finally:
        os.close(lock)


def _locked(project: Path) -> Iterator[Path]:
    """Outputs that the DVC locks of the project name."""
    for lock in (project / "dvc.lock", *project.glob("studies/*/dvc.lock")):
        if lock.exists():
            try:
                for stage in load_yaml(lock)["stages"].values():
                    for entry in (*stage.get("outs", ()), *stage.get("deps", ())):
                        yield (lock.parent / entry["path"]).resolve()
            except (AttributeError, KeyError, TypeError):
                raise InputError(f"{lock}: is no lock of DVC") from None


def _touches(path: Path, locked: list[Path]) -> bool:
    """Whether one of `locked` is `path`, lies in it, or holds it."""
    here = path.resolve()
    return any(out.is_relative_to(here) or here.is_relative_to(out) for out in locked)
