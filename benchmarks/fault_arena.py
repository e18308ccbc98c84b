"""A sandbox in which one tiny job is started in the ways that people start it, and watched.

The job is an arm of two ranks that writes a checkpoint every few steps, so that its writes are
easily hit. A Prefect server and a worker of the sandbox's own stand by, on loopback.
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import psutil
import requests

from algorithms.common.errors import InputError
from algorithms.common.files import read_json
from algorithms.common.metrics import read_rows
from benchmarks import prefect_api
from benchmarks.sandbox import Sandbox
from tasks.environment import DEFAULTS, page
from tasks.paths import PROJECT
from tasks.servers import POOL, free_address

Route = Literal["plain", "prefect", "deployment"]

STEPS = 60
EVERY = 6
"""Steps between checkpoints."""
PARAMS = f"""\
corpus:
  sources: [{{from: "path:texts/*.txt", licence: CC0-1.0}}]
  val_fraction: 0.3
tokens: {{vocab_size: 300}}
model:
  hidden_size: 16
  intermediate_size: 24
  num_hidden_layers: 2
  num_attention_heads: 2
  num_key_value_heads: 1
  max_position_embeddings: 64
pretrain_lordo:
  training:
    ranks: 2
    steps: {STEPS}
    sequence_length: 16
    global_batch: 8
    warmup_steps: 2
    log_every: 1
    eval_every: 20
    eval_sequences: 8
    checkpoint_every: {EVERY}
  arms:
    ddp: {{optimizer: {{lr: 1.0e-2}}}}
  study: {{}}
pretrain_async:
  model: {{tie_word_embeddings: false}}
  training:
    steps: {STEPS}
    sequence_length: 16
    global_batch: 8
    warmup_steps: 2
    log_every: 1
    eval_every: 20
    eval_sequences: 8
    checkpoint_every: {EVERY}
  arms:
    async: {{stages: 2, optimizer: {{name: adamw, optimizer: {{lr: 1.0e-2}}}}}}
  study: {{}}
prompts: {{lookup: {{}}, train: 1, val: 1}}
post_train:
  policy: {{model: {{}}}}
  training:
    ranks: 1
    steps: 1
    prompts: 1
    warmup_steps: 0
    log_every: 1
    eval_every: 1
    eval_prompts: 1
    checkpoint_every: 1
  arms:
    exact: {{optimizer: {{lr: 1.0e-2}}, rollout: {{max_tokens: 1}}}}
