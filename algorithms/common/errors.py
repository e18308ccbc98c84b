"""Errors that a user can act on. Everything else is a bug and keeps its traceback."""


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


class Preempted(Exception):
    """The job was asked to stop, has written a checkpoint, and can be resumed."""


def one_line(error: object) -> str:
    """What `error` says, its lines and runs of blanks joined by single blanks."""
    return " ".join(str(error).split())
