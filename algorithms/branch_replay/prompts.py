"""Prompts as the learner takes them: tokens that questions share, and what each adds to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from os.path import commonprefix
from typing import Any

import torch
from torch import Tensor

from algorithms.common.errors import InputError

SHORT = 8
"""Tokens of a question up to which it is run in each of its branches: a node of its own would save
tokens, but costs three small forwards more."""


@dataclass(frozen=True)
class Question:
    """What is asked behind a prompt: `tokens` int64 [n], none where the prompt holds it."""

    prompt_id: str
    tokens: Tensor
    row: Mapping[str, Any]
    """Handed to the reward."""
    behind: int | None = None
    """Of joined prompts, which it is asked on."""


@dataclass(frozen=True)
class Prompt:
    """`tokens` int64 [n] are run once for all questions: with several, a tree of two levels.

    Of several prompts that are joined, [prompts, n].
    """

    tokens: Tensor
    questions: Sequence[Question]


def shared_prompt(rows: Sequence[tuple[str, list[int], Mapping[str, Any]]]) -> Prompt:
    """A prompt of rows (prompt_id, tokens, row): what all of their tokens begin with is shared.

    Raises `InputError` naming the first row where nothing is.
    """
    shared = list(commonprefix([tokens for _, tokens, _ in rows]))
    if not shared:
        raise InputError(f"prompt {rows[0][0]}: its rows have no first token in common")
    questions = [
        Question(name, torch.tensor(tokens[len(shared) :], dtype=torch.long), row)
        for name, tokens, row in rows
    ]
    return Prompt(torch.tensor(shared, dtype=torch.long), questions)


def joined(prompts: Sequence[Prompt], most: int) -> list[Prompt]:
    """Up to `most` prompts of equal length as one, which is run as one batch.

    A prompt with a question of more than `SHORT` tokens stays alone, as the question is a node of
    its own. Order is that of each one's first prompt.
    """
    parts: list[list[Prompt]] = []
    growing: dict[int, list[Prompt]] = {}
    for prompt in prompts:
        short = all(len(question.tokens) <= SHORT for question in prompt.questions)
        part = growing.get(len(prompt.tokens)) if short else None
        if part is not None and len(part) < most:
            part.append(prompt)
            continue
        parts.append([prompt])
        if short:
            growing[len(prompt.tokens)] = parts[-1]
    return [part[0] if len(part) == 1 else _join(part) for part in parts]


def _join(prompts: Sequence[Prompt]) -> Prompt:
    questions = [
        replace(question, behind=i)
        for i, prompt in enumerate(prompts)
        for question in prompt.questions
    ]
    return Prompt(torch.stack([prompt.tokens for prompt in prompts]), questions)
