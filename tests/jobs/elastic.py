"""An elastic job of gloo ranks: a quadratic each, {"elastic": true, "timeout_s": 5.0}.

It stops when the file `quit` appears beside the config; what happens goes to N.jsonl there.
"""

import os
from pathlib import Path

from algorithms.common.files import read_json
from tasks.jobs import entry, restarts


def run(config_path: Path) -> None:
    """Train until the file appears."""
    from algorithms.lordo.board import connect
    from tests.crew import train

    timeout_s = read_json(config_path)["timeout_s"]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = connect(timeout_s, elastic=True)
    train(store, config_path.parent, rank, world, timeout_s=timeout_s, step_s=0.02)


if __name__ == "__main__":
    entry.main(restarts.restarting(run, elastic=lambda config: config["elastic"]))
