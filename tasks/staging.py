"""Output folders that are whole or absent: built beside, moved in with one rename."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from algorithms.common.errors import InputError
from algorithms.common.files import sync_directory


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """A new empty folder beside `out` that takes its place when the block ends well.

    When the block raises, the folder is removed and `out` is as it was. What a killed run left is
    removed on the next start; the lock goes with its process, so a leftover is never in use.
    Raises `InputError` when another process is building `out`.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    new = out.with_name(f".{out.name}.new")
    old = out.with_name(f".{out.name}.old")
    lock = FileLock(out.with_name(f".{out.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise InputError(f"{out}: another process is building it") from None
    try:
        if old.exists() and not out.exists():  # killed between the two renames below
            old.rename(out)
        shutil.rmtree(old, ignore_errors=True)
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        try:
            yield new
        except BaseException:
            shutil.rmtree(new)
            raise
        if out.exists():
            out.rename(old)
        new.rename(out)
        sync_directory(out.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        lock.release()
