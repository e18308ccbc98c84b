"""Exit codes, error files and logs of a job's main, without torchrun."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tasks.paths import PROJECT


def start(tmp_path: Path, action: str, **env: str) -> subprocess.Popen[str]:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"0": action, "3": action}))
    return subprocess.Popen(
        [sys.executable, "-m", "tests.jobs.scripted", str(config)],
        cwd=PROJECT,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("action", "code", "kind", "message"),
    [
        ("input data/x: no such file", 2, "input", "data/x: no such file"),
        ("non_finite step 7: loss is nan", 3, "non_finite", "step 7: loss is nan"),
        ("exit 7", 7, "crash", "SystemExit: 7"),
        ("raise boom", 1, "crash", "RuntimeError: boom"),
    ],
    ids=["input", "non_finite", "exit", "raise"],
)
def test_error_to_exit_code_and_file(
    tmp_path: Path, action: str, code: int, kind: str, message: str
) -> None:
    before = time.time()
    process = start(tmp_path, action, RANK="3", SHOESTRING_LOG_DIR=str(tmp_path))
    assert process.communicate(timeout=30) == ("", "")
    assert process.returncode == code
    said = json.loads((tmp_path / "rank_3.error.json").read_text())
    assert before <= said.pop("time") <= time.time()
    assert said == {"rank": 3, "kind": kind, "message": message}
    log = (tmp_path / "rank_3.log").read_text().splitlines()
    assert log[0].startswith("rank 3: ")
    known = kind != "crash"
    assert log[-1] == (f"tests.jobs.scripted: {message}" if known else message)
    assert ("Traceback (most recent call last):" in log) is not known


def test_preempted_is_75(tmp_path: Path) -> None:
    process = start(tmp_path, "checkpoint", SHOESTRING_LOG_DIR=str(tmp_path))
    while not (tmp_path / "ready_0").exists():
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 75
    assert json.loads((tmp_path / "rank_0.error.json").read_text())["kind"] == "preempted"


def test_success_appends_to_the_log_and_leaves_no_error(tmp_path: Path) -> None:
    (tmp_path / "rank_0.log").write_text("before\n")
    process = start(tmp_path, "print 2", SHOESTRING_LOG_DIR=str(tmp_path))
    assert process.communicate(timeout=30) == ("", "")
    assert process.returncode == 0
    log = (tmp_path / "rank_0.log").read_text()
    assert log == "before\nrank 0: print 2\nline 0\nline 1\n"
    assert not (tmp_path / "rank_0.error.json").exists()


def test_without_the_launcher_output_stays_on_the_terminal(tmp_path: Path) -> None:
    process = start(tmp_path, "input data/x: bad")
    out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (2, "tests.jobs.scripted: data/x: bad\n")
    assert out.startswith("rank 0: ")
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "ready_0"}


def test_a_killed_agent_takes_the_rank_along(tmp_path: Path) -> None:
    process = start(tmp_path, "exit 0", SHOESTRING_AGENT=str(1 << 22))
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "ready_0").exists()


def test_arguments(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.jobs.scripted"]
    shown = subprocess.run([*command, "--help"], cwd=PROJECT, capture_output=True, text=True)
    assert shown.returncode == 0
    assert shown.stdout.startswith("usage: torchrun -m tests.jobs.scripted [-h] CONFIG.json")
    missing = tmp_path / "none.json"
    done = subprocess.run([*command, str(missing)], cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == f"tests.jobs.scripted: {missing}: no such file\n"


def test_the_main_of_a_job_imports_nothing_heavy() -> None:
    code = (
        "import sys, tasks.jobs.entry; print(sorted({'torch', 'psutil', 'numpy'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True)
    assert done.stdout == "[]\n"