launch: {{deadline_minutes: 10, stop_seconds: 5}}
"""
REPEATS = ("step", "tokens", "train/loss", "grad_norm", "lr", "val/loss", "comm/payload_bytes")
"""What of metrics.jsonl does not depend on the clock."""
START_S = 180.0
"""After which a server has not started, or a job of seconds not ended."""
ENDED = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}

Outcome = tuple[str, list[dict[str, Any]]]
"""Hash of the weights, and what of metrics.jsonl must repeat, by row."""


class Arena(Sandbox):
    """The sandbox; `services` holds while its server and worker run."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        (root / "params.yaml").write_text(PARAMS)
        (root / "params.gpu.yaml").write_text("{}\n")
        generator = random.Random(0)
        (root / "texts").mkdir()
        for index in range(40):
            words = "".join(generator.choices("aeiou bcdst\n", k=600))
            (root / "texts" / f"{index:02}.txt").write_text(words)
        self.commit()
        self.api = page(free_address()) + "/api"
        ours = {k: v.replace(str(PROJECT), str(root)) for k, v in DEFAULTS.items()}
        self.prefect = ours | {"PREFECT_API_URL": self.api, "PREFECT_WORKER_QUERY_SECONDS": "1"}
        self.worker: subprocess.Popen[str] | None = None
        self._server: subprocess.Popen[str] | None = None
        self.deployment = ""
        """Id of the deployment of the job; known once services run."""

    @contextlib.contextmanager
    def services(self) -> Iterator[None]:
        """Server, deployments and worker; whatever of the sandbox lives at the end is killed."""
        host, port = self.api.removeprefix("http://").removesuffix("/api").split(":")
        try:
            self._server = self._service("server", "start", "--host", host, "--port", port)
            self._await_server()
            self._prefect("work-pool", "create", POOL, "--type", "process", "--overwrite")
            self._prefect("--no-prompt", "deploy", "--name", "ddp")
            [found] = self.ask("deployments/filter", deployments={"name": {"any_": ["ddp"]}})
            self.deployment = found["id"]
            self.start_worker()
            yield
        finally:
            self.kill()

    def start_worker(self) -> None:
        """One more worker, when the last one was killed."""
        self.worker = self._service("worker", "start", "--pool", POOL)

    def _prefect(self, *command: str) -> None:
        done = self.start(".venv/bin/prefect", *command, output=subprocess.PIPE, **self.prefect)
        said, _ = done.communicate()
        if done.returncode != 0:
            raise RuntimeError(said)

    def _service(self, *command: str) -> subprocess.Popen[str]:
        return self.start(".venv/bin/prefect", *command, output=subprocess.DEVNULL, **self.prefect)

    def _await_server(self) -> None:
        give_up = time.monotonic() + START_S
        while time.monotonic() < give_up:
            with contextlib.suppress(requests.RequestException):
                if requests.get(f"{self.api}/health", timeout=5).ok:
                    return
            time.sleep(0.3)
        raise InputError(f"prefect server: no answer from {self.api} in {START_S:.0f} s")

    def ask(self, path: str, **body: Any) -> Any:
        """POST to Prefect's API."""
        return prefect_api.ask(self.api, path, **body)

    def forget(self) -> None:
        """Back to a job that was never started."""
        for name in ("runs", "models", "metrics"):
            self.execute("rm", "-rf", name)

    def strays(self) -> list[psutil.Process]:
        """Processes of the sandbox that are not its server's or its worker's own."""
        services = {each.pid for each in (self._server, self.worker) if each is not None}
        return [each for each in self.processes() if each.pid not in services]

    def run_dir(self) -> Path | None:
        """Of the one job that there is."""
        return next(self.root.glob("runs/pretrain_lordo/ddp/*"), None)

    def finished(self) -> bool:
        """Whether the job has said its result."""
        folder = self.run_dir()
        return folder is not None and (folder / "result.json").exists()

    def writing(self, step: int | None = None) -> bool:
        """Whether a checkpoint, or that of `step`, is being written right now."""
        name = "step_*" if step is None else f"step_{step:08d}"
        return any(self.root.glob(f"runs/pretrain_lordo/ddp/*/checkpoints/.writing_{name}"))

    def written(self) -> int:
        """Step of the newest checkpoint; 0 without one."""
        folders = self.root.glob("runs/pretrain_lordo/ddp/*/checkpoints/step_*")
        return max((int(folder.name.removeprefix("step_")) for folder in folders), default=0)

    def outcome(self) -> Outcome:
        """That of the finished job; an empty one before."""
        folder = self.run_dir()
        if folder is None or not self.finished():
            return "", []
        rows = read_rows(folder / "metrics.jsonl")
        sha256: str = read_json(folder / "result.json")["weights_sha256"]
        return sha256, [{key: row.get(key) for key in REPEATS} for row in rows]

    def mlflow(self, sql: str) -> list[tuple[Any, ...]]:
        """Rows from the tracking store; none before its first use."""
        there = (self.root / ".mlflow" / "mlflow.db").exists()
        return self.query(".mlflow/mlflow.db", sql) if there else []


class Flow:
    """One start of the job by a route."""

    def __init__(self, arena: Arena, route: Route, *options: str, **variables: str) -> None:
        self.arena = arena
        self.began = time.monotonic()
        self.process: subprocess.Popen[str] | None = None
        self.flow_run = ""
        if route == "deployment":
            self.flow_run = arena.ask(f"deployments/{arena.deployment}/create_flow_run")["id"]
            return
        command = ["./run", "-m", "flows", "pretrain", "--arm", "ddp", *options]
        if route == "plain":
            command.append("--plain")
        else:
            variables["PREFECT_API_URL"] = arena.api
        self.process = arena.start(*command, output=subprocess.DEVNULL, **variables)

    def ended(self) -> bool:
        """Whether it is over, in whatever way."""
        if self.process is not None:
            return self.process.poll() is not None
        return self.state() in ENDED

    def state(self) -> str:
        """Type of the flow run's state, of a deployment."""
        where = f"{self.arena.api}/flow_runs/{self.flow_run}"
        answer = prefect_api.HTTP.get(where, timeout=prefect_api.TIMEOUT_S)
        answer.raise_for_status()
        return str(answer.json()["state_type"])

    def cancel(self) -> None:
        """As the Prefect page does it."""
        state = {"type": "CANCELLING", "name": "Cancelling"}
        self.arena.ask(f"flow_runs/{self.flow_run}/set_state", state=state)

    def forget(self) -> None:
        """See to it that it is over for good; a worker that comes later must not take it up."""
        if self.process is not None:
            self.process.wait()
        elif not self.ended():
            state = {"type": "CANCELLED", "name": "Cancelled"}
            self.arena.ask(f"flow_runs/{self.flow_run}/set_state", state=state, force=True)

    def members(self, part: str) -> list[psutil.Process]:
        """Its processes of a kind: supervisor, agent or rank."""
        marks = {"supervisor": "tasks.supervisor", "agent": "tasks.agent", "rank": "-u"}
        found = []
        for process in self.arena.strays():
            with contextlib.suppress(psutil.Error):
                if marks[part] in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def wait(self, timeout_s: float = START_S) -> None:
        """Until it has ended."""
        give_up = time.monotonic() + timeout_s
        while not self.ended():
            if time.monotonic() > give_up:
                raise TimeoutError("a job of seconds has not ended in minutes")
            time.sleep(0.1)
