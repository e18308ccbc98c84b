import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.paths import PROJECT
from tasks.staging import staged


def fill(out: Path, text: str) -> None:
    with staged(out) as folder:
        (folder / text).write_text(text)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_new_folder_takes_the_place_of_the_old(tmp_path: Path) -> None:
    out = tmp_path / "data" / "out"
    fill(out, "one")
    fill(out, "two")
    assert names(out) == ["two"]
    assert names(out.parent) == ["out"]


def test_a_failure_leaves_the_old_folder(tmp_path: Path) -> None:
    out = tmp_path / "out"
    fill(out, "one")
    with pytest.raises(KeyboardInterrupt), staged(out) as folder:
        (folder / "half").touch()
        raise KeyboardInterrupt
    assert names(out) == ["one"]
    assert names(tmp_path) == ["out"]


def test_a_killed_run_leaves_the_old_folder_and_is_swept_next_time(tmp_path: Path) -> None:
    out = tmp_path / "out"
    fill(out, "one")
    code = (
        "import os, pathlib, signal\nfrom tasks.staging import staged\n"
        f"with staged(pathlib.Path({str(out)!r})) as folder:\n"
        "    (folder / 'half').touch()\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=PROJECT)
    assert run.returncode == -signal.SIGKILL
    assert names(tmp_path) == [".out.new", "out"]
    assert names(out) == ["one"]
    fill(out, "two")
    assert names(tmp_path) == ["out"]
    assert names(out) == ["two"]


def test_a_kill_between_the_two_renames_loses_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    fill(out, "one")
    out.rename(tmp_path / ".out.old")
    with pytest.raises(RuntimeError), staged(out):
        raise RuntimeError
    assert names(out) == ["one"]
