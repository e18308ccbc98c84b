"""The MLflow run of a flow run: the outermost flow opens it, flows inside share it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from tasks import tracking

_current: ContextVar[tracking.TrackedRun | None] = ContextVar("mlflow_parent", default=None)


@contextmanager
def flow_run(
    flow: str, version: str, prefect_flow_run: str | None = None
) -> Iterator[tracking.TrackedRun]:
    """The run that arms become children of; first, what earlier processes left is cleared up."""
    outer = _current.get()
    if outer is not None:
        yield outer
        return
    tracking.ensure_store()
    tracking.sync_pending()
    tracking.reconcile()
    tags = tracking.standard_tags(task_version=version, prefect_flow_run=prefect_flow_run)
    with tracking.parent_run(flow, tags=tags) as run:
        token = _current.set(run)
        try:
            yield run
        finally:
            _current.reset(token)
