"""Brings what a run directory holds to one MLflow run: synchronous, once, however often it dies.

metrics.jsonl is the truth. What is known of the run lies in mlflow.json beside it. Before rows are
sent they are written there as `pending`, afterwards `sent_step` moves past them. After a crash in
between, the very same rows are sent again, which a tracking store takes as one (its key is the
metric with its step, time and value), even if the job has meanwhile repeated those steps. So no
(metric, step) comes twice.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from algorithms.common.files import read_json, write_json
from algorithms.common.metrics import NOT_METRICS
from tasks import mlflow_store
from tasks.follower import Follower
from tasks.mlflow_store import Status, client

STATE = "mlflow.json"
ROWS_AT_ONCE = 250
"""At most, between two notes in mlflow.json."""
METRICS_PER_CALL = 1000  # MLflow's limits of one log_batch
PARAMS_PER_CALL = 100
ENVIRONMENT_TAGS = ("device", "world_size", "backend", "oversubscribed")

Row = dict[str, Any]


@dataclass
class State:
    """The whole of mlflow.json."""

    experiment: str
    name: str
    parent_id: str | None
    params: dict[str, str]
    tags: dict[str, str]
    owner_lock: str
    """Name of the lock that its owner holds, that of the run directory."""
    store: str
    """`mlflow_store.store_hash()`: elsewhere the run id means nothing."""
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    """A tag of the run, to find it again when the answer to its creation was lost."""
    run_id: str | None = None
    sent_step: int = -1
    pending: list[Row] = field(default_factory=list)
    restarts: int = 0
    status: Status | None = None
    """How the run ended; None while its owner works."""
    done: bool = False
    """The store has everything, the status included."""


class Courier:
    """One delivery after the other, by one thread; `end` and the properties are for any thread.

    With a `plan` it makes the run, or goes on with the one that mlflow.json names; without one it
    finishes what a dead owner has left.
    """

    def __init__(self, run_dir: Path, plan: State | None = None) -> None:
        self.run_dir = run_dir
        self.url: str | None = None
        """Page of the run, once it exists."""
        self.arrived = 0.0
        """`time.monotonic()` when rows last arrived."""
        self._plan = plan
        self._state: State | None = None  # known once the lock is held
        self._final: Status | None = None
        self._guessed = False
        self._lines = Follower(run_dir / "metrics.jsonl")
        self._lock = mlflow_store.owner_lock(run_dir.name)
        self._guard = threading.Lock()  # around the state and its file, never around the network
        self._attached = False
        self._env_sent = False

    @property
    def run_id(self) -> str | None:
        return self._state.run_id if self._state else None

    @property
    def delivered(self) -> bool:
        """Whether the store has everything, the final status included."""
        return self._state is not None and self._state.done

    def deliver(self) -> None:
        """Bring the store up to date. Raises whatever the store raises.

        `filelock.Timeout` when another live process owns the run.
        """
        state = self._own()
        if state.status is None and self._final is not None:
            self._save(status=self._final)
        # Read before the rows: whoever sets it has seen the job's last row written.
        status = state.status
        run_id = self._attach(state)
        environment = self.run_dir / "env.json"
        if not self._env_sent and environment.exists():
            values = read_json(environment)
            _set_tags(run_id, {name: values[name] for name in ENVIRONMENT_TAGS if name in values})
            self._env_sent = True
        while rows := state.pending or self._next_rows(after=state.sent_step):
            self._send(run_id, rows)
        if status is not None:
            if not self._guessed or client().get_run(run_id).info.status == "RUNNING":
                client().set_terminated(run_id, status)
            self._save(done=True)

    def deliver_orphan(self) -> None:
        """`deliver` for an owner that died; the run is KILLED if it did not say how it ended."""
        self._guessed = self._own().status is None
        self._final = "KILLED"
        self.deliver()

    def end(self, status: Status) -> None:
        """Note how the run ended: the next delivery is the last."""
        self._final = status
        if self._state is not None:
            with contextlib.suppress(OSError):  # a full disk; the next delivery writes it again
                self._save(status=status)

    def release(self) -> None:
        """Let another process own the run."""
        self._lock.release()

    def _own(self) -> State:
        """Take the lock, and merge what earlier owners noted with our plan."""
        if self._state is not None:
            return self._state
        if not self._lock.is_locked:
            self._lock.acquire(timeout=0)
        path = self.run_dir / STATE
        old = State(**read_json(path)) if self._plan is None or path.exists() else None
        state = self._plan or old
        assert state is not None
        if old is not None and self._plan is not None:
            state.restarts = old.restarts + 1
            if old.store == state.store:
                state.key, state.run_id = old.key, old.run_id
                state.sent_step, state.pending = old.sent_step, old.pending
        self._state = state
        self._save()
        return state

    def _attach(self, state: State) -> str:
        """Run id in the store; the run exists there afterwards, RUNNING unless it has ended."""
        if self._attached and state.run_id is not None:
            return state.run_id
        run = _find(state.run_id) if state.run_id else None
        if state.run_id is not None and run is None:
            # Deleted by the user: all goes to a new run.
            self._save(run_id=None, sent_step=-1, pending=[], key=uuid.uuid4().hex)
        info = (run or _create(state)).info
        run_id = str(info.run_id)
        self._save(run_id=run_id)
        self.url = mlflow_store.run_url(info.experiment_id, run_id)
        tags = {**state.tags, "restart_count": state.restarts}
        if state.parent_id is not None:
            tags["mlflow.parentRunId"] = state.parent_id
        _set_tags(run_id, tags)
        if state.status is None:
            client().update_run(run_id, status="RUNNING")
        self._attached = True
        return run_id

    def _next_rows(self, after: int) -> list[Row]:
        # A resumed job repeats steps at other times, and then its file is read afresh.
        rows = map(json.loads, self._lines.lines())
        return list(islice((row for row in rows if row["step"] > after), ROWS_AT_ONCE))

    def _send(self, run_id: str, rows: list[Row]) -> None:
        from mlflow.entities import Metric

        self._save(pending=rows)
        metrics = [
            Metric(name, float(value), int(row["time"] * 1000), row["step"])
            for row in rows
            for name, value in row.items()
            if name not in NOT_METRICS
        ]
        for start in range(0, len(metrics), METRICS_PER_CALL):
            client().log_batch(run_id, metrics=metrics[start : start + METRICS_PER_CALL])
        self._save(pending=[], sent_step=rows[-1]["step"])
        self.arrived = time.monotonic()

    def _save(self, **changes: Any) -> None:
        with self._guard:
            assert self._state is not None
            for name, value in changes.items():
                setattr(self._state, name, value)
            write_json(self.run_dir / STATE, asdict(self._state))


def _find(run_id: str) -> Any:
    """The run, or None if it was deleted."""
    from mlflow.exceptions import MlflowException

    try:
        run = client().get_run(run_id)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise
    return run if run.info.lifecycle_stage == "active" else None


def _create(state: State) -> Any:
    """A new run with its params, or the one that an unanswered attempt has made."""
    from mlflow.entities import Param

    experiment = mlflow_store.experiment_id(state.experiment)
    found = client().search_runs([experiment], f"tags.run_key = '{state.key}'", max_results=1)
    tags = {**state.tags, "run_key": state.key, "owner_lock": state.owner_lock}
    run = found[0] if found else client().create_run(experiment, tags=tags, run_name=state.name)
    params = [Param(name, value) for name, value in state.params.items()]
    for start in range(0, len(params), PARAMS_PER_CALL):
        client().log_batch(run.info.run_id, params=params[start : start + PARAMS_PER_CALL])
    return run


def _set_tags(run_id: str, tags: Mapping[str, object]) -> None:
    """True and False as their JSON words."""
    from mlflow.entities import RunTag

    words = {k: str(v).lower() if isinstance(v, bool) else str(v) for k, v in tags.items()}
    client().log_batch(run_id, tags=[RunTag(name, word) for name, word in words.items()])
