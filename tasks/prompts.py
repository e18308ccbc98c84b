"""Prompts and preferences from jsonl and Parquet, in TRL's columns or verl's.

TRL: `prompt`, a text or a list of messages {role, content}, and any columns that a reward reads.
verl: `prompt`, a list of messages; `reward_model.ground_truth`, which becomes `answer`;
`extra_info.index`, which becomes `prompt_id`. Ours: also `question`, which follows the prompt, so
that rows with one prompt share it. Preferences: `prompt`, `chosen`, `rejected`; without `prompt`
it is what the other two begin with, as in TRL.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from algorithms.common.errors import InputError
from tasks.rows import Row, read_rows


def read_prompts(path: Path) -> list[Row]:
    """Rows with `prompt_id` (their number where they have none), `prompt`, `question` (a text, ""
    where there is none), `answer` where there is one, and all of their own columns.

    Raises `InputError` that names file, row and column.
    """
    return _read(path, _prompt)


def read_preferences(path: Path) -> list[Row]:
    """Rows with `prompt_id`, `prompt`, and `chosen` and `rejected`: texts, or messages of which the
    last is the response."""
    return _read(path, _preference)


def _read(path: Path, normal: Any) -> list[Row]:
    rows: list[Row] = []
    seen: dict[str, str] = {}
    for where, row in read_rows(path):
        known = normal(row, where)
        prompt_id = _prompt_id(row, where, len(rows))
        if prompt_id in seen:
            raise InputError(f"{where}: prompt_id: {prompt_id!r} is also that of {seen[prompt_id]}")
        seen[prompt_id] = where.removeprefix(f"{path}: ")
        rows.append(row | known | {"prompt_id": prompt_id})
    if not rows:
        raise InputError(f"{path}: holds no rows")
    return rows


def _prompt(row: Row, where: str) -> Row:
    _text_or_messages(row, "prompt", where)
    question = row.get("question")
    found: Row = {"question": "" if question is None else question}
    if not isinstance(found["question"], str):
        kind = type(found["question"]).__name__
        raise InputError(f"{where}: question: must be a text, not a {kind}")
    if row.get("answer") is None and row.get("reward_model") is not None:
        reward_model = row["reward_model"]
        if not isinstance(reward_model, dict) or "ground_truth" not in reward_model:
            raise InputError(f"{where}: reward_model: must hold ground_truth")
        found["answer"] = reward_model["ground_truth"]
    return found


def _preference(row: Row, where: str) -> Row:
    explicit = row.get("prompt") is not None
    for column in ("prompt", "chosen", "rejected")[0 if explicit else 1 :]:
        _text_or_messages(row, column, where)
    if row["chosen"] == row["rejected"]:
        raise InputError(f"{where}: rejected: is the same as chosen")
    return {} if explicit else _split(row, where)


def _split(row: Row, where: str) -> Row:
    """The beginning that `chosen` and `rejected` share is their prompt; a blank that a text of it
    ends with belongs to the responses."""
    chosen, rejected = row["chosen"], row["rejected"]
    pairs = enumerate(zip(chosen, rejected, strict=False))
    shared = next((i for i, (a, b) in pairs if a != b), min(len(chosen), len(rejected)))
    if isinstance(chosen, str) and chosen[:shared].endswith(" "):
        shared -= 1
    if not shared:
        raise InputError(f"{where}: no column 'prompt', and chosen and rejected share no beginning")
    return {"prompt": chosen[:shared], "chosen": chosen[shared:], "rejected": rejected[shared:]}


def _prompt_id(row: Row, where: str, number: int) -> str:
    given = row.get("prompt_id")
    if given is None and isinstance(row.get("extra_info"), dict):
        given = row["extra_info"].get("index")
    if given is None:
        return str(number)
    if isinstance(given, bool) or not isinstance(given, str | int):
        kind = type(given).__name__
        raise InputError(f"{where}: prompt_id: must be a text or an integer, not a {kind}")
    return str(given)


def _text_or_messages(row: Row, column: str, where: str) -> None:
    """Raise `InputError` unless the column holds a text or messages, and any at all."""
    if column not in row:
        raise InputError(f"{where}: no column {column!r}; it has: {', '.join(row) or 'none'}")
    value = row[column]
    if not isinstance(value, str | list):
        kind = type(value).__name__
        raise InputError(f"{where}: {column}: must be a text or a list of messages, not a {kind}")
    if not value:
        raise InputError(f"{where}: {column}: is empty")
    if isinstance(value, str):
        return
    for i, message in enumerate(value):
        texts = isinstance(message, dict) and all(
            isinstance(message.get(key), str) for key in ("role", "content")
        )
        if not texts:
            raise InputError(f"{where}: {column}[{i}]: must have a role and a content, both texts")
