"""One MLflow run that follows a run directory: metrics.jsonl is the truth, this is its courier.

A thread of its own does the sending, so the caller never waits for a database or a server. What is
known of the run lies in mlflow.json beside metrics.jsonl. Before rows are sent they are written
there as `pending`, afterwards `sent_step` moves past them. After a crash in between, the very same
rows are sent again, which a tracking store takes as one (its key is the metric with its step, time
and value), even if the job has meanwhile repeated those steps. So no (metric, step) comes twice.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from algorithms.common.files import read_json, write_json
from algorithms.common.metrics import NOT_METRICS
from tasks import mlflow_store
from tasks.mlflow_store import Status, client, redact, tracking_uri

LOG = logging.getLogger("shoestring.tracking")

STATE = "mlflow.json"
PERIOD_S = 2.0
"""At most one round of sending in this time; pauses after failures double from here."""
LONGEST_PAUSE_S = 60.0
PATIENCE_S = 10.0
"""How long `open` waits for a server, and `close` without progress for any store."""
METRICS_PER_BATCH = 1000  # MLflow's limits of one log_batch
PARAMS_PER_BATCH = 100
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


class MetricsFile:
    """Reads the complete lines of a metrics.jsonl that grows, and may be cut and grow again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._last = b""

    def rows(self, after: int) -> list[Row]:
        """The next rows with step > `after` that were not yet returned, at most one batch."""
        if not self.path.exists():
            return []
        rows: list[Row] = []
        metrics = 0
        with self.path.open("rb") as file:
            # A resumed job repeats steps at other times, so its line here differs: start over.
            file.seek(self._offset - len(self._last))
            if file.read(len(self._last)) != self._last:
                self._offset, self._last = 0, b""
                file.seek(0)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                row = json.loads(line)
                if row["step"] > after:
                    metrics += len(row)
                    if rows and metrics > METRICS_PER_BATCH:
                        break
                    rows.append(row)
                self._offset, self._last = self._offset + len(line), line
        return rows


class ArmRun:
    """The MLflow run of one job (or flow). Made by `open`, fed by `forward`, ended by `close`."""

    def __init__(self, run_dir: Path, experiment: str, plan: State | None = None) -> None:
        self.run_dir = run_dir
        self.experiment = experiment
        self.error: str | None = None
        """The last failure of the store; None after a success."""
        self.url: str | None = None
        """Page of the run, once it exists."""
        self._plan = plan
        self._state: State | None = None  # known once the lock is held
        self._final: Status | None = None
        self._guessed = False
        self._metrics = MetricsFile(run_dir / "metrics.jsonl")
        self._lock = mlflow_store.owner_lock(run_dir.name)
        self._guard = threading.Lock()  # around the state and its file, never around the network
        self._wake = threading.Event()
        self._tried = threading.Event()
        self._abandoned = False
        self._attached = False
        self._env_sent = False
        self._next = 0.0
        self._pause = PERIOD_S
        self._success = 0.0
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)

    @classmethod
    def open(
        cls,
        parent_id: str | None,
        experiment: str,
        name: str,
        run_dir: Path,
        params: Mapping[str, object],
        tags: Mapping[str, str],
    ) -> ArmRun:
        """Create the run, or re-attach to the one that mlflow.json of `run_dir` names; RUNNING.

        `params` have dotted keys (`tasks.tracking.flatten`). When the store is away, the run is
        created as soon as it is back, and `run_id` is None until then.
        """
        run_dir.mkdir(parents=True, exist_ok=True)
        plan = State(
            experiment=experiment,
            name=name,
            parent_id=parent_id,
            params={key: str(value) for key, value in params.items()},
            tags=dict(tags),
            owner_lock=run_dir.name,
            store=mlflow_store.store_hash(),
        )
        run = cls(run_dir, experiment, plan)
        run._wake.set()
        run._thread.start()
        run._tried.wait(PATIENCE_S if mlflow_store.is_server(tracking_uri()) else None)
        return run

    @property
    def delivered(self) -> bool:
        """Whether the store has everything, the final status included."""
        return self._state is not None and self._state.done

    @property
    def run_id(self) -> str | None:
        return self._state.run_id if self._state else None

    def forward(self) -> None:
        """Have the new rows of metrics.jsonl sent. Returns at once; call it as often as wanted."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + PERIOD_S
            self._wake.set()

    def close(self, status: Status) -> bool:
        """Send the rest and end the run; whether all of it arrived.

        Waits while rows arrive, and `PATIENCE_S` longer; `sync_pending` sends what is left over.
        """
        self._final = status
        self._success = time.monotonic()
        if self._state is not None:
            with contextlib.suppress(OSError):  # the thread tries again
                self._save(status=status)
        self._wake.set()
        while self._thread.is_alive() and time.monotonic() - self._success < PATIENCE_S:
            self._thread.join(0.2)
        self._abandoned = True
        self._wake.set()
        if not self.delivered:
            LOG.warning("%s: MLflow gets the rest at the next start", self.run_dir)
        return self.delivered

    def deliver(self) -> None:
        """Bring the store up to date, in this thread. Raises whatever the store raises.

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
        while rows := state.pending or self._metrics.rows(after=state.sent_step):
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

    def close_command(self, status: Status) -> list[str]:
        """What a supervisor runs when this process was killed; empty while there is no run."""
        command = [sys.executable, "-m", "tasks.tracking", "close"]
        return [*command, self.run_id, status] if self.run_id else []

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
        old = State(**read_json(path)) if path.exists() else None
        state = self._plan or old
        if state is None:
            raise FileNotFoundError(path)
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

    def _send(self, run_id: str, rows: list[Row]) -> None:
        from mlflow.entities import Metric

        self._save(pending=rows)
        metrics = [
            Metric(name, float(value), int(row["time"] * 1000), row["step"])
            for row in rows
            for name, value in row.items()
            if name not in NOT_METRICS
        ]
        client().log_batch(run_id, metrics=metrics)
        self._save(pending=[], sent_step=rows[-1]["step"])
        self._success = time.monotonic()

    def _save(self, **changes: Any) -> None:
        with self._guard:
            assert self._state is not None
            for name, value in changes.items():
                setattr(self._state, name, value)
            write_json(self.run_dir / STATE, asdict(self._state))

    def _work(self) -> None:
        """The thread: one attempt whenever woken, and at the end until it succeeds."""
        while not self._abandoned and not self.delivered:
            self._wake.wait(self._pause if self._final else None)
            self._wake.clear()
            if not self._abandoned:
                self._try()
        self.release()

    def _try(self) -> None:
        try:
            self.deliver()
        except Exception as error:  # whatever ails the store, training goes on
            message = redact(f"{type(error).__name__}: {error}")
            if self.error is None:
                LOG.warning("MLflow does not answer, will be retried: %s", message)
            self.error = message
            self._pause = 1.0 if self._final else min(2 * self._pause, LONGEST_PAUSE_S)
            self._next = time.monotonic() + self._pause
        else:
            self.error = None
            self._pause = PERIOD_S
        self._tried.set()


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
    for start in range(0, len(params), PARAMS_PER_BATCH):
        client().log_batch(run.info.run_id, params=params[start : start + PARAMS_PER_BATCH])
    return run


def _set_tags(run_id: str, tags: Mapping[str, object]) -> None:
    """True and False as their JSON words."""
    from mlflow.entities import RunTag

    words = {k: str(v).lower() if isinstance(v, bool) else str(v) for k, v in tags.items()}
    client().log_batch(run_id, tags=[RunTag(name, word) for name, word in words.items()])
