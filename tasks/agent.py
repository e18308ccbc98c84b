"""The agent of torchrun, in-process, with a file that says which rank failed and how.

    python -m tasks.agent FAILURES.json -- <arguments of torchrun>

torchrun itself exits with 1 whatever happened and names the failing rank only in prose; here
FAILURES.json lists all failed ranks, the one that explains the others first. Exit code: 0 done,
1 failed, 128 + N stopped by signal N.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import PContext, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from algorithms.common.files import read_json, write_json
from tasks.jobs.entry import AGENT, LOG_DIR


def main(failures_path: Path, arguments: list[str]) -> int:
    """Run torchrun with `arguments`; the exit code for this process."""
    os.environ[AGENT] = str(os.getpid())
    options = run.parse_args(arguments)  # type: ignore[no-untyped-call]
    # When a rank fails, torch waits 30 s for the others whatever --shutdown-timeout says.
    PContext.close.__defaults__ = (None, options.shutdown_timeout)
    try:
        run.run(options)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        log_dir = Path(os.environ[LOG_DIR])
        failures = [describe(rank, failure, log_dir) for rank, failure in error.failures.items()]
        write_json(failures_path, root_cause_first(failures))
        return 1
    except SignalException as error:
        return 128 + error.sigval
    return 0


def describe(rank: int, failure: ProcessFailure, log_dir: Path) -> dict[str, Any]:
    """One failed rank: how the agent saw it end, and what it said itself in rank_N.error.json."""
    path = log_dir / f"rank_{rank}.error.json"
    said = read_json(path) if path.exists() else {}
    return {
        "rank": rank,
        "local_rank": failure.local_rank,
        "exitcode": failure.exitcode,
        "signal": failure.signal_name() if failure.exitcode < 0 else None,
        "kind": said.get("kind"),
        "message": said.get("message"),
        "seen": failure.timestamp,
        "time": said.get("time", failure.timestamp),
    }


def root_cause_first(failures: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Order `failures` (in the order the agent saw them) so that the first explains the rest.

    When one rank dies, the others raise on their broken connections within milliseconds, often
    before the agent looks again. So what counts comes first: an error that names its cause; then a
    death without a word, because a broken connection raises; then exceptions by their time. Last
    come the deaths that follow from others: by the agent's SIGTERM, by its SIGKILL a second or more
    later, by an abort of NCCL's watchdog, and a rank that stopped because it was asked to.
    """
    first_seen = min(failure["seen"] for failure in failures)

    def precedence(failure: dict[str, Any]) -> tuple[int, float]:
        kind, signal = failure["kind"], failure["signal"]
        if kind in ("input", "non_finite"):
            return 0, failure["time"]
        if kind in ("crash", "missing"):
            return 2, failure["time"]
        if kind == "preempted":
            return 4, failure["time"]
        late = signal == "SIGKILL" and failure["seen"] > first_seen
        return (3 if late or signal in ("SIGTERM", "SIGABRT") else 1), failure["time"]

    return sorted(failures, key=precedence)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[3:]))
