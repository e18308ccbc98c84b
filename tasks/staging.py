"""Output folders that are whole or absent: built beside, moved in with one rename."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from algorithms.common.files import replace_folder, retired


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """A new empty folder beside `out` that takes its place when the block ends well.

    When the block raises, the folder is removed and `out` is as it was. What a killed run left is
    removed on the next start. The caller holds the lock of the stage that makes `out`.
    """
    if retired(out).exists() and not out.exists():  # killed between the two renames
        retired(out).rename(out)
    new = out.with_name(f".{out.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    try:
        yield new
    except BaseException:
        shutil.rmtree(new)
        raise
    replace_folder(new, out)
