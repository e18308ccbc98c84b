"""Run directories and their MLflow runs, as the tests make and read them."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tasks import tracking
from tasks.mlflow_run import TrackedRun
from tasks.paths import PROJECT

FOLDER = "R\u00e4ume und 100 %"
"""Spaces, letters beyond ASCII, and what URLs and alembic treat apart."""


def row(step: int, loss: float, time: float = 0.0) -> dict[str, float]:
    return {
        "step": step,
        "time": time or 1000.0 + step,
        "elapsed": float(step),
        "tokens": 2048 * step,
        "train/loss": loss,
        "comm/payload_bytes": 4_000_000_000_000 * step,
    }


def write(run_dir: Path, rows: list[dict[str, float]], mode: str = "a") -> None:
    with (run_dir / "metrics.jsonl").open(mode) as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def opened(run_dir: Path, parent: str | None = None, **tags: str) -> TrackedRun:
    params = tracking.flatten({"training": {"steps": 3, "extra": {"a": 1}}, "arm": "ddp"})
    tags = {"job_id": run_dir.name, **tags}
    return TrackedRun.open(parent, "pretrain", "ddp", run_dir, params, tags)


def history(store: Any, run_id: str, key: str = "train/loss") -> list[tuple[int, float]]:
    return sorted((m.step, m.value) for m in store.get_metric_history(run_id, key))


def runs_of(store: Any, run_dir: Path) -> list[Any]:
    experiments = [e.experiment_id for e in store.search_experiments()]
    return list(store.search_runs(experiments, f"tags.job_id = '{run_dir.name}'"))


def await_true(condition: Any, timeout_s: float = 20.0) -> None:
    give_up = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up, "waited too long"
        time.sleep(0.05)


def python(code: str, *arguments: str, **more: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=PROJECT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        **more,
    )


def close_process(run_id: str, status: str) -> tuple[int, str]:
    """Exit code and message of what a supervisor runs."""
    done = subprocess.run(
        [sys.executable, "-m", "tasks.tracking", "close", run_id, status],
        cwd=PROJECT,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stderr
