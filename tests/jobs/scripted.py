"""A job without torch that does what its config says, rank by rank: {"0": "wait", "1": "exit 7"}.

Each rank first writes ready_N beside the config.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from algorithms.common.errors import InputError, NonFiniteError, Preempted
from algorithms.common.files import read_json
from algorithms.common.stopping import on_signals
from tasks.jobs import entry


def run(config_path: Path) -> None:
    """Do this rank's action."""
    rank = os.environ.get("RANK", "0")
    action, _, argument = read_json(config_path)[rank].partition(" ")
    print(f"rank {rank}: {action} {argument}")
    if action == "ignore":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    stop_requested = on_signals() if action == "checkpoint" else lambda: False
    if action == "leave":  # a child that no session, group or parent leads to
        subprocess.Popen(["sleep", "600"], start_new_session=True)
    (config_path.parent / f"ready_{rank}").write_text(str(os.getpid()))
    if action in ("wait", "ignore"):
        time.sleep(600)
    elif action == "leave":
        time.sleep(float(argument))
    elif action == "checkpoint":
        while not stop_requested():
            time.sleep(0.05)
        time.sleep(1.0)
        (config_path.parent / f"checkpoint_{rank}").touch()
        raise Preempted("stopped at step 5")
    elif action == "print":
        for line in range(int(argument)):
            print(f"line {line}")
    elif action == "exit":
        sys.exit(int(argument))
    elif action == "kill":
        sys.stdout.flush()
        os.kill(os.getpid(), int(argument))
    elif action == "raise":
        for line in range(30):
            print(f"line {line}")
        raise RuntimeError(argument)
    elif action == "input":
        raise InputError(argument)
    elif action == "non_finite":
        raise NonFiniteError(argument)


if __name__ == "__main__":
    entry.main(run)
