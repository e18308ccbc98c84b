"""DVC answers what is up to date: in a repository of its own, and while others use it too."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from algorithms.common.errors import InputError
from tasks import lineage
from tasks.paths import PROJECT, Workspace
from tests.project import Project

HOLD_DVC = """
import sys, time
from dvc.repo import Repo
with Repo(sys.argv[1]) as repo, repo.lock:
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""
HOLD_STAGE = """
import sys, time
from pathlib import Path
from tasks import lineage
from tasks.paths import Workspace
lineage.LOCKS = Path(sys.argv[1])
with lineage.stage_lock("tokens", Workspace()):
    print("held", flush=True)
    sys.stdin.readline()
    time.sleep(2)
    print(time.time(), flush=True)
"""


@pytest.fixture(autouse=True)
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(lineage, "LOCKS", tmp_path / "locks")
    return tmp_path / "locks"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project with corpus and tokens, made behind DVC's back, as a flow's tasks do."""
    project = Project(tmp_path_factory.mktemp("lineage") / "project")
    done = project.flows("prepare", "--plain")
    assert done.returncode == 0, done.stderr
    return project


@contextlib.contextmanager
def holder(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Another process, once it holds its lock."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=PROJECT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_reasons_are_words_and_recording_ends_them(
    made: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = made.root
    monkeypatch.chdir(tmp_path)  # as well as anywhere else
    assert {"tasks/sources.py is modified", "params.yaml is new"} <= {
        *lineage.stale("corpus", root=root)
    }
    lineage.record("corpus", root=root)
    assert lineage.stale("corpus", root=root) == []
    lineage.record("tokens", root=root)
    assert lineage.stale("tokens", root=root) == []
    assert "data/tokens" in (root / "dvc.lock").read_text()
    assert made.dvc("status", "corpus", "tokens").stdout.strip().endswith("up to date.")

    with (root / "tasks" / "tokens.py").open("a") as file:
        file.write("# other code\n")
    made.set("vocab_size: 300", "vocab_size: 301")
    assert lineage.stale("corpus", root=root) == []
    assert sorted(lineage.stale("tokens", root=root)) == [
        "params.yaml: tokens changed",
        "tasks/tokens.py is modified",
    ]
    (root / "data" / "corpus" / "MANIFEST.json").unlink()
    assert lineage.stale("corpus", root=root) == ["data/corpus is modified"]


def test_a_stage_of_a_study_is_addressed_by_its_file(made: Project) -> None:
    root, file = made.root, "studies/lordo/dvc.yaml"
    arm = f"{file}:pretrain_lordo@lordo_ns"
    for name in ("models/pretrain_lordo/lordo_ns/config", "metrics/pretrain_lordo/lordo_ns/curve"):
        path = root / "studies" / "lordo" / f"{name}.json"
        path.parent.mkdir(parents=True)
        path.write_text("{}")
    (path.parent / "quality.json").write_text("{}")
    assert "params.yaml is new" in lineage.stale(arm, root=root)
    lineage.record(arm, root=root)
    assert lineage.stale(arm, root=root) == []
    assert "lordo_ns" in (root / "studies" / "lordo" / "dvc.lock").read_text()
    assert "lordo_ns" not in (root / "dvc.lock").read_text()
    made.set("momentum: bf16", "momentum: fp32")
    reason = "params.yaml: pretrain_lordo.study.lordo_ns changed"
    assert lineage.stale(arm, root=root) == [reason]
    both = lineage.stale(arm, f"{file}:report", root=root)
    assert reason in both and "studies/lordo/reports/summary.json is deleted" in both
    with pytest.raises(InputError, match="^dvc.yaml: .*nonsense"):
        lineage.stale(f"{file}:pretrain_lordo@nonsense", root=root)


def test_an_unknown_stage_and_no_repository_are_one_line(made: Project, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="^dvc.yaml: .*nonsense"):
        lineage.stale("nonsense", root=made.root)
    with pytest.raises(InputError, match="not a git checkout with DVC; clone the project$"):
        lineage.stale("corpus", root=tmp_path)


def test_a_dvc_command_of_somebody_else_is_waited_for(made: Project) -> None:
    with holder(HOLD_DVC, str(made.root), "600"):
        with pytest.raises(lineage.Busy, match="^dvc is busy in another process: "):
            lineage.stale("corpus", patience_s=0.0, root=made.root)
        with pytest.raises(lineage.Busy):
            lineage.record("corpus", patience_s=0.0, root=made.root)
    with holder(HOLD_DVC, str(made.root), "2"):
        begun = time.monotonic()
        lineage.stale("corpus", root=made.root)
        assert time.monotonic() - begun > 1


def test_locks_of_dead_processes_stop_nobody(made: Project) -> None:
    with holder(HOLD_DVC, str(made.root), "600") as other:
        other.kill()
        other.wait()
        lineage.stale("corpus", patience_s=0.0, root=made.root)
    dead = {"pid": other.pid, "cmd": "dvc repro"}
    output = str(made.root / "data" / "corpus")
    rwlock = made.root / ".dvc" / "tmp" / "rwlock"
    rwlock.write_text(json.dumps({"read": {output: [dead]}, "write": {output: dead}}))
    lineage.record("corpus", patience_s=0.0, root=made.root)
    assert str(other.pid) not in rwlock.read_text()


@pytest.mark.parametrize("left", ["", '{"read": {'], ids=["nothing", "a part"])
def test_a_lock_file_that_was_half_written_is_named_at_once(made: Project, left: str) -> None:
    """DVC writes it under a lock of its own: who finds it so need not wait for the rest."""
    rwlock = made.root / ".dvc" / "tmp" / "rwlock"
    rwlock.write_text(left)
    try:
        with pytest.raises(InputError, match=rf"^{rwlock}: damaged, .* remove it when none"):
            lineage.record("corpus", root=made.root)
    finally:
        rwlock.unlink()
    lineage.record("corpus", patience_s=0.0, root=made.root)


def test_one_process_at_a_time_makes_a_stage(locks: Path, caplog: pytest.LogCaptureFixture) -> None:
    with holder(HOLD_STAGE, str(locks)) as other:
        with lineage.stage_lock("corpus", Workspace()):
            assert other.poll() is None, "another stage is free"
        with lineage.stage_lock("studies/x/dvc.yaml:tokens", Workspace()):
            assert other.poll() is None, "so is that of a study"
        with lineage.stage_lock("tokens", Workspace(locks / "set" / "0123")):
            assert other.poll() is None, "and the stage of another place"
        assert caplog.messages == []
        assert other.stdin is not None and other.stdout is not None
        other.stdin.write("go on\n")
        other.stdin.flush()
        with lineage.stage_lock("tokens", Workspace()):
            entered = time.time()
        assert float(other.stdout.readline()) <= entered
        assert caplog.messages == ["tokens is being made by another process; waiting for it"]
    with holder(HOLD_STAGE, str(locks)) as other:
        os.kill(other.pid, signal.SIGKILL)
        with lineage.stage_lock("tokens", Workspace()):
            pass  # the dead leave no lock behind
