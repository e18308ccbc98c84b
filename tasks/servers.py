"""The pages of MLflow and Prefect on loopback, and a worker for the scheduled deployments.

All are children of this process, tied to it: they end when it ends, however it ends.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import requests

from algorithms.common.errors import InputError
from tasks import environment, tracking
from tasks.paths import PROJECT
from tasks.prctl import die_with_parent

MLFLOW = ("127.0.0.1", 5000)
PREFECT = ("127.0.0.1", 4200)
POOL = "shoestring"
"""Work pool of prefect.yaml."""
START_S = 180.0
"""A fresh database takes most of a minute to come up on a busy machine."""
STOP_S = 15.0


@contextmanager
def pages(say: Callable[[str], None]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Both pages, up and answering; gives their processes. Raises `InputError` if one cannot be."""
    environment.prepare()
    tracking.ensure_store()
    uri = os.environ["MLFLOW_TRACKING_URI"]
    mlflow = ["mlflow", "ui", "--workers", "1", "--backend-store-uri", uri]
    with (
        _server(mlflow, MLFLOW, "/health") as first,
        _server(["prefect", "server", "start"], PREFECT, "/api/health") as second,
    ):
        say("MLflow:  " + _url(MLFLOW))
        say("Prefect: " + _url(PREFECT))
        yield [first, second]


@contextmanager
def worker(say: Callable[[str], None]) -> Iterator[subprocess.Popen[bytes]]:
    """Register the deployments of prefect.yaml and start a worker for them; needs `pages`."""
    os.environ["PREFECT_API_URL"] = _url(PREFECT) + "/api"
    _prefect("work-pool", "create", POOL, "--type", "process", "--overwrite")
    _prefect("--no-prompt", "deploy", "--all")
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
def _server(
    command: list[str], address: tuple[str, int], health: str
) -> Iterator[subprocess.Popen[bytes]]:
    host, port = address
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise InputError(f"{command[0]}: {host}:{port}: {error.strerror}") from None
    with _child([*command, "--host", host, "--port", str(port)]) as process:
        _await(process, _url(address) + health)
        yield process


@contextmanager
def _child(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A program of our environment that dies with this process; ended on leaving the block."""
    program = str(Path(sys.executable).with_name(command[0]))
    process = subprocess.Popen(
        [program, *command[1:]],
        cwd=PROJECT,
        stdout=subprocess.DEVNULL,
        preexec_fn=partial(die_with_parent, os.getpid()),
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
        text = " ".join((done.stdout + done.stderr).split())
        raise InputError(f"prefect {' '.join(arguments)}: {text}")


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


def _url(address: tuple[str, int]) -> str:
    return f"http://{address[0]}:{address[1]}"
