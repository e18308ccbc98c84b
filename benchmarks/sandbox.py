"""A clone of the project in a folder of its own, where things may go wrong: the real tools, a bare
environment, a git repository.

The caller writes params.yaml and what it reads; `commit` makes the repository that DVC needs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import subprocess
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import psutil

from tasks.paths import PROJECT
from tasks.prctl import die_with_parent


class Sandbox:
    """A clone at `root`; its tools run in a bare environment, as in a fresh shell."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True)
        listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.check_output(listing, cwd=PROJECT, text=True).split("\0"):
            if name and PurePath(name).name != "dvc.lock" and (PROJECT / name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(PROJECT / name, root / name)
        (root / ".venv").symlink_to(PROJECT / ".venv")
        with (root / ".gitignore").open("a") as file:
            file.write("/.venv\n")

    def commit(self) -> None:
        """Make the repository, with all that is there now."""
        self.git("init", "-q", "-b", "main")
        self.git("add", "-A")
        self.git("commit", "-qm", "start")

    def git(self, *arguments: str) -> str:
        who = ["-c", "user.name=test", "-c", "user.email=test@example.invalid"]
        return subprocess.check_output(["git", *who, *arguments], cwd=self.root, text=True)

    def execute(
        self, *command: str, timeout: float = 400, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the clone; no variable of ours but PATH, HOME and the index's."""
        return subprocess.run(
            command,
            cwd=self.root,
            env=_bare_environment() | variables,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def start(
        self, *command: str, output: int | None = subprocess.PIPE, **variables: str
    ) -> subprocess.Popen[str]:
        """The same in a session of its own, as in a terminal, without waiting for its end. It ends
        with this process; call from a main thread."""
        return subprocess.Popen(
            command,
            cwd=self.root,
            env=_bare_environment() | variables,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )

    def processes(self) -> list[psutil.Process]:
        """Processes that work in this clone or know of it."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            with contextlib.suppress(psutil.Error, OSError):
                known = [process.cwd(), *process.cmdline(), *process.environ().values()]
                if any(str(self.root) in text for text in known):
                    found.append(process)
        return found

    def kill(self) -> None:
        """End what is left behind."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def query(self, database: str, sql: str) -> list[tuple[Any, ...]]:
        """Rows from a sqlite file of the clone."""
        with contextlib.closing(sqlite3.connect(self.root / database)) as connection:
            return connection.execute(sql).fetchall()

    def flows(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.execute("./run", "-m", "flows", *arguments)

    def dvc(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.execute(".venv/bin/dvc", *arguments)


def _bare_environment() -> dict[str, str]:
    kept = ("PATH", "HOME", "LANG")
    return {k: v for k, v in os.environ.items() if k in kept or k.startswith("SSL_")}
