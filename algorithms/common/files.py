"""Files and folders that are whole or absent: write beside, flush to disk, rename."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from algorithms.common.errors import InputError, one_line

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
"""What makes a Hugging Face directory's tokenizer; goes from data/tokens into every model."""


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8 in one rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as sorted, indented JSON in one rename."""
    write_text(path, json.dumps(value, indent=2, sort_keys=True) + "\n")


def read_json(path: Path) -> Any:
    """The value in a JSON file; `InputError` names one that is missing or holds something else."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except ValueError as error:
        raise InputError(f"{path}: not JSON: {one_line(error)}") from None


def require_inside(manifest: Path, names: Iterable[str]) -> None:
    """Raise `InputError` for a name in `manifest` that leads out of the folder it lies in."""
    for name in names:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise InputError(f"{manifest}: {name!r} does not lie in its folder")


def retired(folder: Path) -> Path:
    """Where `replace_folder` keeps the old `folder` until the new one is in its place."""
    return folder.with_name(f".{folder.name}.old")


def replace_folder(new: Path, old: Path) -> None:
    """Move the folder `new` to the place of `old`, if there is one, by two renames."""
    old.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(retired(old), ignore_errors=True)
    if old.exists():
        old.rename(retired(old))
    new.rename(old)
    sync_directory(old.parent)
    shutil.rmtree(retired(old), ignore_errors=True)


def sync_directory(path: Path) -> None:
    """Make the renames inside `path` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
