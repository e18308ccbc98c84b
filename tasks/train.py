"""Run the job of an arm, or of `policy`: config.json, launch, tracking, published outputs.

The run directory is named by a hash of everything that decides the result (config, data, code,
torch), so a stopped job is found again and resumed, and a changed one starts afresh.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from algorithms.branch_replay import job_config as branch_replay
from algorithms.common.config import SharedJobConfig
from algorithms.common.errors import InputError, one_line
from algorithms.common.files import read_json, replace_folder, write_json
from algorithms.common.metrics import read_rows
from tasks import rollouts, slots, torchrun, tracking
from tasks.config import Params
from tasks.downloads import file_sha256
from tasks.follower import Follower
from tasks.paths import PROJECT, Workspace, run_directory
from tasks.progress import progress

VERSION = "1"

CURVE = (
    "step",
    "tokens",
    "train/loss",
    "val/loss",
    "reward/mean",
    "reward/heldout",
    "reward/greedy",
    "comm/payload_bytes",
    "comm/wire_bytes",
)
"""What of metrics.jsonl repeats exactly and is drawn; tracked as curve.json."""

CLOCK = ("step", "elapsed", "device_hours", "modelled_device_hours", "pipeline/utilisation")
"""What does not repeat; kept beside it in timing.json."""


@dataclass(frozen=True)
class Job:
    """A job that is ready to start: its config lies in its run directory."""

    config: SharedJobConfig
    run_dir: Path

    @property
    def module(self) -> str:
        return f"tasks.jobs.{self.config.stage}"

    @property
    def finished(self) -> bool:
        """Whether only publishing is left: result.json is written last, publishing takes model/."""
        return (self.run_dir / "result.json").exists() and (self.run_dir / "model").is_dir()

    def quality(self) -> dict[str, Any] | None:
        """What result.json says of a job that has ended well, published or not; else None."""
        path = self.run_dir / "result.json"
        return dict(read_json(path)["quality"]) if path.exists() else None

    @property
    def command(self) -> str:
        """What starts it by hand, without tracking, to the same weights."""
        threads = torchrun.threads(self.config.ranks)
        return f"OMP_NUM_THREADS={threads} " + shlex.join(
            [
                str(Path(sys.executable).with_name("torchrun")),
                "--standalone",
                f"--nproc-per-node={self.config.ranks}",
                "-m",
                self.module,
                str(self.run_dir / "config.json"),
            ]
        )


def prepare(params: Params, arm: str, inputs: Mapping[str, Path], code: Sequence[str]) -> Job:
    """Resolve the config of `arm`, name the job, and write config.json to its run directory.

    `inputs` are the folders that it reads, by field of its config; `code` names the files and
    folders of the project whose change makes another job.

    Raises `InputError` for an unknown arm, missing inputs, a model.path that holds no model, or
    rollouts that cannot be learned from.
    """
    stage = params.stage_of(arm)
    manifests = {}
    for field, folder in inputs.items():
        if not (folder / "MANIFEST.json").is_file():
            raise InputError(f"{folder}: missing; `prepare` with the same --set makes it")
        manifests[field] = (folder / "MANIFEST.json").read_text(encoding="utf-8")
    config = params.job(arm, **{field: str(folder.resolve()) for field, folder in inputs.items()})
    path = config.model.path
    if path is not None:
        key = "model.path" if "tokens_dir" in inputs else "post_train.policy.model.path"
        _require_model(path, key)
    described = config.to_dict() | manifests
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    digest.update(_sources_sha256(code).encode())
    if path is not None:
        digest.update(_listing(Path(path)).encode())
    given = rollouts.given(config)
    if given is not None:
        digest.update(file_sha256(given).encode())
    if (source := reward_file(config)) is not None:
        digest.update(file_sha256(source).encode())
    digest.update(importlib.metadata.version("torch").encode())
    config = replace(config, job_id=digest.hexdigest()[:12])
    run_dir = run_directory(stage, arm, config.job_id)
    run_dir.mkdir(parents=True, exist_ok=True)
    if given is not None:
        rollouts.hand_over(given, run_dir / branch_replay.GIVEN)
    write_json(run_dir / "config.json", config.to_dict())
    return Job(config, run_dir)


def run(
    params: Params,
    arm: str,
    *,
    inputs: Mapping[str, Path],
    code: Sequence[str],
    out: Workspace,
    dvc_stage: str,
    locked: Sequence[str],
    parent: tracking.TrackedRun,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Train `arm` to its end, resuming if it was stopped before; publish what it made.

    For the run's tags: `dvc_stage` is how DVC addresses what this makes, `locked` names the stages
    whose entries in dvc.lock identify what it reads. `say` gets rank 0's log lines. Returns the
    quality half of result.json. Raises `InputError`, `torchrun.JobFailed`, or `torchrun.JobStopped`
    (start again to resume).
    """
    job = prepare(params, arm, inputs, code)
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
        _show(job, tracked)
    return publish(job, out)


