"""A whole project of its own for a test: this one with tiny params, and the real tools."""

import contextlib
import os
import random
import shutil
import sqlite3
import subprocess
from pathlib import Path, PurePath
from typing import Any

import psutil
from ruamel.yaml import YAML

from tasks.paths import PROJECT

PARAMS = """\
corpus:
  sources:
    - from: path:texts/*.txt
      licence: CC0-1.0
      slots:
        prose: ["**/*"]
  val_fraction: 0.3

tokens:
  vocab_size: 300

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
    steps: 12
    sequence_length: 16
    global_batch: 8
    warmup_steps: 2
    log_every: 2
    eval_every: 6
    eval_sequences: 8
    checkpoint_every: 5
  arms:
    ddp:
      optimizer:
        lr: 1.0e-2
    lordo_global:
      method: local
      inner: lordo
      optimizer: {lr: 3.0e-2}
      low_rank: {rank: 4}
      sync: {every: 3, momentum_every: 6, variance_every: 6}
  study:
    lordo_ns:
      method: local
      inner: lordo_ns
      optimizer: {lr: 3.0e-2}
      momentum: bf16
      low_rank: {rank: 4, projection: frozen}
      sync: {every: 3, outer: nesterov, outer_momentum: 0.7, wire: int4, residual: weights}

launch:
  deadline_minutes: 10
  stop_seconds: 5
"""

WORDS = "a river of small stones under the bridge carries cold light past old mills and gardens"


class Project:
    """A clone at `root`; its tools run in a bare environment, as in a fresh shell."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True)
        listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.check_output(listing, cwd=PROJECT, text=True).split("\0"):
            if name and PurePath(name).name != "dvc.lock" and (PROJECT / name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(PROJECT / name, root / name)
        (root / "params.yaml").write_text(PARAMS)
        self._forget_other_arms("params.gpu.yaml")
        generator = random.Random(0)
        (root / "texts").mkdir()
        for index in range(40):
            words = generator.choices(WORDS.split(), k=120)
            (root / "texts" / f"{index:02}.txt").write_text(" ".join(words) + "\n")
        (root / ".venv").symlink_to(PROJECT / ".venv")
        (root / ".gitignore").open("a").write("/.venv\n")
        self.git("init", "-q", "-b", "main")
        self.git("add", "-A")
        self.git("commit", "-qm", "start")

    def _forget_other_arms(self, profile: str) -> None:
        """A profile says what differs, so it may only name arms that are there."""
        yaml = YAML()
        ours, theirs = yaml.load(PARAMS), yaml.load(self.root / profile)
        for group in ("arms", "study"):
            arms = theirs["pretrain_lordo"][group]
            for name in set(arms) - set(ours["pretrain_lordo"][group]):
                del arms[name]
        yaml.dump(theirs, self.root / profile)

    def git(self, *arguments: str) -> str:
        who = ["-c", "user.name=test", "-c", "user.email=test@example.invalid"]
        return subprocess.check_output(["git", *who, *arguments], cwd=self.root, text=True)

    def execute(
        self, *command: str, timeout: float = 400, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the project; no variable of ours but PATH, HOME and the index's."""
        return subprocess.run(
            command,
            cwd=self.root,
            env=_bare_environment() | variables,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def start(self, *command: str, **variables: str) -> subprocess.Popen[str]:
        """The same in a session of its own, as in a terminal, without waiting for its end."""
        return subprocess.Popen(
            command,
            cwd=self.root,
            env=_bare_environment() | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def processes(self) -> list[psutil.Process]:
        """Processes that work in this project or know of it."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            with contextlib.suppress(psutil.Error, OSError):
                known = [process.cwd(), *process.cmdline(), *process.environ().values()]
                if any(str(self.root) in text for text in known):
                    found.append(process)
        return found

    def kill(self) -> None:
        """End what a failed test left behind."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def query(self, database: str, sql: str) -> list[tuple[Any, ...]]:
        """Rows from a sqlite file of the project."""
        with contextlib.closing(sqlite3.connect(self.root / database)) as connection:
            return connection.execute(sql).fetchall()

    def flows(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.execute("./run", "-m", "flows", *arguments)

    def dvc(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.execute(".venv/bin/dvc", *arguments)

    def set(self, old: str, new: str) -> None:
        """Change one line of params.yaml."""
        path = self.root / "params.yaml"
        text = path.read_text()
        assert text.count(old) == 1
        path.write_text(text.replace(old, new))


def _bare_environment() -> dict[str, str]:
    kept = ("PATH", "HOME", "LANG")
    return {k: v for k, v in os.environ.items() if k in kept or k.startswith("SSL_")}
