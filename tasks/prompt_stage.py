"""Stage `prompts`: a generator or files -> rows that a job reads, and the tokenizer for them.

Jobs know no Parquet, so what they read is jsonl. Rows with one prompt follow each other.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from algorithms.branch_replay import gym, lookup
from algorithms.common.errors import InputError, one_line
from algorithms.common.files import TOKENIZER_FILES, write_json
from tasks import paths
from tasks.data_config import PromptsConfig
from tasks.downloads import file_sha256
from tasks.prompts import read_prompts
from tasks.rows import Row, write_rows
from tasks.staging import staged

VERSION = "1"


def build(config: PromptsConfig, out: Path) -> dict[str, Any]:
    """Write train.jsonl, val.jsonl, the tokenizer's files and MANIFEST.json to `out`, in one move;
    returns what the manifest holds: rows and hashes.

    Raises `InputError` that names file, row and column.
    """
    with staged(out) as folder:
        manifest: dict[str, Any] = {}
        for split, count in (("train", config.train), ("val", config.val)):
            rows = [row for same in _texts(config, split, count) for row in same]
            path = folder / f"{split}.jsonl"
            try:
                write_rows(path, rows)
            except TypeError as error:  # a date, say
                raise InputError(f"prompts.files.{split}: {one_line(error)}") from None
            manifest[split] = {"rows": len(rows), "sha256": file_sha256(path)}
        if config.lookup is not None:
            _write_lookup_tokenizer(config.lookup, folder)
        else:
            assert config.tokenizer is not None
            _copy_tokenizer(paths.PROJECT / config.tokenizer, folder)
        # All of it: the template of a chat and the end of a response lie beside tokenizer.json.
        files = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
        manifest["tokenizer"] = {path.name: file_sha256(path) for path in files}
        write_json(folder / "MANIFEST.json", manifest)
    return manifest


def _texts(config: PromptsConfig, split: str, count: int) -> list[list[Row]]:
    """The rows of each of the first `count` texts."""
    rows: Iterable[Row]
    if config.lookup is not None:
        rows = lookup.rows(config.lookup, count, config.seed, split)
    elif config.gym is not None:
        rows = gym.rows(config.gym, count, config.seed, split)
    else:
        assert config.files is not None
        rows = read_prompts(paths.PROJECT / getattr(config.files, split))
    by_text: dict[str, list[Row]] = {}
    for row in rows:
        by_text.setdefault(json.dumps(row["prompt"]), []).append(row)
    return list(by_text.values())[:count]


def _write_lookup_tokenizer(config: lookup.LookupConfig, folder: Path) -> None:
    lookup.make_tokenizer(config).save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    marks = {"bos_token": lookup.BEGIN, "eos_token": lookup.END, "pad_token": lookup.END}
    write_json(folder / "tokenizer_config.json", settings | marks)


def _copy_tokenizer(source: Path, folder: Path) -> None:
    if not (source / "tokenizer.json").is_file():
        raise InputError(f"prompts.tokenizer: {source} holds no tokenizer.json")
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
