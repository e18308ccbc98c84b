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


def arm(
    context: Context, name: str, parent: TrackedRun, say: Callable[[str], None]
) -> dict[str, Any]:
    """Stage STAGE@`name`: data/tokens -> models/, metrics/; `say` gets rank 0's log."""
    from tasks import train

    stage = context.arm(name)
    return train.run(
        context.params,
        name,
        tokens=context.place("tokens").tokens,
        code=stage.code,
        out=context.place(stage.name),
        dvc_stage=stage.name,
        parent=parent,
        locked=() if stage.name in context.changed else stage.reads,
        say=say,
    )


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
            if name == "corpus":
                corpus(context)
            elif name == "tokens":
                tokens(context)
            else:
                with flow_run(flow, VERSION) as run:
                    if stage.arm is None:
                        report(context, stage.study, run)
                    else:
                        arm(context, stage.arm, run, partial(print, flush=True))
