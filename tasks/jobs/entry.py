"""What the `main` of every job shares: dying with its parent, its log file, its exit code.

    from tasks.jobs import entry

    def run(config_path: Path) -> None:
        import torch  # heavy imports wait until the log is in place
        ...

    if __name__ == "__main__":
        entry.main(run)

Only the standard library, so that a job fails fast. Without the launcher's variables, under a plain
`torchrun -m tasks.jobs.NAME CONFIG.json`, output stays on the terminal.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from algorithms.common.errors import (
    InputError,
    MissingRanks,
    NonFiniteError,
    Preempted,
    disk_error,
    one_line,
)
from algorithms.common.files import write_json
from tasks.prctl import die_with_parent

AGENT = "SHOESTRING_AGENT"
"""Environment variable: pid of the torchrun agent, the parent of every rank."""
LOG_DIR = "SHOESTRING_LOG_DIR"
"""Environment variable: folder of rank_N.log and rank_N.error.json."""

KNOWN = {
    InputError: ("input", 2),
    NonFiniteError: ("non_finite", 3),
    MissingRanks: ("missing", 4),
    Preempted: ("preempted", 75),
}
"""Error -> its kind in rank_N.error.json, exit code."""


def _prepare() -> None:
    """Tie this rank to its agent and its output to rank_N.log."""
    if AGENT in os.environ:
        die_with_parent(int(os.environ[AGENT]))
    if LOG_DIR in os.environ:
        path = _log_dir() / f"rank_{_rank()}.log"
        log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
    faulthandler.enable()  # a segmentation fault leaves a traceback in the log


def main(run: Callable[[Path], None]) -> None:
    """Call `run(CONFIG.json)` and end this process with a code that says what happened.

    0: done. 2: `InputError`. 3: `NonFiniteError`. 4: `MissingRanks`. 75: `Preempted`, resumable.
    What `sys.exit` asks for. 1: anything else. All but 0 leave rank_N.error.json for the launcher.
    """
    _prepare()
    parser = argparse.ArgumentParser(
        prog=f"torchrun -m {_module()}", description=sys.modules["__main__"].__doc__
    )
    parser.add_argument("config", type=Path, metavar="CONFIG.json", help="everything about the run")
    config_path = parser.parse_args().config
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    try:
        run(config_path)
    except BaseException as caught:
        error = disk_error(caught, config_path.parent) or caught
        kind, code, message = _classify(error)
        if code != 0:
            try:
                _report(error, kind, message)
            finally:  # even on a full disk; no destructors: a process group hangs without its peers
                os._exit(code)


def require_ranks(config_path: Path, ranks: int) -> None:
    """Raise `InputError` unless torchrun started as many ranks as the config is for."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != ranks:
        raise InputError(f"{config_path}: is for {ranks} ranks, torchrun started {started}")


def _classify(error: BaseException) -> tuple[str, int, str]:
    """Kind, exit code and one line for an error that left `run`."""
    for known, (kind, code) in KNOWN.items():
        if isinstance(error, known):
            return kind, code, one_line(error)
    code = 1
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        code = error.code or 0
    return "crash", code, one_line(f"{type(error).__name__}: {error}")


def _report(error: BaseException, kind: str, message: str) -> None:
    """Say what happened, in the log and in rank_N.error.json."""
    moment = time.time()
    if kind == "crash":
        traceback.print_exception(error)
    else:
        print(f"{_module()}: {message}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    if LOG_DIR in os.environ:
        said = {"rank": _rank(), "kind": kind, "message": message, "time": moment}
        write_json(_log_dir() / f"rank_{_rank()}.error.json", said)


def _module() -> str:
    spec = sys.modules["__main__"].__spec__
    return spec.name if spec is not None else Path(sys.argv[0]).stem


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _log_dir() -> Path:
    return Path(os.environ[LOG_DIR])
