"""Flow `report`: figures and tables over the arms that have been trained."""

from __future__ import annotations

from prefect import flow, runtime
from prefect.artifacts import create_markdown_artifact, create_table_artifact

from flows import steps
from flows.make import metrics_folders
from flows.parent import flow_run
from flows.stages import context
from tasks import arms

VERSION = "1"


@flow(name="report", version=VERSION, flow_run_name="report")
def report(
    study: str | None = None, overrides: list[str] | None = None, profile: str | None = None
) -> None:
    """Make reports/ where it is not up to date; leave table and summary on the Prefect page.

    With `study`, its own report: the arms that every experiment trains, and those of the study.
    """
    here = context(overrides or (), profile)
    stage = here.report(study).name
    with flow_run("report", VERSION, runtime.flow_run.id) as run:
        steps.ensure(here, stage, lambda: steps.make_report(here, study, run))
    trained = arms.read(metrics_folders(here, study))
    end = "" if study is None else f"-{study}"
    create_table_artifact(key=f"arms{end}", table=arms.table(trained), description="All arms")
    create_markdown_artifact(key=f"summary{end}", markdown=arms.markdown(trained))
