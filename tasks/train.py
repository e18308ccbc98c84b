"""Run one arm of a pretraining stage: config.json, launch, tracking, published outputs.

The run directory is named by a hash of everything that decides the result (config, tokens, code,
torch), so a stopped job is found again and resumed, and a changed one starts afresh.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from algorithms.common.errors import InputError
from algorithms.common.files import read_json, replace_folder, write_json
from algorithms.common.metrics import read_rows
from algorithms.lordo.config import JobConfig
from tasks import torchrun, tracking
from tasks.config import Params
from tasks.follower import Follower
from tasks.paths import PROJECT, Workspace, run_directory
from tasks.progress import progress

VERSION = "1"

CURVE = ("step", "tokens", "train/loss", "val/loss", "comm/payload_bytes", "comm/wire_bytes")
"""What of metrics.jsonl repeats exactly and is drawn; tracked as curve.json."""

CLOCK = ("step", "elapsed", "device_hours")
"""What does not repeat; kept beside it in timing.json."""


@dataclass(frozen=True)
class Job:
    """A job that is ready to start: its config lies in its run directory."""

    config: JobConfig
    run_dir: Path

    @property
    def module(self) -> str:
        return f"tasks.jobs.{self.config.stage}"

    @property
    def finished(self) -> bool:
        """Whether only publishing is left: result.json is written last, publishing takes model/."""
        return (self.run_dir / "result.json").exists() and (self.run_dir / "model").is_dir()

    @property
    def command(self) -> str:
        """What starts it by hand, without tracking, to the same weights."""
        threads = torchrun.threads(self.config.training.ranks)
        return f"OMP_NUM_THREADS={threads} " + shlex.join(
            [
                str(Path(sys.executable).with_name("torchrun")),
                "--standalone",
                f"--nproc-per-node={self.config.training.ranks}",
                "-m",
                self.module,
                str(self.run_dir / "config.json"),
            ]
        )


def prepare(params: Params, arm: str, tokens: Path, code: Sequence[str]) -> Job:
    """Resolve the config of `arm`, name the job, and write config.json to its run directory.

    `code` names the files and folders of the project whose change makes another job.

    Raises `InputError` for an unknown arm, missing tokens or a model.path that holds no model.
    """
    stage = params.stage_of(arm)
    manifest = tokens / "MANIFEST.json"
    if not manifest.is_file():
        raise InputError(f"{tokens}: holds no tokens; `prepare` with the same --set makes them")
    path = params.model.path
    if path is not None and not (PROJECT / path / "config.json").is_file():
        raise InputError(f"model.path: {path} holds no config.json")
    config = JobConfig(
        stage=stage,
        arm_name=arm,
        job_id="",
        tokens_dir=str(tokens.resolve()),
        model=params.model,
        training=params.pretraining[stage].training,
        arm=params.pretraining[stage].all_arms[arm],
    )
    described = config.to_dict() | {"tokens_dir": manifest.read_text(encoding="utf-8")}
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    digest.update(_sources_sha256(code).encode())
    if params.model.path is not None:
        digest.update(_listing(Path(params.model.path)).encode())
    digest.update(importlib.metadata.version("torch").encode())
    config = replace(config, job_id=digest.hexdigest()[:12])
    run_dir = run_directory(stage, arm, config.job_id)
    run_dir.mkdir(parents=True, exist_ok=True)
    write_json(run_dir / "config.json", config.to_dict())
    return Job(config, run_dir)


def run(
    params: Params,
    arm: str,
    *,
    tokens: Path,
    code: Sequence[str],
    out: Workspace,
    dvc_stage: str,
    locked: Sequence[str],
    parent: tracking.TrackedRun,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Train `arm` to its end, resuming if it was stopped before; publish model and metrics.

    For the run's tags: `dvc_stage` is how DVC addresses what this makes, `locked` names the stages
    whose entries in dvc.lock identify what it reads. `say` gets rank 0's log lines. Returns the
    quality half of result.json. Raises `InputError`, `torchrun.JobFailed`, or `torchrun.JobStopped`
    (start again to resume).
    """
    job = prepare(params, arm, tokens, code)
    config = job.config
    tags = tracking.standard_tags(
        task_version=VERSION,
        dvc_stage=dvc_stage,
        locked=locked,
        job_id=config.job_id,
    )
    with tracking.arm_run(
        parent,
        name=arm,
        run_dir=job.run_dir,
        params=tracking.flatten(config.to_dict()),
        tags=tags,
    ) as tracked:
        if not job.finished:
            _launch(job, params, tracked, say)
    return publish(job, out)


def _launch(
    job: Job, params: Params, tracked: tracking.TrackedRun, say: Callable[[str], None]
) -> None:
    config = job.config
    (job.run_dir / "result.json").unlink(missing_ok=True)  # says that model/ is whole
    with progress(f"{config.stage} {config.arm_name}", total=config.training.steps) as advance:
        rows = Follower(job.run_dir / "metrics.jsonl")
        shown = 0

        def tick() -> None:
            nonlocal shown
            tracked.forward()
            for line in rows.lines():
                step = json.loads(line)["step"]
                advance(step - shown)
                shown = step

        torchrun.run_job(
            job.module,
            job.run_dir,
            ranks=config.training.ranks,
            job_id=config.job_id,
            deadline_s=params.launch.deadline_minutes * 60,
            stop_s=params.launch.stop_seconds,
            on_tick=tick,
            on_log=say,
            on_orphaned=tracked.close_command("KILLED"),
        )


def publish(job: Job, out: Workspace) -> dict[str, Any]:
    """Move a finished job's model and metrics to where its stage keeps them."""
    result = read_json(job.run_dir / "result.json")
    stage, arm = job.config.stage, job.config.arm_name
    rows = read_rows(job.run_dir / "metrics.jsonl")
    metrics = out.metrics(stage, arm)
    metrics.mkdir(parents=True, exist_ok=True)
    clock = [{key: row[key] for key in CLOCK} for row in rows]
    write_json(metrics / "timing.json", result["timing"] | {"rows": clock})
    curve = [{key: row[key] for key in CURVE if key in row} for row in rows]
    write_json(metrics / "curve.json", {"rows": curve})
    replace_folder(job.run_dir / "model", out.model(stage, arm))
    write_json(metrics / "quality.json", result["quality"])
    quality: dict[str, Any] = result["quality"]
    return quality


def _sources_sha256(code: Sequence[str]) -> str:
    """Hash of these files of the project, and of all Python files in these folders."""
    digest = hashlib.sha256()
    for name in code:
        path = PROJECT / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(str(file.relative_to(PROJECT)).encode() + file.read_bytes())
    return digest.hexdigest()


def _listing(folder: Path) -> str:
    """Names, sizes and times of a model's files: one that was exchanged is another model."""
    files = sorted(folder.glob("*"))
    return str([(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files])
