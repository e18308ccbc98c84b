"""What processes say of themselves; one that ends while it is asked says nothing."""

import contextlib
from collections.abc import Iterable, Iterator

import psutil


def living(pids: Iterable[int]) -> Iterator[psutil.Process]:
    """Those that are still there."""
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            yield psutil.Process(pid)


def command_line(process: psutil.Process) -> str:
    """Its words, separated by a space."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


def environment(process: psutil.Process) -> dict[str, str]:
    """The variables that it was started with."""
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        return process.environ()
    return {}


def listening(process: psutil.Process) -> set[str]:
    """Addresses at which it takes connections."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return {
            connection.laddr[0]
            for connection in process.net_connections()
            if connection.status == psutil.CONN_LISTEN
        }
    return set()
