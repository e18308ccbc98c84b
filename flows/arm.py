"""What every flow that trains one arm does."""

from __future__ import annotations

import re

from prefect import runtime
from prefect.artifacts import create_link_artifact
from prefect.logging import get_run_logger

from flows import steps
from flows.parent import flow_run
from flows.prepare import prepare
from flows.stages import context


def artifact_key(name: str) -> str:
    """`name` as Prefect takes keys of artifacts: lower-case letters, digits and dashes."""
    return re.sub("[^a-z0-9]+", "-", name.lower())


def make_arm(
    flow: str, version: str, arm: str, overrides: list[str] | None, profile: str | None
) -> None:
    """Make `arm`, one of `flow`, and what it reads, where they are not up to date."""
    here = context(overrides or (), profile)
    stage = here.arm(arm, flow).name
    if runtime.flow_run.parent_flow_run_id is None:  # `experiment` has prepared already
        prepare(arm=arm, overrides=overrides, profile=profile)
    say = get_run_logger().info
    with flow_run(flow, version, runtime.flow_run.id) as run:
        steps.ensure(here, stage, lambda: steps.train_arm(here, arm, run, say))
    if run.url is not None:
        create_link_artifact(
            key=artifact_key(f"mlflow-{arm}"), link=run.url, link_text="MLflow run"
        )
