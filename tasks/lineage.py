"""DVC through its Python API: is a stage up to date, and record what it made.

DVC is the one truth about that; `dvc repro` and the flows walk the same stages. DVC fails at once
when another process holds its lock, so every call here waits for ours, and retries while a DVC
command of the user's own is at work.

`dvc repro` holds DVC's lock while its stage waits for `stage_lock`; so nobody may wait for DVC
without bound while holding a stage lock.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout

from algorithms.common.errors import InputError, one_line
from tasks.paths import LOCKS, PROJECT, Workspace

T = TypeVar("T")

log = logging.getLogger("shoestring")

PATIENCE_S = 600.0
"""How long to wait for a DVC command of somebody else, such as a running `dvc repro`."""


@contextlib.contextmanager
def stage_lock(stage: str, workspace: Workspace) -> Iterator[None]:
    """Held while a stage's outputs are checked and made, by flows and by `dvc repro` alike."""
    LOCKS.mkdir(exist_ok=True)
    place = "" if workspace == Workspace() else f"{workspace.root.name}-"
    lock = FileLock(LOCKS / f"stage-{place}{stage.replace('/', '-')}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        log.warning("%s is being made by another process; waiting for it", stage)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


class Busy(InputError):
    """Another process holds DVC's lock for longer than the caller would wait."""


def stale(*stages: str, patience_s: float = PATIENCE_S, root: Path = PROJECT) -> list[str]:
    """Why these are not up to date, one reason an entry; empty when all are. Raises `Busy`.

    A stage is named as DVC addresses it: tokens, pretrain_lordo@ddp, or FILE:NAME for one of
    another file than dvc.yaml.
    """
    status = _call(root, patience_s, lambda repo: repo.status(targets=list(stages)))
    return [reason for name in stages for e in status.get(name, []) for reason in _reasons(e)]


def record(stage: str, *, patience_s: float = PATIENCE_S, root: Path = PROJECT) -> None:
    """Take what `stage` made into DVC's cache and the lock beside its file, as `dvc repro` would.
    Raises `Busy`."""
    _call(root, patience_s, lambda repo: repo.commit(target=stage, force=True))


def _reasons(entry: Any) -> list[str]:
    if isinstance(entry, str):  # "changed command", "always changed"
        return [entry]
    return [
        f"{path} is {what}" if isinstance(what, str) else f"{path}: {', '.join(what)} changed"
        for changes in entry.values()
        for path, what in changes.items()
    ]


@contextlib.contextmanager
def _ours(patience_s: float) -> Iterator[None]:
    """Our own lock around DVC. Raises `Busy`."""
    LOCKS.mkdir(exist_ok=True)
    lock = FileLock(LOCKS / "dvc.lock")
    try:
        lock.acquire(timeout=patience_s)
    except Timeout:
        raise Busy("dvc is busy in another process of this project") from None
    try:
        yield
    finally:
        lock.release()


def _call(root: Path, patience_s: float, act: Callable[[Any], T]) -> T:
    from dvc.exceptions import DvcException, NotDvcRepoError
    from dvc.lock import LockError
    from dvc.repo import Repo
    from dvc.rwlock import RWLockFileCorruptedError

    for name in ("dvc", "dvc_data", "dvc_objects"):  # its progress notes are not our user's
        logging.getLogger(name).setLevel(logging.ERROR)
    deadline = time.monotonic() + patience_s
    with _ours(patience_s):
        while True:
            try:
                # DVC resolves names of stages, and its run cache, against the current folder.
                with contextlib.chdir(root), Repo() as repo:
                    return act(repo)
            except LockError as error:
                if time.monotonic() > deadline:
                    raise Busy(f"dvc is busy in another process: {error}") from None
                time.sleep(1.0)
            except RWLockFileCorruptedError:
                raise InputError(
                    f"{root / '.dvc/tmp/rwlock'}: damaged, as by a dvc command that is killed"
                    " while it writes; remove it when none is at work"
                ) from None
            except NotDvcRepoError:
                raise InputError(
                    f"{root}: not a git checkout with DVC; clone the project"
                ) from None
            except DvcException as error:
                raise InputError(f"dvc.yaml: {one_line(error)}") from error
