"""The Prefect tasks, and the rule by which every flow runs them: only what is not up to date.

A task's version is that of the module behind it. Retries are for what a retry can help: a source
that did not answer, a rank killed from outside (the job resumes from its checkpoint).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from httpx import HTTPError
from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.concurrency.sync import concurrency
from prefect.logging import get_run_logger

from algorithms.common.errors import InputError
from flows import make
from flows.stages import Context
from tasks import corpus, figures, lineage, prompt_stage, tokens, train
from tasks.downloads import SourceUnavailable
from tasks.mlflow_run import TrackedRun
from tasks.servers import GPU_LIMIT
from tasks.torchrun import JobFailed, JobStopped

R = TypeVar("R")

BRIEF_S = 30.0
"""How long to wait for DVC while holding the lock of a stage: `dvc repro` may wait for that."""


class _OneLine(logging.Filter):
    """Errors that a user can act on are one line in the run's log, without a traceback."""

    def filter(self, record: logging.LogRecord) -> bool:
        known = (InputError, JobFailed, JobStopped, HTTPError)
        if record.exc_info and isinstance(record.exc_info[1], known):
            record.exc_info = None
        return True


for name in ("prefect.flow_runs", "prefect.task_runs"):
    logging.getLogger(name).addFilter(_OneLine())


def _source_was_away(task: Any, run: Any, state: Any) -> bool:
    return isinstance(state.result(raise_on_failure=False), SourceUnavailable)


def _rank_was_killed(task: Any, run: Any, state: Any) -> bool:
    error = state.result(raise_on_failure=False)
    return isinstance(error, JobFailed) and error.signal is not None


make_corpus = task(
    name="corpus",
    version=corpus.VERSION,
    retries=2,
    retry_delay_seconds=[5, 30],
    retry_condition_fn=_source_was_away,
    cache_policy=NO_CACHE,
)(make.corpus)
make_tokens = task(name="tokens", version=tokens.VERSION, cache_policy=NO_CACHE)(make.tokens)
make_prompts = task(name="prompts", version=prompt_stage.VERSION, cache_policy=NO_CACHE)(
    make.prompts
)
make_data: dict[str, Callable[[Context], Any]] = {
    "corpus": make_corpus,
    "tokens": make_tokens,
    "prompts": make_prompts,
}
"""Stage -> the task that makes it, of those that run no job."""


def _in_gpu_slots(make_arm: Callable[..., R]) -> Callable[..., R]:
    """Make an arm once the server has as many GPUs to spare as it has ranks.

    Not strict: without that limit, or when its lease is lost, the locks of tasks/slots.py remain.
    """

    def act(context: Context, name: str, parent: TrackedRun, say: Callable[[str], None]) -> R:
        gpus = context.params.job(name).gpus
        if not gpus:
            return make_arm(context, name, parent, say)
        with concurrency(GPU_LIMIT, occupy=gpus, strict=False):
            return make_arm(context, name, parent, say)

    return act


JOB: dict[str, Any] = {
    "version": train.VERSION,
    "retries": 1,
    "retry_condition_fn": _rank_was_killed,
    "cache_policy": NO_CACHE,
}
"""Settings of the tasks that run a job."""

make_policy = task(name="policy", **JOB)(make.policy)
train_arm = task(name="train", **JOB)(_in_gpu_slots(make.arm))
train_point = task(name="point", **JOB)(_in_gpu_slots(make.point))
make_report = task(name="report", version=figures.VERSION, cache_policy=NO_CACHE)(make.report)


def ensure(context: Context, stage: str, act: Callable[[], Any]) -> None:
    """Run `act`, which makes `stage`, unless DVC says that it is up to date; record the result.

    A stage that `--set` changed is made every time: DVC does not know it.
    """
    log = get_run_logger()
    if stage in context.changed:
        log.info("%s: params differ from params.yaml; made in %s", stage, context.workspace.root)
        with lineage.stage_lock(stage, context.workspace):
            act()
        return
    if not (reasons := lineage.stale(stage)):
        log.info("%s: up to date", stage)
        return
    log.info("%s: %s", stage, "; ".join(reasons))
    with lineage.stage_lock(stage, context.base(stage)):
        if not _made_meanwhile(stage):
            act()
        with contextlib.suppress(lineage.Busy):
            return lineage.record(stage, patience_s=BRIEF_S)
    lineage.record(stage)


def _made_meanwhile(stage: str) -> bool:
    """Whether another flow made `stage` while this one waited for its lock."""
    try:
        return not lineage.stale(stage, patience_s=BRIEF_S)
    except lineage.Busy:
        return False
