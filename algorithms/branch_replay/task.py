"""A folder of the stage `prompts` as the learner takes it: tokens, questions, and their reward.

A question follows its prompt on a line of its own; of messages, in the last of them, and the chat
template of the tokenizer makes the text. Rows that follow each other with one prompt share it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from algorithms.branch_replay.collect import Rolled, preference
from algorithms.branch_replay.prompts import Prompt, Question, shared_prompt
from algorithms.branch_replay.rewards import find_reward, score
from algorithms.common.errors import InputError, one_line
from algorithms.common.pretrained import load_tokenizer

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Scored:
    """A response in words."""

    prompt_id: str
    prompt: str
    completion: str
    reward: float


class Task:
    """The prompts in `folder` and the function named `reward`.

    Raises `InputError` for a folder without tokenizer or rows, an unknown reward, and a reward that
    raises or is no number; the message names the row.
    """

    def __init__(self, folder: Path, reward: str) -> None:
        self.folder = folder
        self.reward = find_reward(reward)
        self.tokenizer = load_tokenizer(folder)

    def prompts(self, split: str) -> list[Prompt]:
        """Of `train` or `val`, in the order of their rows."""
        path = self.folder / f"{split}.jsonl"
        if not path.is_file():
            raise InputError(f"{path}: no such file")
        rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        groups = itertools.groupby(rows, key=lambda row: json.dumps(row["prompt"]))
        return [
            shared_prompt([(row["prompt_id"], self._encode(row), row) for row in same])
            for _, same in groups
        ]

    def eos(self, model: Any) -> Collection[int]:
        """What ends a response: by the tokenizer, and all that the model's own settings name."""
        found = model.generation_config.eos_token_id
        ends = {*(found if isinstance(found, list) else [found]), self.tokenizer.eos_token_id}
        if not (ends := ends - {None}):
            raise InputError(f"{self.folder}: neither tokenizer nor model has an end of a response")
        return ends

    def text(self, row: Row) -> str:
        """The prompt and the question of a row, as the model reads them."""
        prompt, question = row["prompt"], row["question"]
        if isinstance(prompt, str):
            return f"{prompt}\n{question}" if question else prompt
        *before, last = prompt
        if question:
            last = last | {"content": f"{last['content']}\n{question}"}
        try:
            text: str = self.tokenizer.apply_chat_template(
                [*before, last], add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # of the template, which is the tokenizer's own program
            raise InputError(
                f"prompt {row['prompt_id']}: chat template: {one_line(error)}"
            ) from None
        return text

    def preferences(self, rows: Iterable[Row], device: torch.device) -> list[Rolled]:
        """Pairs to learn from; a row's `chosen` and `rejected` are texts, or messages of which the
        last is the response."""
        found = []
        for row in rows:
            prompt = shared_prompt([(row["prompt_id"], self._encode({**row, "question": ""}), row)])
            pair = [self._response(row[column]).to(device) for column in ("chosen", "rejected")]
            found.append(Rolled(prompt, [preference(prompt.questions[0], *pair)]))
        return found

    def scored(self, question: Question, tokens: Tensor, ends: Collection[int]) -> Scored:
        """The response int64 [tokens] in words, without its end, and its reward."""
        ids = tokens.tolist()
        if ids and ids[-1] in ends:
            ids = ids[:-1]
        prompt, completion = self.text(question.row), self.tokenizer.decode(ids)
        where = f"prompt {question.prompt_id}"
        value = score(self.reward, prompt, completion, question.row, where)
        return Scored(question.prompt_id, prompt, completion, value)

    def _encode(self, row: Row) -> list[int]:
        """The template of a chat writes its marks itself, a bare text has none."""
        marks = isinstance(row["prompt"], str)
        ids: list[int] = self.tokenizer.encode(self.text(row), add_special_tokens=marks)
        if not ids:
            raise InputError(f"prompt {row['prompt_id']}: has no tokens")
        return ids

    def _response(self, said: str | list[Mapping[str, str]]) -> Tensor:
        """Its tokens and the end, int64 [tokens]."""
        text = said if isinstance(said, str) else said[-1]["content"]
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return torch.tensor([*ids, self.tokenizer.eos_token_id], dtype=torch.long)
