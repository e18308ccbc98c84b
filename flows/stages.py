"""The stages and what each depends on: the Python twin of dvc.yaml and of studies/*/dvc.yaml; a
test compares them.

`Context` answers where a stage's outputs lie: in the project for the params of params.yaml, below
runs/set/ for a stage that `--set` or `--profile` changed, directly or through what it reads. What
a study makes lies in a folder of its own in either.
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
    """As DVC addresses it."""
    params: tuple[str, ...]
    """Dotted keys of params.yaml that its result depends on."""
    reads: tuple[str, ...]
    """Stages whose outputs it reads."""
    code: tuple[str, ...]
    """Files and folders of code that its result depends on."""
    arm: str | None = None
    """The arm that it trains."""
    study: str | None = None
    """The study that it belongs to; None for what every experiment makes."""


def stages(params: Params) -> list[Stage]:
    """All stages, each after those it reads; those of a study are the last."""
    code = {stage: tuple(f"tasks/{name}.py" for name in names) for stage, names in CODE.items()}
    arms = [_arm(stage, arm) for stage, config in params.pretraining.items() for arm in config.arms]
    found = [
        Stage("corpus", ("corpus",), (), code["corpus"]),
        Stage("tokens", ("tokens",), ("corpus",), code["tokens"]),
        *arms,
        Stage("report", (), tuple(arm.name for arm in arms), code["report"]),
    ]
    for study, stage in params.studies.items():
        more = [_arm(stage, arm, study) for arm in params.pretraining[stage].study]
        reads = tuple(arm.name for arm in (*arms, *more))
        found += [*more, Stage(_address("report", study), (), reads, code["report"], study=study)]
    return found


def _arm(stage: str, arm: str, study: str | None = None) -> Stage:
    own = f"{stage}.{'arms' if study is None else 'study'}.{arm}"
    return Stage(
        _address(f"{stage}@{arm}", study),
        ("model", f"{stage}.training", own),
        ("tokens",),
        (*JOB_CODE[stage], f"tasks/jobs/{stage}.py", "tasks/train.py"),
        arm,
        study,
    )


def _address(stage: str, study: str | None) -> str:
    return stage if study is None else f"studies/{study}/dvc.yaml:{stage}"


@dataclass(frozen=True)
class Context:
    """What one run works with: its params, and where outputs of each stage lie."""

    params: Params
    changed: frozenset[str]
    """Stages whose result differs from what params.yaml says."""
    workspace: Workspace
    """Of the changed stages."""

    def base(self, stage: str) -> Workspace:
        """The project, or the workspace of changed stages: whichever has the outputs of `stage`."""
        return self.workspace if stage in self.changed else Workspace()

    def place(self, stage: str) -> Workspace:
        """Where the outputs of `stage` lie: `base`, or a study's folder in it."""
        base, study = self.base(stage), self.stage(stage).study
        return base if study is None else base.study(study)

    def stage(self, name: str) -> Stage:
        """The stage of that name."""
        return next(stage for stage in stages(self.params) if stage.name == name)

    def arm(self, name: str) -> Stage:
        """The stage that trains the arm of that name; `InputError` for an unknown one."""
        self.params.stage_of(name)
        return next(stage for stage in stages(self.params) if stage.arm == name)

    def arms(self, study: str | None = None) -> list[str]:
        """Names of the arms of `study`, by default of those that every experiment trains."""
        found = [stage for stage in stages(self.params) if stage.study == study]
        return [stage.arm for stage in found if stage.arm is not None]

    def report(self, study: str | None = None) -> Stage:
        """The stage that compares the arms of every experiment, and those of `study` if given.

        `InputError` for an unknown study.
        """
        if study is not None:
            self.params.require_study(study)
        return self.stage(_address("report", study))


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
