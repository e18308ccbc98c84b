"""Devices are held by one job at a time, as long as its last process lives."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from algorithms.common.errors import InputError
from tasks import slots
from tasks.paths import PROJECT

HOLDER = """
import subprocess, sys
from pathlib import Path
from tasks import slots
slots.LOCKS = Path(sys.argv[1])
with slots.hold(int(sys.argv[2])) as held:
    if sys.argv[3:]:
        subprocess.Popen(["sleep", "600"], pass_fds=held.locks, stdout=subprocess.DEVNULL)
    print(*held.devices, flush=True)
    sys.stdin.read()
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three GPUs, by the names that a user gave them."""
    monkeypatch.setattr(slots, "LOCKS", tmp_path)
    monkeypatch.setattr(slots, "POLL_S", 0.02)
    monkeypatch.setenv(slots.VISIBLE, "0, GPU-4/5,2")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Another process, once it holds its devices."""
    running = []

    def begin(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(tmp_path), *arguments],
            cwd=PROJECT,
            env={**os.environ, "PYTHONPATH": str(PROJECT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        running.append(process)
        return process

    yield begin
    for process in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_each_gets_devices_of_its_own(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    other = start("2")
    assert said(other) == "0 GPU-4/5"
    with slots.hold(1) as held:
        assert held.devices == ("2",)
    assert caplog.messages == []
    waited: list[tuple[str, ...]] = []

    def wait() -> None:
        with slots.hold(2) as held:
            waited.append(held.devices)

    caplog.set_level(logging.WARNING)
    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.3)
    assert waited == []
    with slots.hold(1) as held:
        assert held.devices == ("2",), "who waits for two does not sit on one"
    other.kill()  # the dead hold nothing
    other.wait()
    thread.join(10)
    assert waited == [("0", "GPU-4/5")]
    # Of `hold(1)` too, if it came just while the other tried for two.
    told = [line for line in caplog.messages if "2 GPUs" in line]
    assert told == ["waiting for 2 GPUs: other jobs are at work there"]


def test_who_inherits_a_device_keeps_it_when_the_owner_is_killed(start: Start) -> None:
    owner = start("3", "with an heir")
    said(owner)
    owner.kill()
    owner.wait()
    held = threading.Event()

    def wait() -> None:
        with slots.hold(1):
            held.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert not held.wait(0.5)
    os.killpg(owner.pid, signal.SIGKILL)
    assert held.wait(10)
    thread.join()


def test_more_than_there_are_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    message = "^training.ranks: 4 GPUs are needed, this machine has 3$"
    with pytest.raises(InputError, match=message), slots.hold(4):
        pass
    monkeypatch.delenv(slots.VISIBLE)
    monkeypatch.setattr(slots, "DRIVER", tmp_path / "gpus")
    assert slots.devices() == []
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / "gpus" / name).mkdir(parents=True)
    assert slots.devices() == ["0", "1"]
