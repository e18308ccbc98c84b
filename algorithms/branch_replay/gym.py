"""Any dataset of `reasoning_gym` (2505.24760) as prompts, scored by its own scorer.

An item is a function of the dataset's name, settings, seed and place, so a row keeps these and the
scorer makes the item again: what the item knows of itself need not survive a file.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from algorithms.common.config import Config, require
from algorithms.common.errors import InputError, one_line

PACKAGE = "reasoning-gym==0.1.25"
"""The extra `gym`; a dataset is the code of a version."""


@dataclass(frozen=True, kw_only=True)
class GymConfig(Config):
    """Which dataset."""

    name: str
    """As it is registered, such as `chain_sum`."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of its own config class, by their names there."""
    chat: bool = True
    """A question is a message of the user, for models with a chat template; else a bare text."""

    def __post_init__(self) -> None:
        taken = sorted({"seed", "size"} & set(self.settings))
        require(not taken, "settings", f"must not hold {', '.join(taken)}: rows have their own")


def rows(
    config: GymConfig, count: int, seed: int, split: str = "train"
) -> Iterator[dict[str, Any]]:
    """`count` rows: prompt_id, prompt, question (none), answer (the dataset's own, or none), and
    `gym`, which the reward `reasoning_gym` reads. They depend on `seed` and `split`.

    Raises `InputError` for an unknown dataset or setting, or where the package is missing.
    """
    described = {
        "name": config.name,
        "seed": random.Random(f"gym/{seed}/{split}").getrandbits(32),
        "size": count,
        **config.settings,
    }
    dataset = _dataset(json.dumps(described, sort_keys=True))
    for i in range(count):
        item = dataset[i]
        question = item["question"]
        yield {
            "prompt_id": f"{config.name}/{split}/{i}",
            "prompt": [{"role": "user", "content": question}] if config.chat else question,
            "question": "",
            "answer": "" if item["answer"] is None else str(item["answer"]),
            "gym": json.dumps(described | {"item": i}, sort_keys=True),
        }


def reasoning_gym(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """The dataset's score of the last <answer> in the completion, or of all of it if there is none.

    0 for what the scorer cannot read: some raise then.
    """
    described = json.loads(row["gym"])
    place = described.pop("item")
    dataset = _dataset(json.dumps(described, sort_keys=True))
    item = dataset[place]
    from reasoning_gym.utils import extract_answer

    answer = extract_answer(completion)
    try:
        return float(dataset.score_answer(completion.strip() if answer is None else answer, item))
    except Exception:  # each scorer parses in its own way
        return 0.0


@lru_cache(maxsize=64)
def _dataset(described: str) -> Any:
    try:
        import reasoning_gym as library
    except ImportError:
        command = f".venv/bin/pip install {PACKAGE}"
        raise InputError(f"gym: needs the reasoning-gym package: {command}") from None
    settings = json.loads(described)
    name = settings.pop("name")
    try:
        return library.create_dataset(name, **settings)
    except (ValueError, TypeError, AssertionError) as error:
        raise InputError(f"gym: {name}: {one_line(error)}") from None
