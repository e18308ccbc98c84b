"""An MLflow run that is fed while its job runs: a thread around a `Courier`.

The thread does the sending, so the caller never waits for a database or a server.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from filelock import Timeout

from tasks import mlflow_store
from tasks.mlflow_courier import Courier, State
from tasks.mlflow_store import Status, redact, tracking_uri

LOG = logging.getLogger("shoestring.tracking")

PERIOD_S = 5.0
"""At most one round of sending in this time, as each call has a cost of its own; pauses after
failures double from here."""
LONGEST_PAUSE_S = 60.0
PATIENCE_S = 10.0
"""How long `open` waits for a server, and `close` without progress for any store."""


class TrackedRun:
    """The MLflow run of one job or flow. Made by `open`, fed by `forward`, ended by `close`."""

    def __init__(self, courier: Courier, experiment: str) -> None:
        self.experiment = experiment
        self.error: str | None = None
        """Why the last round failed; None after a success."""
        self._courier = courier
        self._wake = threading.Event()
        self._tried = threading.Event()
        self._closing = False
        self._abandoned = False
        self._next = 0.0
        self._pause = PERIOD_S
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
    ) -> TrackedRun:
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
        run = cls(Courier(run_dir, plan), experiment)
        run._wake.set()
        run._thread.start()
        try:
            run._tried.wait(PATIENCE_S if mlflow_store.is_server(tracking_uri()) else None)
        except BaseException:  # a signal that stops the caller, which does not know the run yet
            run.close("KILLED")
            raise
        return run

    @property
    def run_id(self) -> str | None:
        return self._courier.run_id

    @property
    def url(self) -> str | None:
        """Page of the run, once it exists."""
        return self._courier.url

    @property
    def delivered(self) -> bool:
        """Whether the store has everything, the final status included."""
        return self._courier.delivered

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
        self._courier.end(status)
        self._closing = True
        began = time.monotonic()
        self._wake.set()
        while self._thread.is_alive():
            if time.monotonic() - max(began, self._courier.arrived) > PATIENCE_S:
                break
            self._thread.join(0.2)
        self._abandoned = True
        self._wake.set()
        if not self.delivered:
            LOG.warning("%s: MLflow gets the rest at the next start", self._courier.run_dir)
        return self.delivered

    def close_command(self, status: Status) -> list[str]:
        """What a supervisor runs when this process was killed; empty while there is no run."""
        command = [sys.executable, "-m", "tasks.tracking", "close"]
        return [*command, self.run_id, status] if self.run_id else []

    def _work(self) -> None:
        """The thread: one attempt whenever woken, and at the end until it succeeds."""
        while not self._abandoned and not self.delivered:
            self._wake.wait(self._pause if self._closing else None)
            self._wake.clear()
            if not self._abandoned:
                self._try()
        self._courier.release()

    def _try(self) -> None:
        try:
            self._courier.deliver()
        except Timeout:
            self._failed(f"{self._courier.run_dir}: another process sends this run to MLflow")
        except Exception as error:  # whatever ails the store, training goes on
            self._failed(f"MLflow does not answer: {type(error).__name__}: {error}")
        else:
            self.error = None
            self._pause = PERIOD_S
        self._tried.set()

    def _failed(self, reason: str) -> None:
        if self.error is None:
            LOG.warning("%s; will be retried", redact(reason))
        self.error = redact(reason)
        self._pause = 1.0 if self._closing else min(2 * self._pause, LONGEST_PAUSE_S)
        self._next = time.monotonic() + self._pause