def _launch(
    job: Job, params: Params, tracked: tracking.TrackedRun, say: Callable[[str], None]
) -> None:
    config = job.config
    (job.run_dir / "result.json").unlink(missing_ok=True)  # says that model/ is whole
    taken = slots.hold(config.gpus) if config.gpus else contextlib.nullcontext(None)
    with (
        taken as devices,
        progress(f"{config.stage} {config.arm_name}", total=config.steps) as advance,
    ):
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
            ranks=config.ranks,
            job_id=config.job_id,
            deadline_s=params.launch.deadline_minutes * 60,
            stop_s=params.launch.stop_seconds,
            on_tick=tick,
            on_log=say,
            on_orphaned=tracked.close_command("KILLED"),
            slots=devices,
        )


def _show(job: Job, tracked: tracking.TrackedRun) -> None:
    """To the run's artifacts: what the stages of a pipeline did when, and how a policy answered."""
    from tasks import gantt  # matplotlib

    trace = read_json(job.run_dir / "result.json")["timing"].get("trace")
    if trace is not None:
        path = job.run_dir / "schedule.png"
        path.write_bytes(gantt.draw({job.config.arm_name: trace}).light)
        tracking.log_artifact(tracked.run_id, path)
    if shown := read_rows(job.run_dir / branch_replay.COMPLETIONS):
        tracking.log_table(tracked.run_id, shown, job.run_dir / "completions.json")


def publish(job: Job, out: Workspace) -> dict[str, Any]:
    """Move what a finished job made to where its stage keeps it."""
    result = read_json(job.run_dir / "result.json")
    quality: dict[str, Any] = result["quality"]
    stage, arm = job.config.stage, job.config.arm_name
    if stage == "policy":
        replace_folder(job.run_dir / "model", out.policy)
        return quality
    rows = read_rows(job.run_dir / "metrics.jsonl")
    metrics = out.metrics(stage, arm)
    metrics.mkdir(parents=True, exist_ok=True)
    clock = [{key: row[key] for key in CLOCK if key in row} for row in rows]
    write_json(metrics / "timing.json", result["timing"] | {"rows": clock})
    curve = [{key: row[key] for key in CURVE if key in row} for row in rows]
    write_json(metrics / "curve.json", {"rows": curve})
    if stage == "post_train":
        completions = read_rows(job.run_dir / branch_replay.COMPLETIONS)
        write_json(metrics / "completions.json", {"rows": completions})
        rollouts.collect(job.run_dir / branch_replay.ROLLOUTS, out.rollouts(stage, arm))
    replace_folder(job.run_dir / "model", out.model(stage, arm))
    write_json(metrics / "quality.json", quality)
    return quality


def _sources_sha256(code: Sequence[str]) -> str:
    """Hash of these files of the project, and of all Python files in these folders."""
    digest = hashlib.sha256()
    for name in code:
        path = PROJECT / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(str(file.relative_to(PROJECT)).encode() + file.read_bytes())
    return digest.hexdigest()


def reward_file(config: SharedJobConfig) -> Path | None:
    """The file of the user's module that a job's reward is in; None for one of ours.

    Raises `InputError` where there is no such module, or none that is a file.
    """
    if not isinstance(config, branch_replay.JobConfig):
        return None
    module, colon, _ = config.training.reward.partition(":")
    if not colon:
        return None
    key = "post_train.training.reward"
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # of a package above it, or an empty name
        spec = None
    except (Exception, SystemExit) as error:  # the package above it is imported
        raise InputError(f"{key}: {module}: {type(error).__name__}: {one_line(error)}") from error
    if spec is None:
        raise InputError(f"{key}: there is no module {module!r}")
    if spec.origin is None or not spec.has_location:  # a bare folder, or a part of Python itself
        raise InputError(f"{key}: {module} is no Python file")
    return Path(spec.origin)


def _require_model(path: str, key: str) -> None:
    """Before anything starts: what the job would refuse at once; `key` is that of `path`."""
    file = PROJECT / path
    if file.suffix != ".gguf":
        if not (file / "config.json").is_file():
            raise InputError(f"{key}: {path} holds no config.json")
        return
    if not file.is_file():
        raise InputError(f"{key}: {path}: no such file")
    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise InputError(f"{key}: {path}: not a GGUF file")


def _listing(model: Path) -> str:
    """Names, sizes and times of a model's files: one that was exchanged is another model."""
    files = sorted(model.glob("*")) or [model]
    return str([(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files])
