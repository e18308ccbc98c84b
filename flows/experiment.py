"""Flow `experiment`: the whole DAG in one flow run; what the nightly schedule runs."""

from __future__ import annotations

from prefect import flow, runtime

from flows.parent import flow_run
from flows.prepare import prepare
from flows.pretrain import pretrain
from flows.report import report
from flows.stages import context

VERSION = "1"


@flow(name="experiment", version=VERSION, flow_run_name="experiment")
def experiment(overrides: list[str] | None = None, profile: str | None = None) -> None:
    """Prepare data, train every arm, report; stages that are up to date are passed over."""
    here = context(overrides or (), profile)
    with flow_run("experiment", VERSION, runtime.flow_run.id):
        prepare(overrides=overrides, profile=profile)
        for _, arm in here.arms():
            pretrain(arm, overrides=overrides, profile=profile)
        report(overrides=overrides, profile=profile)
