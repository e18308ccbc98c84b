"""A job without torch, with an action for each start: {"elastic": true, "starts": ["kill 9", ...]}.

Each start first appends its pid, and the pids of its parent and of its agent, to starts_N.txt.
"""

import os
import signal
import sys
import time
from pathlib import Path

from algorithms.common.errors import InputError, Preempted
from algorithms.common.files import read_json
from algorithms.common.stopping import on_signals
from tasks.jobs import entry, restarts


def run(config_path: Path) -> None:
    """Do what is planned for this start."""
    rank = os.environ.get("RANK", "0")
    stop_requested = on_signals()
    with (config_path.parent / f"starts_{rank}.txt").open("a+") as file:
        file.write(f"{os.getpid()} {os.getppid()} {os.environ.get(entry.AGENT)}\n")
        file.seek(0)
        start = len(file.readlines())
    action, _, argument = read_json(config_path)["starts"][start - 1].partition(" ")
    print(f"start {start}: {action} {argument}")
    sys.stdout.flush()
    if action == "kill":
        os.kill(os.getpid(), int(argument))
    elif action == "exit":
        sys.exit(int(argument))
    elif action == "raise":
        raise RuntimeError(argument)
    elif action == "input":
        raise InputError(argument)
    elif action == "wait":
        while not stop_requested():
            time.sleep(0.02)
        raise Preempted("stopped at step 5")
    elif action == "ignore":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)


if __name__ == "__main__":
    entry.main(restarts.restarting(run, elastic=lambda config: config["elastic"]))
