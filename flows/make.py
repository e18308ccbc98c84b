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

    stage = context.stage(f"{context.params.stage_of(name)}@{name}")
    return train.run(
        context.params,
        name,
        tokens=context.place("tokens").tokens,
        code=stage.code,
        out=context.place(stage.name),
        parent=parent,
        locked=() if stage.name in context.changed else stage.reads,
        say=say,
    )


def report(context: Context, parent: TrackedRun) -> dict[str, Any]:
    """Stage `report`: metrics/ -> reports/, and to MLflow."""
    from tasks import figures, tracking

    place = context.place("report")
    summary = figures.report(metrics_folders(context), place.reports)
    tracking.log_artifact(parent.run_id, place.reports)
    return summary


def metrics_folders(context: Context) -> dict[str, Path]:
    """stage/arm -> folder of metrics, for those arms of params.yaml that have been trained."""
    folders = {
        f"{stage}/{name}": context.place(f"{stage}@{name}").metrics(stage, name)
        for stage, name in context.arms()
    }
    return {name: folder for name, folder in folders.items() if folder.is_dir()}


def plainly(context: Context, names: list[str], flow: str) -> None:
    """Make these stages one after the other, up to date or not, as `dvc repro` asks for."""
    from flows.parent import flow_run

    for name in names:
        stage, _, of_arm = name.partition("@")
        with stage_lock(name, context.place(name)):
            if stage == "corpus":
                corpus(context)
            elif stage == "tokens":
                tokens(context)
            else:
                with flow_run(flow, VERSION) as run:
                    if stage == "report":
                        report(context, run)
                    else:
                        arm(context, of_arm, run, partial(print, flush=True))
