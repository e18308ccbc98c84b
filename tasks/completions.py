"""What a policy answered to held-out prompts at every evaluation, as tables of the report."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

HEAD, TAIL = 48, 96
"""Characters of a long prompt that are shown: the question is at its end."""
COLUMNS = ("prompt", "completion", "reward", "decoding")


def section(arms: Sequence[tuple[str, Sequence[Mapping[str, Any]]]]) -> str:
    """HTML of the rows of each arm (name, rows of completions.json): a table for each evaluation,
    of which the last is open; empty without any."""
    tables = [_arm(name, rows) for name, rows in arms if rows]
    return f"<h3>Completions</h3>\n{''.join(tables)}" if tables else ""


def _arm(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    last = rows[-1]["step"]
    parts = []
    for step, group in itertools.groupby(rows, key=lambda row: row["step"]):
        shown = " open" if step == last else ""
        parts.append(
            f"<details{shown}><summary>{escape(name)}, update {step}</summary>\n"
            f"{_table(list(group))}</details>\n"
        )
    return "".join(parts)


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    head = "".join(f'<th scope="col">{column}</th>' for column in COLUMNS)
    body = "\n".join(f"<tr>{''.join(map(_cell, COLUMNS, _texts(row)))}</tr>" for row in rows)
    return (
        f'<div class="wide"><table class="texts">\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>\n"
    )


def _texts(row: Mapping[str, Any]) -> list[str]:
    return [clipped(row["prompt"]), row["completion"], f"{row['reward']:g}", row["decoding"]]


def _cell(column: str, text: str) -> str:
    if column in ("prompt", "completion"):
        return f"<td><code>{escape(text)}</code></td>"
    return f"<td>{escape(text)}</td>"


def clipped(text: str) -> str:
    """A long text without its middle."""
    if len(text) <= HEAD + TAIL:
        return text
    return f"{text[:HEAD]} \N{HORIZONTAL ELLIPSIS} {text[-TAIL:]}"
