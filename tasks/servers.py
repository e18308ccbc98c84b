"""The pages of MLflow and Prefect on loopback, a worker for the scheduled deployments, and the
temporary Prefect API of a flow run.

All are children of this process, tied to it: they end when it ends, however it ends.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import requests
from filelock import FileLock

from algorithms.common.errors import InputError, one_line
from tasks import mlflow_store, slots
from tasks.environment import DEFAULTS, MLFLOW, PREFECT, Address, page
from tasks.mlflow_store import tracking_uri
from tasks.paths import LOCKS, PROJECT
from tasks.prctl import die_with_parent

GPU_LIMIT = "shoestring-gpu"
"""Global concurrency limit: how many GPUs the flows of one server use at once."""
POOL = "shoestring"
"""Work pool of prefect.yaml."""
START_S = 180.0
"""A fresh database takes most of a minute to come up on a busy machine."""
STOP_S = 15.0
NO_PAGE = {"PREFECT__SERVER_FINAL": "1", "PREFECT_SERVER_UI_ENABLED": "false"}
"""Environment of a temporary API."""


@contextmanager
def pages(say: Callable[[str], None]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Both pages, up and answering; gives their processes. Raises `InputError` if one cannot be.

    Where MLFLOW_TRACKING_URI is a server, it has a page of its own, and none is started here.
    """
    uri = tracking_uri()
    mlflow = ["mlflow", "ui", "--workers", "1", "--backend-store-uri", uri]
    mlflow += ["--artifacts-destination", str(mlflow_store.home() / "artifacts")]
    prefect = ["prefect", "server", "start"]
    processes = []
    with ExitStack() as stack:
        if not mlflow_store.is_server(uri):
            mlflow_store.ensure_store()
            processes.append(stack.enter_context(_server(mlflow, MLFLOW, "/health")))
        with _first_use():
            processes.append(stack.enter_context(_server(prefect, PREFECT, "/api/health")))
        say("MLflow:  " + mlflow_store.page_url())
        say("Prefect: " + page(PREFECT))
        yield processes


def prefect_api() -> None:
    """See to it that PREFECT_API_URL names a Prefect API: the user's, or one for this process.

    Prefect would start its temporary server by itself, but in our process group, where Ctrl-C
    reaches it before the flow has said how it ended, and without anything that ends it when we are
    killed. So we start the same server (Prefect's `SubprocessASGIServer`) in a session of its own.
    Call this before prefect is imported: at exit the server goes last. Raises `InputError` when the
    user's API does not answer.
    """
    if url := os.environ.get("PREFECT_API_URL"):
        try:
            requests.get(f"{url}/health", timeout=10).raise_for_status()
        except requests.RequestException as error:
            raise InputError(f"{api_name()} does not answer: {one_line(error)}") from None
        return
    address = free_address()
    command = ["uvicorn", "--factory", "prefect.server.api.server:create_app", "--lifespan", "on"]
    command += ["--host", address[0], "--port", str(address[1]), "--log-level", "error"]
    stack = ExitStack()
    with _first_use():
        process = stack.enter_context(_child(command, PREFECT__SERVER_EPHEMERAL="1", **NO_PAGE))
        atexit.register(stack.close)
        _await(process, page(address) + "/api/health")
    os.environ["PREFECT_API_URL"] = page(address) + "/api"
    os.environ.setdefault("PREFECT_UI_URL", page(PREFECT))  # links live on in `make ui`


@contextmanager
def _first_use() -> Iterator[None]:
    """One server of Prefect at a time makes the tables of a fresh database, or the others fail."""
    LOCKS.mkdir(exist_ok=True)
    with FileLock(LOCKS / "prefect.lock"):
        yield


def api_name() -> str:
    """The variable with its value, a password left out."""
    return f"PREFECT_API_URL: {mlflow_store.redact(os.environ['PREFECT_API_URL'])}"


