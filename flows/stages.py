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
from pathlib import Path
from typing import Any

from algorithms.common.errors import InputError
from tasks.config import Params, load_params
from tasks.paths import RUNS, Workspace

CODE = {
    "corpus": ("archives", "corpus", "downloads", "formats", "globs", "sources"),
    "tokens": ("token_bytes", "tokens"),
    "prompts": ("prompt_stage", "prompts", "rows"),
    "report": (
        "arms",
        "completions",
        "figures",
        "gantt",
        "measures",
        "plots",
        "report_page",
        "units",
    ),
}
"""Modules of tasks/ that decide what a stage makes."""

GENERATORS = ("algorithms/branch_replay/gym.py", "algorithms/branch_replay/lookup.py")
"""What else decides the stage `prompts`."""

PREPARED = ["corpus", "tokens", "prompts", "policy"]
"""What arms read, each after what it reads itself."""

JOB_CODE = {
    "policy": ("algorithms/branch_replay", "algorithms/common"),
    "post_train": (
        "algorithms/branch_replay",
        "algorithms/common",
        "kernels",
        "tasks/prompts.py",
        "tasks/rollouts.py",
        "tasks/rows.py",
    ),
    "pretrain_async": ("algorithms/async_pipeline", "algorithms/common"),
    "pretrain_lordo": ("algorithms/common", "algorithms/lordo"),
}
"""What decides what a stage's jobs make, beside the job itself and `tasks/train.py`."""

MODEL = {
    "post_train": (),
    "pretrain_async": ("model", "pretrain_async.model"),
    "pretrain_lordo": ("model",),
}
"""Where the model of a stage's arms is described; that of `post_train` is the policy's."""

INPUTS = {
    "post_train": ("prompts", "policy"),
    "pretrain_async": ("tokens",),
    "pretrain_lordo": ("tokens",),
}
"""Stages that a stage's arms read."""

FLOWS = {"post_train": "post_train", "pretrain_async": "pretrain", "pretrain_lordo": "pretrain"}
"""The flow that trains a stage's arms."""


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
    flow: str | None = None
    """The flow that trains it."""
    study: str | None = None
    """The study that it belongs to; None for what every experiment makes."""


def stages(params: Params) -> list[Stage]:
    """All stages, each after those it reads; those of a study are the last."""
    code = {stage: tuple(f"tasks/{name}.py" for name in names) for stage, names in CODE.items()}
    trained = {
        stage: [_arm(stage, arm) for arm in config.arms] for stage, config in params.stages.items()
    }
    arms = [arm for own in trained.values() for arm in own]
    found = [
        Stage("corpus", ("corpus",), (), code["corpus"]),
        Stage("tokens", ("tokens",), ("corpus",), code["tokens"]),
        Stage("prompts", ("prompts",), (), (*GENERATORS, *code["prompts"])),
        Stage("policy", ("post_train.policy",), ("prompts",), _job_code("policy")),
        *arms,
        Stage("report", (), tuple(arm.name for arm in arms), code["report"]),
    ]
    for study, stage in params.studies.items():
        more = [_arm(stage, arm, study) for arm in params.stages[stage].study]
        reads = tuple(arm.name for arm in (*trained[stage], *more))
        found += [*more, Stage(_address("report", study), (), reads, code["report"], study=study)]
    return found


def _arm(stage: str, arm: str, study: str | None = None) -> Stage:
    own = f"{stage}.{'arms' if study is None else 'study'}.{arm}"
    return Stage(
        _address(f"{stage}@{arm}", study),
        (*MODEL[stage], f"{stage}.training", own),
        INPUTS[stage],
        _job_code(stage),
        arm,
        FLOWS[stage],
        study,
    )


