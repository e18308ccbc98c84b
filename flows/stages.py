"""The stages and what each depends on: the Python twin of dvc.yaml (a test compares the two).

`Context` answers where a stage's outputs lie: in the project for the params of params.yaml, below
runs/set/ for a stage that `--set` or `--profile` changed, directly or through what it reads.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tasks.config import Params, load_params
from tasks.paths import RUNS, Workspace

CODE = {
    "corpus": ("archives", "corpus", "downloads", "formats", "globs", "sources"),
    "tokens": ("token_bytes", "tokens"),
    "report": ("arms", "figures", "plots", "report_page", "units"),
}
"""Modules of tasks/ that decide what a stage makes."""

JOB_CODE = {"pretrain_lordo": ("algorithms/common", "algorithms/lordo")}
"""Folders that decide what the arms of a pretraining stage make, beside the job itself."""


@dataclass(frozen=True)
class Stage:
    """One DVC stage."""

    name: str
    params: tuple[str, ...]
    """Dotted keys of params.yaml that its result depends on."""
    reads: tuple[str, ...]
    """Stages whose outputs it reads."""
    code: tuple[str, ...]
    """Files and folders of code that its result depends on."""


def stages(params: Params) -> list[Stage]:
    """All stages, each after those it reads."""
    code = {stage: tuple(f"tasks/{name}.py" for name in names) for stage, names in CODE.items()}
    arms = [
        Stage(
            f"{stage}@{arm}",
            ("model", f"{stage}.training", f"{stage}.arms.{arm}"),
            ("tokens",),
            (*JOB_CODE[stage], f"tasks/jobs/{stage}.py", "tasks/train.py"),
        )
        for stage, config in params.pretraining.items()
        for arm in config.arms
    ]
    return [
        Stage("corpus", ("corpus",), (), code["corpus"]),
        Stage("tokens", ("tokens",), ("corpus",), code["tokens"]),
        *arms,
        Stage("report", (), tuple(arm.name for arm in arms), code["report"]),
    ]


@dataclass(frozen=True)
class Context:
    """What one run works with: its params, and where outputs of each stage lie."""

    params: Params
    changed: frozenset[str]
    """Stages whose result differs from what params.yaml says."""
    workspace: Workspace
    """Of the changed stages."""

    def place(self, stage: str) -> Workspace:
        """Where the outputs of `stage` lie."""
        return self.workspace if stage in self.changed else Workspace()

    def stage(self, name: str) -> Stage:
        """The stage of that name."""
        return next(stage for stage in stages(self.params) if stage.name == name)

    def arms(self) -> list[tuple[str, str]]:
        """(stage, arm) of every arm of params.yaml."""
        return [(s, arm) for s, config in self.params.pretraining.items() for arm in config.arms]


def context(overrides: Sequence[str] = (), profile: str | None = None) -> Context:
    """Load and validate params.yaml with overrides; raises `InputError`."""
    plain = load_params()
    if not overrides and profile is None:
        return Context(plain, frozenset(), Workspace())
    params = load_params(profile=profile, overrides=overrides)
    changed: set[str] = set()
    before, after = plain.to_dict(), params.to_dict()
    for stage in stages(params):
        differs = any(_get(before, key) != _get(after, key) for key in stage.params)
        if differs or changed.intersection(stage.reads):
            changed.add(stage.name)
    digest = hashlib.sha256(json.dumps(after, sort_keys=True).encode()).hexdigest()[:12]
    return Context(params, frozenset(changed), Workspace(RUNS / "set" / digest))


def _get(values: Any, dotted: str) -> Any:
    for part in dotted.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values
