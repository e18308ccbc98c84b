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


@dataclass(frozen=True)
class Stage:
    """One DVC stage."""

    name: str
    params: tuple[str, ...]
    """Dotted keys of params.yaml that its result depends on."""
    reads: tuple[str, ...]
    """Stages whose outputs it reads."""


def stages(params: Params) -> list[Stage]:
    """All stages, each after those it reads."""
    arms = [
        Stage(
            f"pretrain_lordo@{arm}",
            ("model", "pretrain_lordo.training", f"pretrain_lordo.arms.{arm}"),
            ("tokens",),
        )
        for arm in params.pretrain_lordo.arms
    ]
    return [
        Stage("corpus", ("corpus",), ()),
        Stage("tokens", ("tokens",), ("corpus",)),
        *arms,
        Stage("report", (), tuple(arm.name for arm in arms)),
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
        return self.workspace if stage in self.changed else Workspace()


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
