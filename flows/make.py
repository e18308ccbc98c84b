"""What each stage does, as plain functions: `dvc repro` calls them, the flows wrap them as tasks.

Heavy modules are imported inside, so that asking what is up to date stays quick.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.stages import Context
from tasks.lineage import stage_lock

if TYPE_CHECKING:
    from tasks.tracking import TrackedRun

VERSION = "1"

NON_FINITE = 3
"""Exit code of a job whose loss or gradient was not finite."""


def corpus(context: Context) -> dict[str, Any]:
    """Stage `corpus`: sources -> data/corpus."""
    from tasks import corpus

    return corpus.build(context.params.corpus, context.place("corpus").corpus)


def tokens(context: Context) -> dict[str, Any]:
    """Stage `tokens`: data/corpus -> data/tokens."""
    from tasks import tokens

    return tokens.build(
        context.params.tokens, context.place("corpus").corpus, context.place("tokens").tokens
    )


def prompts(context: Context) -> dict[str, Any]:
    """Stage `prompts`: a generator or files -> data/prompts."""
    from tasks import prompt_stage

    return prompt_stage.build(context.params.prompts, context.place("prompts").prompts)


DATA = {"corpus": corpus, "tokens": tokens, "prompts": prompts}
"""The stages that run no job."""


def policy(context: Context, parent: TrackedRun, say: Callable[[str], None]) -> dict[str, Any]:
    """Stage `policy`: data/prompts -> models/policy."""
    return _job(context, "policy", "policy", parent, say)


def arm(
    context: Context, name: str, parent: TrackedRun, say: Callable[[str], None]
) -> dict[str, Any]:
    """Stage STAGE@`name`: data/, models/policy -> models/, metrics/; `say` gets rank 0's log."""
    return _job(context, context.arm(name).name, name, parent, say)


def _job(
    context: Context, stage: str, name: str, parent: TrackedRun, say: Callable[[str], None]
) -> dict[str, Any]:
    """Run the job `name` that makes `stage`."""
    from tasks import train

    known = context.stage(stage)
    return train.run(
        context.params,
        name,
        inputs=context.inputs(stage),
        code=known.code,
        out=context.place(stage),
        dvc_stage=stage,
        parent=parent,
        locked=() if stage in context.changed else known.reads,
        say=say,
    )


def point(
    context: Context, name: str, parent: TrackedRun, say: Callable[[str], None]
) -> dict[str, Any] | None:
    """An arm as a point of a sweep, unless it is done; None if its loss was not finite."""
    from tasks import tracking, train
    from tasks.torchrun import JobFailed

    stage = context.arm(name)
    with stage_lock(stage.name, context.base(stage.name)):
        job = train.prepare(context.params, name, context.inputs(stage.name), stage.code)
        if (done := job.quality()) is not None:
            tracking.adopt(job.run_dir, parent)
            return done
        try:
            return arm(context, name, parent, say)
        except JobFailed as error:
            if error.exitcode != NON_FINITE:
                raise
            return None


def report(context: Context, study: str | None, parent: TrackedRun) -> dict[str, Any]:
    """Stage `report`, of a study if one is named: metrics/ -> reports/, and to MLflow."""
    from tasks import figures, tracking

    reports = context.place(context.report(study).name).reports
    summary = figures.report(metrics_folders(context, study), reports)
    tracking.log_artifact(parent.run_id, reports)
    return summary


def metrics_folders(context: Context, study: str | None = None) -> dict[str, Path]:
    """stage/arm -> folder of metrics, for what the report compares and has been trained."""
    folders = {}
    for name in context.report(study).reads:
        arm = context.stage(name).arm
        assert arm is not None
        stage = context.params.stage_of(arm)
        folders[f"{stage}/{arm}"] = context.place(name).metrics(stage, arm)
    return {name: folder for name, folder in folders.items() if folder.is_dir()}


def plainly(context: Context, names: list[str], flow: str) -> None:
    """Make these stages one after the other, up to date or not, as `dvc repro` asks for."""
    from flows.parent import flow_run

    for name in names:
        stage = context.stage(name)
        with stage_lock(name, context.base(name)):
            if name in DATA:
                DATA[name](context)
                continue
            say = partial(print, flush=True)
            with flow_run(flow, VERSION) as run:
                if name == "policy":
                    policy(context, run, say)
                elif stage.arm is not None:
                    arm(context, stage.arm, run, say)
                else:
                    report(context, stage.study, run)
