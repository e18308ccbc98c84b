"""metrics.jsonl, the truth about a run: one row a step, written by rank 0, cut back on resume.

No torch here: the parent process reads the same rows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from algorithms.common.files import write_text

NOT_METRICS = ("step", "time", "elapsed")
"""Keys of a row that are not metric names."""


class MetricsLog:
    """Appends rows to `path`; rows after the step resumed from are dropped, for they are redone."""

    def __init__(self, path: Path, resumed_step: int) -> None:
        self.path = path
        rows = cut_back(path, resumed_step)
        self.elapsed = max((float(row["elapsed"]) for row in rows), default=0.0)
        """Seconds of earlier attempts up to their last row; steps redone since count twice."""

    def append(self, row: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def cut_back(path: Path, step: int) -> list[dict[str, Any]]:
    """Drop the rows after `step` from a file of rows; what it held before."""
    rows = read_rows(path)
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows if row["step"] <= step))
    return rows


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All whole rows of a metrics.jsonl; a line cut short by a kill is left out."""
    rows = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n"):
                rows.append(json.loads(line))
    return rows


def sentence(row: dict[str, Any], steps: int) -> str:
    """A row as one line for the log."""
    text = (
        f"step {row['step']}/{steps}  loss {row['train/loss']:.4f}  lr {row['lr']:.2e}  "
        f"grad norm {row['grad_norm']:.3f}"
    )
    if "tokens_per_s" in row:  # not of what was simulated
        text += f"  {row['tokens_per_s']:,.0f} tokens/s"
    if "val/loss" in row:
        text += f"  held-out {row['val/loss']:.4f} ({row['val/bits_per_byte']:.4f} bits per byte)"
    return text


class Throughput:
    """Tokens per second of training steps; evaluations, checkpoints and start-up do not count."""

    def __init__(self) -> None:
        self.tokens = 0
        self.seconds = 0.0
        self.seconds_in_all = 0.0
        """Of the steps that led to the present weights, over all attempts."""

    def add(self, tokens: int, seconds: float) -> None:
        """Count one step."""
        self.tokens += tokens
        self.seconds += seconds
        self.seconds_in_all += seconds

    def take(self) -> float:
        """Tokens per second since the last `take`."""
        rate = self.tokens / self.seconds if self.seconds else 0.0
        self.tokens, self.seconds = 0, 0.0
        return rate
