"""params.yaml -> strict typed config. The only place where pydantic is used.

Errors are one line that names the file and the dotted key, with the closest known key for a typo.
No torch here: bad input fails before anything heavy starts.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from algorithms.common.config import (
    Config,
    ModelConfig,
    TrainingConfig,
    config_class,
    require,
)
from algorithms.common.errors import FieldError, InputError, one_line
from algorithms.lordo.config import ArmConfig
from tasks.paths import PROJECT

_ORIGINS = {
    "pypi": ("pypi:NAME==VERSION", r"pypi:[A-Za-z0-9][\w.-]*==[\w.!+-]+"),
    "debian": ("debian:NAME", r"debian:[a-z0-9][a-z0-9+.-]+"),
    "stdlib": ("stdlib", r"stdlib"),
    "path": ("path:GLOB", r"path:.+"),
    "hf": ("hf:NAME", r"hf:.+"),
}
"""Kind of a source -> form and pattern of its `from`."""


NOT_YAML = (YAMLError, ValueError, TypeError, RecursionError)
"""What reading YAML may raise: impossible dates, keys that are lists, 3,000 brackets, ..."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
"""Of arms, slots and profiles: they become names of folders and files."""


def _require_names(names: typing.Iterable[str], field: str) -> None:
    for name in names:
        known = "letters, digits, - and _, at most 64, not - or _ first"
        require(NAME.fullmatch(name) is not None, f"{field}.{name!r}", f"a name has {known}")


@dataclass(frozen=True, kw_only=True)
class SourceConfig(Config):
    """One source of text.

    `from` is `pypi:NAME==VERSION`, `debian:NAME`, `stdlib`, `path:GLOB` or `hf:NAME`.
    """

    origin: str
    """Written `from` in params.yaml."""
    sha256: str | None = None
    """Of the downloaded archive; required for pypi."""
    slots: dict[str, list[str]] = field(default_factory=lambda: {"text": ["**/*"]})
    """Slot name (prose, code, ...) -> globs inside the archive or folder."""
    text_column: str = "text"
    """Column of jsonl, parquet and hf sources that holds the text."""
    split: str = "train"
    """Split of an hf source."""
    licence: str | None = None
    """Overrides what the package says of itself; `path` sources have no other way to say it."""

    def __post_init__(self) -> None:
        kind, _, rest = self.origin.partition(":")
        known = ", ".join(_ORIGINS)
        require(kind in _ORIGINS, "from", f"unknown kind {kind!r}; known: {known}")
        form, pattern = _ORIGINS[kind]
        require(re.fullmatch(pattern, self.origin) is not None, "from", f"must be {form}")
        valid = self.sha256 is None or re.fullmatch(r"[0-9a-f]{64}", self.sha256) is not None
        require(valid, "sha256", "must be 64 lower-case hexadecimal digits")
        if kind == "pypi":
            require(self.sha256 is not None, "sha256", "is required for a pypi source")
        if kind == "path":
            require(".." not in rest.split("/"), "from", "must not hold '..'")
        if kind == "hf":
            require(self.sha256 is None, "sha256", "cannot be checked for an hf source")
        require(bool(self.slots), "slots", "must name at least one slot")
        _require_names(self.slots, "slots")
        for slot, globs in self.slots.items():
            require(bool(globs), f"slots.{slot}", "must name at least one glob")


@dataclass(frozen=True, kw_only=True)
class CorpusConfig(Config):
    """Stage `corpus`: text from packages and files, split into train and val by file hash."""

    sources: list[SourceConfig]
    val_fraction: float = 0.05
    """Share of documents held out, by the hash of their text."""

    def __post_init__(self) -> None:
        require(bool(self.sources), "sources", "must name at least one source")
        require(0 < self.val_fraction < 1, "val_fraction", "must be in (0, 1)")


@dataclass(frozen=True, kw_only=True)
class TokensConfig(Config):
    """Stage `tokens`: byte-level BPE trained on the corpus, or an existing tokenizer."""

    tokenizer: str | None = None
    """Path of an existing tokenizer.json; None trains one of `vocab_size`."""
    vocab_size: int = 2048
    shard_tokens: int = 100_000_000

    def __post_init__(self) -> None:
        require(
            257 <= self.vocab_size <= 2**20,
            "vocab_size",
            "must be at least 257 (256 bytes and the end) and at most 2^20",
        )
        require(self.shard_tokens > 0, "shard_tokens", "must be positive")


@dataclass(frozen=True, kw_only=True)
class PretrainConfig(Config):
    """Stage `pretrain_lordo`: its arms train on the same tokens with the same evaluation."""

    training: TrainingConfig
    arms: dict[str, ArmConfig]
    """What `experiment` trains."""
    study: dict[str, ArmConfig]
    """Further arms: `experiment --study` trains them too. Empty where there are none."""

    def __post_init__(self) -> None:
        require(bool(self.arms), "arms", "must name at least one arm")
        _require_names(self.arms, "arms")
        _require_names(self.study, "study")
        for name in self.study:
            require(name not in self.arms, f"study.{name}", "arms has one of that name")

    @property
    def all_arms(self) -> dict[str, ArmConfig]:
        """`arms`, then those of `study`."""
        return self.arms | self.study


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
class Params(Config):
    """The whole of params.yaml."""

    corpus: CorpusConfig
    tokens: TokensConfig
    model: ModelConfig
    pretrain_lordo: PretrainConfig
    launch: LaunchConfig

    def __post_init__(self) -> None:
        for stage, config in self.pretraining.items():
            longest = self.model.max_position_embeddings
            require(
                self.model.path is not None or config.training.sequence_length <= longest,
                f"{stage}.training.sequence_length",
                f"must be at most model.max_position_embeddings ({longest})",
            )

    @property
    def pretraining(self) -> dict[str, PretrainConfig]:
        """The pretraining stages by name; their arms have names of their own."""
        return {"pretrain_lordo": self.pretrain_lordo}

    def stage_of(self, arm: str) -> str:
        """Name of the pretraining stage that `arm` belongs to; `InputError` if there is none."""
        for stage, config in self.pretraining.items():
            if arm in config.all_arms:
                return stage
        known = ", ".join(arm for config in self.pretraining.values() for arm in config.all_arms)
        raise InputError(f"no arm {arm!r} in params.yaml; known arms: {known}")

    @property
    def studies(self) -> dict[str, str]:
        """Name of a study -> the pretraining stage whose further arms it trains."""
        return {
            stage.removeprefix("pretrain_"): stage
            for stage, config in self.pretraining.items()
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
    return validate(raw, path.name)


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
    try:
        # As JSON: strict there means exact scalars, and a mapping may fill a dataclass.
        return TypeAdapter(Params).validate_json(json.dumps(raw))
    except ValidationError as error:
        raise InputError(f"{file}: {_one_line(error)}") from None


def _one_line(error: ValidationError) -> str:
    first = error.errors()[0]
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
    return (
        [f.name for f in dataclasses.fields(current)] if dataclasses.is_dataclass(current) else []
    )


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
