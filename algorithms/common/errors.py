"""Errors that a user can act on. Everything else is a bug and keeps its traceback."""

from __future__ import annotations

import errno
from pathlib import Path


class InputError(ValueError):
    """Bad input. The message is one line and names the file, dotted key or rank; exit code 2."""


class FieldError(InputError):
    """A value of a config is out of range; `tasks/config.py` turns it into a dotted key."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class NonFiniteError(RuntimeError):
    """A loss or gradient is inf or NaN. The message names step, rank and parameter."""


class MissingRanks(RuntimeError):
    """Ranks did not come to an exchange, or did not come out of it. The message is one line that
    names them, and the step where it is known."""


class Preempted(Exception):
    """The job was asked to stop, has written a checkpoint, and can be resumed."""


DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EFBIG)
"""Of an `OSError`: the disk takes no more, or not from us."""


def disk_error(error: BaseException, folder: Path) -> InputError | None:
    """One line for an error that a full or read-only disk is the cause of, else None. It names the
    file, or `folder` where the system does not say which."""
    if not isinstance(error, OSError) or error.errno not in DISK:
        return None
    return InputError(f"{error.filename or folder}: {error.strerror}")


def one_line(error: object) -> str:
    """What `error` says, its lines and runs of blanks joined by single blanks."""
    return " ".join(str(error).split())
