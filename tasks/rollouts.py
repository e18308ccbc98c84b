"""Rollouts in Parquet: what was sampled, and what another engine, a log or people give to learn
from."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa

from algorithms.branch_replay import job_config as branch_replay
from algorithms.branch_replay.rollout_row import Rollout
from algorithms.common.config import SharedJobConfig
from algorithms.common.errors import InputError
from algorithms.common.files import write_text
from tasks import paths
from tasks.prompts import read_preferences
from tasks.rows import read_rows, write_rows

SCHEMA = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("branch", pa.int64()),
        ("tokens", pa.list_(pa.int64())),
        ("log_probs", pa.list_(pa.float64())),
        ("reward", pa.float64()),
        ("truncated", pa.bool_()),
    ]
)
"""Log-probabilities are the policy's own, of the whole vocabulary at temperature 1."""

STEP = pa.field("step", pa.int64())
"""Of what a job learned from."""


def write_rollouts(path: Path, rollouts: Iterable[Rollout]) -> None:
    """Write a Parquet file in one rename."""
    write_rows(path, (rollout.to_row() for rollout in rollouts), SCHEMA)


def read_rollouts(path: Path) -> list[Rollout]:
    """Of a jsonl or Parquet file with the columns of `SCHEMA`, others are left out.

    Raises `InputError` that names file, row and column.
    """
    return [Rollout.from_row(row, where) for where, row in read_rows(path)]


def given(config: SharedJobConfig) -> Path | None:
    """The file that a job learns from; None where it samples.

    Raises `InputError` for one that is missing.
    """
    if not isinstance(config, branch_replay.JobConfig) or config.arm.given is None:
        return None
    path = paths.PROJECT / config.arm.given
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    return path


def hand_over(source: Path, out: Path) -> None:
    """Write rollouts, or preferences where there is a column `chosen`, checked, as jsonl: a job
    knows no Parquet."""
    _, first = next(iter(read_rows(source)), ("", {}))
    if "chosen" in first:
        columns = ("prompt_id", "prompt", "chosen", "rejected")
        rows = [{name: row[name] for name in columns} for row in read_preferences(source)]
    else:
        rows = [rollout.to_row() for rollout in read_rollouts(source)]
    write_text(out, "".join(json.dumps(row) + "\n" for row in rows))


def collect(folder: Path, out: Path) -> None:
    """Write what the ranks of a job left in `folder` to one Parquet file, by step and rank; with
    the columns of `SCHEMA`, and the step that learned from the row."""
    ranks = sorted(folder.glob("rank_*.jsonl"), key=lambda path: int(path.stem[5:]))
    rows = [row for path in ranks for _, row in read_rows(path)]
    out.parent.mkdir(parents=True, exist_ok=True)
    write_rows(out, sorted(rows, key=lambda row: row["step"]), SCHEMA.insert(0, STEP))
