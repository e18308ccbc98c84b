"""Rewards: functions `reward(prompt, completion, row)` of two texts and the row they belong to.

A reward is named `module:function`, or by its name alone if it is one of those below. What it
raises, and what it returns that is no finite number, stops the run with the row's name.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from algorithms.branch_replay.gym import reasoning_gym
from algorithms.common.errors import InputError, one_line

Row = Mapping[str, Any]
Reward = Callable[[str, str, Row], float]

NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")


def exact_match(prompt: str, completion: str, row: Row) -> float:
    """1 if the completion is the row's `answer`, but for blanks around both; else 0."""
    return float(completion.strip() == str(row["answer"]).strip())


def number(prompt: str, completion: str, row: Row) -> float:
    """1 if the last number of the completion is that of the row's `answer`; else 0."""
    found, wanted = (_last_number(text) for text in (completion, str(row["answer"])))
    if wanted is None:
        raise ValueError(f"answer: {row['answer']!r} holds no number")
    return float(found == wanted)


def regex(prompt: str, completion: str, row: Row) -> float:
    """1 if the row's `answer`, a regular expression, matches somewhere in the completion; else
    0."""
    return float(re.search(str(row["answer"]), completion) is not None)


BUILT_IN: dict[str, Reward] = {
    "exact_match": exact_match,
    "number": number,
    "regex": regex,
    "reasoning_gym": reasoning_gym,
}


def find_reward(name: str) -> Reward:
    """The function called `name`; `InputError` says which part of it does not exist."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        known = ", ".join(BUILT_IN)
        raise InputError(f"reward: {name!r} is neither module:function nor one of {known}")
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except (Exception, SystemExit) as error:  # whatever the user's module does when imported
        raise InputError(f"reward: {module}: {type(error).__name__}: {one_line(error)}") from error
    if not callable(found):
        raise InputError(f"reward: {module} has no function {attribute!r}")
    reward: Reward = found
    return reward


def score(reward: Reward, prompt: str, completion: str, row: Row, where: str) -> float:
    """The reward as a finite float; raises `InputError` that names `where`."""
    try:
        value = reward(prompt, completion, row)
    except (Exception, SystemExit) as error:  # of the user's function, or of a row without answer
        raise InputError(f"{where}: reward: {type(error).__name__}: {one_line(error)}") from error
    try:
        result = float(value)
    except OverflowError:  # of a whole number
        raise InputError(f"{where}: reward: must return a number that a float holds") from None
    except Exception:  # of the value's own type
        kind = type(value).__name__
        raise InputError(f"{where}: reward: must return a number, not a {kind}") from None
    if not math.isfinite(result):
        raise InputError(f"{where}: reward: must return a finite number, not {result}")
    return result


def _last_number(text: str) -> float | None:
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None
