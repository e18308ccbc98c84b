"""Flow `experiment`: the whole DAG in one flow run; what the nightly schedule runs."""

from __future__ import annotations

from typing import Any

from prefect import flow, runtime

from flows.parent import flow_run
from flows.post_train import post_train
from flows.prepare import prepare
from flows.pretrain import pretrain
from flows.report import report, show
from flows.stages import context

VERSION = "2"

TRAIN: dict[str | None, Any] = {"pretrain": pretrain, "post_train": post_train}
"""The flows that train an arm, by name."""


@flow(name="experiment", version=VERSION, flow_run_name="experiment")
def experiment(
    study: str | None = None, overrides: list[str] | None = None, profile: str | None = None
) -> None:
    """Prepare data, train the arms, report; with `study`, then its arms and the report with them.

    Stages that are up to date are passed over.
    """
    here = context(overrides or (), profile)
    here.report(study)  # an unknown study is refused before anything is made
    with flow_run("experiment", VERSION, runtime.flow_run.id):
        prepare(overrides=overrides, profile=profile)
        for part in (None,) if study is None else (None, study):
            for arm in here.arms(part):
                train = TRAIN[here.arm(arm).flow]
                train(arm, overrides=overrides, profile=profile)
            report(part, overrides=overrides, profile=profile)
            show(here, part)
