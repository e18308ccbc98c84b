import os
import pty
import subprocess
import sys

from tasks.paths import PROJECT

CODE = (
    "from tasks.progress import progress\n"
    "with progress('reading', 7) as advance:\n    advance(3)\n    advance(4)\n"
)


def test_silent_unless_stderr_is_a_terminal() -> None:
    environment = os.environ | {"FORCE_COLOR": "1"}
    command = [sys.executable, "-c", CODE]
    run = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, check=True)
    assert (run.stdout, run.stderr) == (b"", b"")


def test_a_bar_on_a_terminal() -> None:
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "120"}
    command = [sys.executable, "-c", CODE]
    subprocess.run(command, cwd=PROJECT, env=environment, stderr=theirs, check=True)
    os.close(theirs)
    drawn = os.read(ours, 65536).decode()
    os.close(ours)
    assert "reading" in drawn
    assert "7/7" in drawn
