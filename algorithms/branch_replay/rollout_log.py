"""What a rank's updates learned from, a row a response: cut back on resume, as metrics.jsonl is.

The parent process makes one Parquet file of all ranks' rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from algorithms.branch_replay.collect import Rolled
from algorithms.common.metrics import cut_back


class RolloutLog:
    """Appends to `path`; rows after the step resumed from are dropped, for they are redone."""

    def __init__(self, path: Path, resumed_step: int) -> None:
        self.path = path
        path.parent.mkdir(exist_ok=True)
        cut_back(path, resumed_step)

    def append(self, step: int, rolled: Sequence[Rolled]) -> None:
        """Those of update `step`, from 1."""
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in _rows(step, rolled))


def _rows(step: int, rolled: Sequence[Rolled]) -> Iterator[dict[str, Any]]:
    for item in rolled:
        for group in item.groups:
            for rollout in group.to_rollouts():
                yield {"step": step} | rollout.to_row()
