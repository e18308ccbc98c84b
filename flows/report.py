"""Flow `report`: figures and tables over the arms that have been trained."""

from __future__ import annotations

from prefect import flow, runtime
from prefect.artifacts import create_markdown_artifact, create_table_artifact

from flows import steps
from flows.arm import artifact_key
from flows.make import metrics_folders
from flows.parent import flow_run
from flows.stages import Context, context
from tasks import arms

VERSION = "1"


@flow(name="report", version=VERSION, flow_run_name="report")
def report(
    study: str | None = None, overrides: list[str] | None = None, profile: str | None = None
) -> None:
    """Make reports/ where it is not up to date; leave tables and summary on the Prefect page.

    With `study`, its own report: its stage's arms that every experiment trains, and its own.
    """
    here = context(overrides or (), profile)
    stage = here.report(study).name
    with flow_run("report", VERSION, runtime.flow_run.id) as run:
        steps.ensure(here, stage, lambda: steps.make_report(here, study, run))
    if runtime.flow_run.parent_flow_run_id is None:  # `experiment` has them on its own page
        show(here, study)


def show(here: Context, study: str | None) -> None:
    """Leave tables and summary on the page of the flow run that calls this."""
    trained = arms.read(metrics_folders(here, study))
    for name, own in arms.by_stage(trained).items():
        key = artifact_key(f"arms-{name if study is None else study}")
        create_table_artifact(key=key, table=arms.table(own), description=f"Arms of {name}")
    end = "" if study is None else f"-{study}"
    create_markdown_artifact(key=f"summary{end}", markdown=arms.markdown(trained))
