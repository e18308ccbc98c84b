"""The row in which a response is kept: sampled here, or by another engine. No torch here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from algorithms.branch_replay.config import is_number
from algorithms.common.errors import InputError

ROUNDING = 1e-3
"""How far above 0 a log-probability of another engine may lie."""


@dataclass
class Rollout:
    """A response to the prompt `prompt_id`, the `branch`th of them."""

    prompt_id: str
    branch: int
    tokens: list[int]
    log_probs: list[float]
    reward: float
    truncated: bool

    def to_row(self) -> dict[str, Any]:
        """By column; what `from_row` reads."""
        return dict(vars(self))

    @classmethod
    def from_row(cls, row: Mapping[str, Any], where: str) -> Rollout:
        """Checked; `InputError` names `where`, e.g. file and row, and the column."""
        columns = ("prompt_id", "branch", "tokens", "log_probs", "reward", "truncated")
        for column in columns:
            if column not in row:
                known = ", ".join(row) or "none"
                raise InputError(f"{where}: no column {column!r}; it has: {known}")
        values = {column: row[column] for column in columns}
        for column, right, meant in (
            ("prompt_id", isinstance(row["prompt_id"], str), "text"),
            ("branch", _is_count(row["branch"]), "an integer, not negative"),
            ("tokens", _is_list(row["tokens"], _is_count), "a list of token ids"),
            ("log_probs", _is_list(row["log_probs"], _is_finite), "a list of finite numbers"),
            ("reward", _is_finite(row["reward"]), "a finite number"),
            ("truncated", isinstance(row["truncated"], bool), "true or false"),
        ):
            if not right:
                raise InputError(f"{where}: {column}: must be {meant}, not {_short(row[column])}")
        tokens, log_probs = values["tokens"], values["log_probs"]
        if len(tokens) != len(log_probs):
            raise InputError(
                f"{where}: log_probs: {len(log_probs)} of them for {len(tokens)} tokens"
            )
        if positive := [value for value in log_probs if value > ROUNDING]:
            raise InputError(f"{where}: log_probs: {positive[0]} is above 0")
        return cls(**values)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63  # as Parquet and torch hold it


def _is_finite(value: Any) -> bool:
    return is_number(value) and abs(value) <= sys.float_info.max


def _is_list(value: Any, right: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(right, value))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