def _job_code(stage: str) -> tuple[str, ...]:
    return (*JOB_CODE[stage], f"tasks/jobs/{stage}.py", "tasks/train.py")


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
    prepared_in: Workspace
    """Of those among them that arms read; the points of a sweep share it."""

    def base(self, stage: str) -> Workspace:
        """The project, or the workspace of changed stages: whichever has the outputs of `stage`."""
        if stage not in self.changed:
            return Workspace()
        return self.prepared_in if stage in PREPARED else self.workspace

    def place(self, stage: str) -> Workspace:
        """Where the outputs of `stage` lie: `base`, or a study's folder in it."""
        base, study = self.base(stage), self.stage(stage).study
        return base if study is None else base.study(study)

    def stage(self, name: str) -> Stage:
        """The stage of that name."""
        return next(stage for stage in stages(self.params) if stage.name == name)

    def arm(self, name: str, flow: str | None = None) -> Stage:
        """The stage that trains the arm of that name; `InputError` for an unknown one, and for one
        that `flow` does not train."""
        self.params.stage_of(name)
        found = next((stage for stage in stages(self.params) if stage.arm == name), None)
        if found is None:
            raise InputError(f"{name} is a stage, not an arm; `prepare --only {name}` makes it")
        if flow not in (None, found.flow):
            raise InputError(f"arm {name!r} is trained by the flow {found.flow}, not {flow}")
        return found

    def prepared(self, only: str | None = None, arm: str | None = None) -> list[str]:
        """The stages that the flow `prepare` makes: `only` one, those that `arm` needs, or all."""
        if only is not None:
            return [only]
        return PREPARED if arm is None else self.read_by(arm)

    def read_by(self, arm: str) -> list[str]:
        """The stages whose outputs `arm` reads, and those that they read, in order."""
        wanted = {self.arm(arm).name}
        for stage in reversed(stages(self.params)):
            if stage.name in wanted:
                wanted.update(stage.reads)
        return [stage.name for stage in stages(self.params) if stage.name in wanted][:-1]

    def inputs(self, name: str) -> dict[str, Path]:
        """The folders that the job of stage `name` reads, by field of its config."""
        found = {stage: self.place(stage) for stage in self.stage(name).reads}
        folders = {
            "tokens": lambda place: place.tokens,
            "prompts": lambda place: place.prompts,
            "policy": lambda place: place.policy,
        }
        return {f"{stage}_dir": folders[stage](place) for stage, place in found.items()}

    def arms(self, study: str | None = None) -> list[str]:
        """Names of the arms of `study`, by default of those that every experiment trains."""
        found = [stage for stage in stages(self.params) if stage.study == study]
        return [stage.arm for stage in found if stage.arm is not None]

    def report(self, study: str | None = None) -> Stage:
        """The stage that compares the arms of every experiment; with `study`, those of its stage
        and its own.

        `InputError` for an unknown study.
        """
        if study is not None:
            self.params.require_study(study)
        return self.stage(_address("report", study))


def context(
    overrides: Sequence[str] = (), profile: str | None = None, point: Sequence[str] = ()
) -> Context:
    """Load and validate params.yaml with overrides; raises `InputError`.

    `point` are further ones, of an arm alone: what that reads lies where it does without them.
    """
    plain = load_params()
    if not overrides and profile is None and not point:
        return Context(plain, frozenset(), Workspace(), Workspace())
    params = load_params(profile=profile, overrides=[*overrides, *point])
    changed: set[str] = set()
    before, after = plain.to_dict(), params.to_dict()
    for stage in stages(params):
        differs = any(_get(before, key) != _get(after, key) for key in stage.params)
        if differs or changed.intersection(stage.reads):
            changed.add(stage.name)
    given = load_params(profile=profile, overrides=overrides) if point else params
    return Context(params, frozenset(changed), _workspace(params), _workspace(given))


def _workspace(params: Params) -> Workspace:
    """Of a run with these."""
    digest = hashlib.sha256(json.dumps(params.to_dict(), sort_keys=True).encode()).hexdigest()[:12]
    return Workspace(RUNS / "set" / digest)


def _get(values: Any, dotted: str) -> Any:
    for part in dotted.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values
