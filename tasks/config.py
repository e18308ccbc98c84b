"""params.yaml -> strict typed config. The only place where pydantic is used.

Errors are one line that names the file and the dotted key, with the closest known key for a typo.
No torch here: bad input fails before anything heavy starts.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from algorithms.async_pipeline import config as async_pipeline
from algorithms.branch_replay import job_config as branch_replay
from algorithms.common.config import (
    Config,
    ModelConfig,
    SharedJobConfig,
    SharedTrainingConfig,
    config_class,
    require,
)
from algorithms.common.errors import FieldError, InputError, one_line
from algorithms.lordo import config as lordo
from tasks.data_config import NAME, CorpusConfig, PromptsConfig, TokensConfig
from tasks.paths import PROJECT
from tasks.stage_config import AsyncConfig, LordoConfig, PostTrainConfig, StageConfig

NOT_YAML = (YAMLError, ValueError, TypeError, RecursionError)
"""What reading YAML may raise: impossible dates, keys that are lists, 3,000 brackets, ..."""


@dataclass(frozen=True, kw_only=True)
class LaunchConfig(Config):
    """How jobs run. Nothing here changes a result."""

    deadline_minutes: float = 120.0
    """A job that takes longer is stopped like one that was cancelled."""
    stop_seconds: float = 10.0
    """Time that ranks have between SIGTERM and SIGKILL to write a checkpoint."""

    def __post_init__(self) -> None:
        for name in ("deadline_minutes", "stop_seconds"):
            require(0 < getattr(self, name) < math.inf, name, "must be positive and finite")


@dataclass(frozen=True, kw_only=True)
class RetentionConfig(Config):
    """What `python -m flows gc` keeps of runs/. Nothing here changes a result."""

    runs: int = 20
    """Newest run directories of an arm; beyond them, those go that MLflow has no run of."""
    workspaces: int = 10
    """Newest folders of what runs with `--set` made."""
    checkpoints: int = 1
    """Newest checkpoints of a finished job. One that is not finished keeps all it has."""
    attempts: int = 5
    """Newest attempts of a job whose logs stay."""

    def __post_init__(self) -> None:
        for name in ("runs", "workspaces", "checkpoints"):
            require(getattr(self, name) >= 0, name, "must not be negative")
        require(self.attempts > 0, "attempts", "must be positive")


@dataclass(frozen=True, kw_only=True)
class Params(Config):
    """The whole of params.yaml."""

    corpus: CorpusConfig
    tokens: TokensConfig
    prompts: PromptsConfig
    model: ModelConfig
    pretrain_lordo: LordoConfig
    pretrain_async: AsyncConfig
    post_train: PostTrainConfig
    launch: LaunchConfig
    retention: RetentionConfig = field(default_factory=RetentionConfig)

    def __post_init__(self) -> None:
        owners = {"policy": "policy"}
        for stage, config in self.stages.items():
            training, model = config.training, self.model_of(stage)
            if isinstance(training, SharedTrainingConfig):
                most = model.max_position_embeddings
                require(
                    model.path is not None or training.sequence_length <= most,
                    f"{stage}.training.sequence_length",
                    f"must be at most model.max_position_embeddings ({most})",
                )
            for arm in config.all_arms:
                owner = owners.setdefault(arm, stage)
                require(owner == stage, f"{stage}.{arm}", f"{owner} has an arm of that name")
        self._check_warm_start()

    def _check_warm_start(self) -> None:
        warm_start, lookup = self.post_train.policy.warm_start, self.prompts.lookup
        if warm_start is None:
            return
        place = "post_train.policy.warm_start"
        require(lookup is not None, place, "needs prompts.lookup, the task that it teaches")
        assert lookup is not None
        most = max(records for records, _ in [*warm_start.stages, warm_start.further])
        known = f"must have at most prompts.lookup.keys ({lookup.keys}) records"
        require(most <= lookup.keys, place, known)

    @property
    def stages(self) -> dict[str, StageConfig]:
        """The stages with arms by name; their arms have names of their own."""
        return {
            "pretrain_lordo": self.pretrain_lordo,
            "pretrain_async": self.pretrain_async,
            "post_train": self.post_train,
        }

    def model_of(self, stage: str) -> ModelConfig:
        """What a stage trains."""
        policy = self.post_train.policy.model
        own = {"pretrain_async": self.pretrain_async.model, "policy": policy, "post_train": policy}
        return own.get(stage, self.model)

    def job(self, arm: str, *, job_id: str = "", **inputs: str) -> SharedJobConfig:
        """The config.json of `arm`, or of `policy`; `inputs` are the folders that it reads, by
        their fields. `InputError` if there is none of that name."""
        stage = self.stage_of(arm)
        kind: dict[str, type[SharedJobConfig]] = {
            "policy": branch_replay.PolicyJobConfig,
            "post_train": branch_replay.JobConfig,
            "pretrain_async": async_pipeline.JobConfig,
            "pretrain_lordo": lordo.JobConfig,
        }
        own: dict[str, Any]
        if stage == "policy":
            policy = self.post_train.policy
            lookup = self.prompts.lookup
            own = {"seed": policy.seed, "lookup": lookup, "warm_start": policy.warm_start}
        else:
            config = self.stages[stage]
            own = {"training": config.training, "arm": config.all_arms[arm]}
        own |= dict.fromkeys(kind[stage].INPUTS, "") | inputs
        model = self.model_of(stage)
        try:
            return kind[stage](stage=stage, arm_name=arm, job_id=job_id, model=model, **own)
        except FieldError as error:
            raise InputError(f"params.yaml: {self._dotted(arm, error)}") from None

    def _dotted(self, arm: str, error: FieldError) -> str:
        """What is wrong with a job, with the key of params.yaml for that of config.json."""
        stage = self.stage_of(arm)
        key = error.field
        if key.startswith("arm."):
            group = "arms" if arm in self.stages[stage].arms else "study"
            key = f"{group}.{arm}.{key.removeprefix('arm.')}"
        return f"{stage}.{key}: {error.message}"

    def stage_of(self, arm: str) -> str:
        """Name of the stage that `arm` belongs to; `InputError` if there is none."""
        if arm == "policy":
            return arm
        for stage, config in self.stages.items():
            if arm in config.all_arms:
                return stage
        known = ", ".join(arm for config in self.stages.values() for arm in config.all_arms)
        raise InputError(f"no arm {arm!r} in params.yaml; known arms: {known}")

    @property
    def studies(self) -> dict[str, str]:
        """Name of a study -> the stage whose further arms it trains."""
        return {
            stage.removeprefix("pretrain_"): stage
            for stage, config in self.stages.items()
            if config.study
        }

    def require_study(self, name: str) -> None:
        """`InputError` unless there is a study of that name."""
        if name not in self.studies:
            known = ", ".join(self.studies) or "none"
            raise InputError(f"no study {name!r} in params.yaml; known studies: {known}")


def load_params(
    path: Path = PROJECT / "params.yaml",
    *,
    profile: str | None = None,
    overrides: typing.Sequence[str] = (),
) -> Params:
    """Read `path`, merge params.PROFILE.yaml over it, apply `a.b=c` overrides, validate.

    Raises `InputError` with one line that names the file and the dotted key.
    """
    raw = load_yaml(path)
    if profile is not None:
        if NAME.fullmatch(profile) is None:
            raise InputError(f"--profile {profile!r}: is not a name")
        raw = _merge(raw, load_yaml(path.with_name(f"params.{profile}.yaml")))
    for override in overrides:
        _apply(raw, override)
    files = [path.name, *([] if profile is None else [f"params.{profile}.yaml"])]
    return validate(raw, " with ".join([*files, *(["--set"] if overrides else [])]))


def load_yaml(path: Path) -> dict[str, Any]:
    """One YAML 1.2 mapping (1e-3 is a number, as DVC reads it), or `InputError`."""
    try:
        loaded = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 at byte {error.start}") from None
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    except NOT_YAML as error:
        raise InputError(f"{path}: not YAML: {one_line(error)}") from None
    if not isinstance(loaded, dict):
        raise InputError(f"{path}: must hold a mapping of stages, not {type(loaded).__name__}")
    return loaded


def validate(raw: dict[str, Any], file: str) -> Params:
    """Typed params from plain values, or `InputError` for the first thing that is wrong."""
    try:
        raw = json.loads(json.dumps(raw, default=str))
    except (
        TypeError,
        ValueError,
        RecursionError,
    ) as error:  # keys that are lists, loops of aliases
        raise InputError(f"{file}: {one_line(error)}") from None
    corpus = raw.get("corpus")
    if isinstance(corpus, dict) and isinstance(corpus.get("sources"), list):
        for number, source in enumerate(corpus["sources"]):  # `from` is a Python keyword
            if isinstance(source, dict) and "origin" in source:
                raise InputError(
                    f"{file}: corpus.sources.{number}.origin: unknown key; write 'from'"
                )
            if isinstance(source, dict) and "from" in source:
                source["origin"] = source.pop("from")
    own, shared = raw.get("pretrain_async"), raw.get("model")
    if isinstance(own, dict) and isinstance(shared, dict):
        over = own.get("model", {})
        own["model"] = _merge(shared, over) if isinstance(over, dict) else over
    try:
        # As JSON: strict there means exact scalars, and a mapping may fill a dataclass.
        return TypeAdapter(Params).validate_json(json.dumps(raw))
    except ValidationError as error:
        raise InputError(f"{file}: {_one_line(error)}") from None


def _one_line(error: ValidationError) -> str:
    found = error.errors()
    unknown = [each for each in found if each["type"] == "unexpected_keyword_argument"]
    first = [*unknown, *found][0]  # a misspelt key is missing too
    location = [str(part) for part in first["loc"]]
    message = first["msg"]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, FieldError):
        location.append(cause.field)
        message = cause.message
    elif first["type"] == "unexpected_keyword_argument":
        close = difflib.get_close_matches(location[-1], _siblings(location[:-1]), n=1)
        message = "unknown key" + (f"; did you mean {close[0]!r}?" if close else "")
    elif first["type"] in ("missing", "missing_argument", "missing_keyword_only_argument"):
        message = "is required"
    else:
        message = message[0].lower() + message[1:] + f", got {first['input']!r}"
    dotted = ".".join("from" if part == "origin" else part for part in location)
    return f"{dotted}: {message}" if dotted else message


def _siblings(location: list[str]) -> list[str]:
    """Field names of the config at a dotted location, to suggest one for a typo."""
    current: Any = Params
    for part in location:
        if dataclasses.is_dataclass(current):
            current = typing.get_type_hints(current).get(part)
            if isinstance(current, types.UnionType):  # X | None
                current = config_class(current)
        else:  # dict[str, X] or list[X]
            current = typing.get_args(current)[-1] if typing.get_args(current) else None
    fields = dataclasses.fields(current) if dataclasses.is_dataclass(current) else ()
    return ["from" if each.name == "origin" else each.name for each in fields]


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        merged[key] = _merge(typing.cast(dict[str, Any], old), value) if both else value
    return merged


def _apply(raw: dict[str, Any], override: str) -> None:
    """Set one `a.b=c`; the value is read as YAML. A new key is left to validation to refuse."""
    dotted, separator, text = override.partition("=")
    if not separator or not dotted:
        raise InputError(f"--set {override}: must be key=value")
    *parents, last = dotted.split(".")
    node: Any = raw
    for part in parents:
        node = node.setdefault(part, {}) if isinstance(node, dict) else None
    if not isinstance(node, dict):
        raise InputError(f"--set {dotted}: no such key")
    try:
        node[last] = YAML(typ="safe", pure=True).load(text)
    except NOT_YAML as error:
        raise InputError(f"--set {dotted}: not YAML: {one_line(error)}") from None
