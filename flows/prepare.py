"""Flow `prepare`: what arms read. Text -> corpus -> tokens; prompts -> a first policy."""

from __future__ import annotations

from functools import partial

from prefect import flow, runtime
from prefect.logging import get_run_logger

from flows import steps
from flows.parent import flow_run
from flows.stages import Context, context

VERSION = "2"


@flow(name="prepare", version=VERSION, flow_run_name="prepare")
def prepare(
    only: str | None = None,
    arm: str | None = None,
    overrides: list[str] | None = None,
    profile: str | None = None,
) -> None:
    """Make what all arms read, what `arm` reads, or `only` one stage, where not up to date."""
    here = context(overrides or (), profile)
    for name in here.prepared(only, arm):
        if name == "policy":
            steps.ensure(here, name, lambda: _make_policy(here))
        else:
            steps.ensure(here, name, partial(steps.make_data[name], here))


def _make_policy(here: Context) -> None:
    with flow_run("prepare", VERSION, runtime.flow_run.id) as run:
        steps.make_policy(here, run, get_run_logger().info)