def free_address() -> Address:
    """A port on loopback that is free right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address: Address = probe.getsockname()
        return address


def where_to_look() -> list[str]:
    """Addresses of both pages, and what serves those that no server of the user's serves."""
    api = os.environ.get("PREFECT_API_URL")
    prefect = mlflow_store.redact(api).removesuffix("/api") if api else page(PREFECT)
    lines = [f"MLflow:  {mlflow_store.page_url()}", f"Prefect: {prefect}"]
    commands = []
    if not mlflow_store.is_server(tracking_uri()):
        commands.append(
            "MLFLOW_DISABLE_TELEMETRY=true .venv/bin/mlflow ui --host 127.0.0.1"
            f" --backend-store-uri {_own('MLFLOW_TRACKING_URI')}"
        )
    if not api:
        commands.append(
            f"PREFECT_SERVER_ANALYTICS_ENABLED=false PREFECT_HOME={_own('PREFECT_HOME')}"
            " .venv/bin/prefect server start --host 127.0.0.1"
        )
    return [*lines, "make ui serves them; by hand:", *commands] if commands else lines


def _own(variable: str) -> str:
    """Our value as a shell in the project's folder needs it; the user's is in their shell."""
    ours = os.environ[variable] == DEFAULTS[variable]
    return DEFAULTS[variable].replace(f"{PROJECT}/", "") if ours else f'"${variable}"'


@contextmanager
def worker(say: Callable[[str], None]) -> Iterator[subprocess.Popen[bytes]]:
    """Register the deployments of prefect.yaml and start a worker for them; needs `pages`."""
    os.environ["PREFECT_API_URL"] = page(PREFECT) + "/api"
    _prefect("work-pool", "create", POOL, "--type", "process", "--overwrite")
    _prefect("--no-prompt", "deploy", "--all")
    if gpus := len(slots.devices()):
        _limit(GPU_LIMIT, gpus)
    with _child(["prefect", "worker", "start", "--pool", POOL]) as process:
        say("worker:  runs the deployments of prefect.yaml; Ctrl-C ends all")
        yield process


def wait(processes: list[subprocess.Popen[bytes]]) -> None:
    """Return never, unless one ends by itself: `InputError` names it."""
    while True:
        for process in processes:
            if process.poll() is not None:
                raise InputError(f"{_name(process)} ended with exit code {process.returncode}")
        time.sleep(0.5)


@contextmanager
def _server(command: list[str], address: Address, health: str) -> Iterator[subprocess.Popen[bytes]]:
    host, port = address
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise InputError(f"{command[0]}: {host}:{port}: {error.strerror}") from None
    with _child([*command, "--host", host, "--port", str(port)]) as process:
        _await(process, page(address) + health)
        yield process


@contextmanager
def _child(command: list[str], **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A program of our environment that ends with this process, or on leaving the block.

    It has a session of its own, out of reach of the terminal's Ctrl-C.

    By SIGTERM, which it passes on to processes of its own; SIGKILL would leave them behind.
    """
    program = str(Path(sys.executable).with_name(command[0]))
    process = subprocess.Popen(
        [program, *command[1:]],
        cwd=PROJECT,
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGTERM),
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _prefect(*arguments: str) -> None:
    program = str(Path(sys.executable).with_name("prefect"))
    done = subprocess.run([program, *arguments], cwd=PROJECT, capture_output=True, text=True)
    if done.returncode != 0:
        raise InputError(f"prefect {' '.join(arguments)}: {one_line(done.stdout + done.stderr)}")


def _limit(name: str, count: int) -> None:
    """Make Prefect's global concurrency limit `name`, or set it anew."""
    try:
        _prefect("gcl", "create", name, "--limit", str(count))
    except InputError:  # it is there
        _prefect("gcl", "update", name, "--limit", str(count))


def _await(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise InputError(f"{_name(process)} ended with exit code {process.returncode}")
        try:
            if requests.get(url, timeout=2).ok:
                return
        except requests.RequestException:
            pass
        time.sleep(0.5)
    raise InputError(f"{_name(process)}: no answer from {url} in {START_S:.0f} s")


def _name(process: subprocess.Popen[bytes]) -> str:
    arguments = process.args
    assert isinstance(arguments, list)
    return Path(str(arguments[0])).name
