"""Flow `sweep`: one arm over a grid of settings and several seeds; what is done is not done again.

Points are runs with `--set`, so their outputs lie below runs/set/; one that is as params.yaml says
is the tracked arm itself. What they read is made once for all of them.
"""

from __future__ import annotations

from typing import Any

from prefect import flow, runtime
from prefect.artifacts import create_table_artifact
from prefect.logging import get_run_logger

from flows import steps
from flows.parent import flow_run
from flows.prepare import prepare
from flows.stages import context
from tasks import sweeps

VERSION = "1"


@flow(name="sweep", version=VERSION, flow_run_name="sweep {arm}")
def sweep(
    arm: str,
    grid: list[str],
    seeds: int = 1,
    overrides: list[str] | None = None,
    profile: str | None = None,
) -> list[dict[str, Any]]:
    """Train `arm` at every point of `grid` (KEY=VALUE,VALUE; keys of the arm); the table."""
    given = overrides or []
    points = sweeps.points(context(given, profile).params, arm, grid, seeds)
    places = [context(given, profile, point.overrides) for point in points]  # refused early
    prepare(arm=arm, overrides=overrides, profile=profile)
    say = get_run_logger().info
    with flow_run("sweep", VERSION, runtime.flow_run.id) as run:
        results = []
        for point, here in zip(points, places, strict=True):
            say("%s, seed %d", point.setting, point.seed)
            results.append((point, steps.train_point(here, arm, run, say)))
        rows = sweeps.summary(results)
    create_table_artifact(key="sweep", table=rows, description=f"Sweep of {arm}")
    return rows
