"""Multi-key lookup: records `key value value` in a long prompt, questions that name a key.

After RULER's multi-key retrieval (2404.06654, section 3), in symbols of a small vocabulary. What a
question asks can only be answered by reading the prompt, so this is the task on which a gradient
without the prompt should show. Rows of one prompt follow each other and share its text.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from tokenizers import Tokenizer, models, pre_tokenizers

from algorithms.common.config import Config, require, require_positive

BEGIN, END, ASK = "<begin>", "<end>", "?"


@dataclass(frozen=True, kw_only=True)
class LookupConfig(Config):
    """Sizes of the task; a prompt has 1 + 3 records + filler tokens, a question 2, an answer 3."""

    records: int = 6
    """Keys in a prompt, all different."""
    filler: int = 43
    """Symbols without meaning, spread between the records."""
    questions: int = 1
    """On each prompt, by different keys."""
    keys: int = 16
    """Names there are."""
    values: int = 16
    """Symbols that values are made of; a value is two of them."""
    fillers: int = 8

    def __post_init__(self) -> None:
        require_positive(self, "records", "questions", "keys", "values", "fillers")
        require(self.filler >= 0, "filler", "must not be negative")
        require(self.records <= self.keys, "records", f"must be at most keys ({self.keys})")
        require(
            self.questions <= self.records, "questions", f"must be at most records ({self.records})"
        )


def vocabulary(config: LookupConfig) -> list[str]:
    """All symbols; a symbol's place is its token."""
    keys = [f"k{i}" for i in range(config.keys)]
    values = [f"v{i}" for i in range(config.values)]
    return [BEGIN, END, ASK, *keys, *values, *(f"f{i}" for i in range(config.fillers))]


def make_tokenizer(config: LookupConfig) -> Tokenizer:
    """A token for each symbol of a text of symbols and blanks."""
    places = {symbol: i for i, symbol in enumerate(vocabulary(config))}
    tokenizer = Tokenizer(models.WordLevel(places, unk_token=BEGIN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([BEGIN, END])
    return tokenizer


def rows(
    config: LookupConfig, count: int, seed: int, split: str = "train"
) -> Iterator[dict[str, str]]:
    """Rows of `count` prompts: prompt_id, prompt, question, answer. Prompt i depends on `seed`,
    `split` and i alone."""
    for i in range(count):
        draw = random.Random(f"lookup/{seed}/{split}/{i}")
        keys = draw.sample(range(config.keys), config.records)
        values = [
            f"v{draw.randrange(config.values)} v{draw.randrange(config.values)}" for _ in keys
        ]
        spots = [draw.randrange(config.records + 1) for _ in range(config.filler)]
        parts = [BEGIN]
        for spot in range(config.records + 1):
            parts += [f"f{draw.randrange(config.fillers)}" for _ in range(spots.count(spot))]
            if spot < config.records:
                parts.append(f"k{keys[spot]} {values[spot]}")
        prompt = " ".join(parts)
        for j, record in enumerate(draw.sample(range(config.records), config.questions)):
            yield {
                "prompt_id": f"{split}/{i}/{j}",
                "prompt": prompt,
                "question": f"{ASK} k{keys[record]}",
                "answer": values[record],
            }
