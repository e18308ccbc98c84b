"""Prompts of a folder as tokens, and the reward of an answer."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from algorithms.branch_replay.lookup import END, make_tokenizer
from algorithms.branch_replay.task import Task
from algorithms.common.errors import InputError
from tasks.data_config import PromptsConfig
from tasks.prompt_stage import build
from tests.lookups import SMALL, lookup_prompts

TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}v0"
"""Ends with what a real one ends with: where the answer begins."""


@pytest.fixture
def folder(tmp_path):
    build(PromptsConfig(lookup=SMALL, train=3, val=2), tmp_path / "prompts")
    return tmp_path / "prompts"


def test_questions_of_a_text_share_it(folder):
    found = Task(folder, "exact_match").prompts("train")
    expected = lookup_prompts(3)
    assert len(found) == 3
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.tokens, theirs.tokens)
        for a, b in zip(ours.questions, theirs.questions, strict=True):
            assert a.prompt_id == b.prompt_id and torch.equal(a.tokens, b.tokens)


def test_an_answer_is_scored_without_its_end_and_a_wrong_mark_is_wrong(folder):
    task = Task(folder, "exact_match")
    question = task.prompts("val")[0].questions[0]
    tokenizer = make_tokenizer(SMALL)
    end = tokenizer.token_to_id(END)
    right = tokenizer.encode(question.row["answer"]).ids
    said = task.scored(question, torch.tensor([*right, end]), {end})
    assert said.reward == 1.0 and said.completion == question.row["answer"]
    assert said.prompt.endswith(question.row["question"])
    assert task.scored(question, torch.tensor([*right, 0]), {end}).reward == 0.0
    assert task.scored(question, torch.tensor([], dtype=torch.long), {end}).reward == 0.0


def test_several_ends_come_from_tokenizer_and_model(folder):
    task = Task(folder, "exact_match")
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=[5, 7]))
    assert task.eos(model) == {1, 5, 7}
    model.generation_config.eos_token_id = None
    assert task.eos(model) == {1}


def test_messages_go_through_the_template_and_share_what_comes_before_the_question(folder):
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    messages = [{"role": "k0", "content": "v1 v2"}, {"role": "k1", "content": "f0"}]
    rows = [
        {"prompt_id": str(i), "prompt": messages, "question": f"? k{i}", "answer": "v1"}
        for i in range(2)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = Task(folder, "exact_match")
    [prompt] = task.prompts("train")
    assert task.text(rows[1]).split() == ["k0", "v1", "v2", "k1", "f0", "?", "k1", "v0"]
    assert len(prompt.tokens) == 6 and [len(q.tokens) for q in prompt.questions] == [2, 2]


def test_preferences_are_pairs_with_ends_behind_their_prompt(folder):
    task = Task(folder, "exact_match")
    texts = {"prompt_id": "a", "prompt": "k0 v1", "chosen": "v1 v2", "rejected": "v0"}
    chat = [{"role": "assistant", "content": "v1 v2"}]
    found = task.preferences([texts, texts | {"chosen": chat}], torch.device("cpu"))
    tokenizer = make_tokenizer(SMALL)
    for rolled in found:
        [group] = rolled.groups
        assert rolled.prompt.tokens.tolist() == task._encode(texts | {"question": ""})
        assert [response.tolist() for response in group.responses] == [
            tokenizer.encode(f"{text} {END}").ids for text in ("v1 v2", "v0")
        ]
        assert group.rewards.tolist() == [1.0, 0.0] and group.recorded is None


def test_what_is_missing_or_raises_is_one_line(folder, tmp_path):
    with pytest.raises(InputError, match="holds no tokenizer"):
        Task(tmp_path, "exact_match")
    with pytest.raises(InputError, match="reward: 'exact' is neither"):
        Task(folder, "exact")
    blank = {"prompt_id": "7", "prompt": "  ", "question": ""}
    (folder / "val.jsonl").write_text(json.dumps(blank))
    task = Task(folder, "number")
    with pytest.raises(InputError, match="^prompt 7: has no tokens$"):
        task.prompts("val")
    (folder / "val.jsonl").unlink()
    with pytest.raises(InputError, match=r"val\.jsonl: no such file"):
        task.prompts("val")
    question = task.prompts("train")[0].questions[0]
    nameless = replace(question, row=question.row | {"answer": "none"})
    with pytest.raises(InputError, match="^prompt train/0/0: reward: ValueError: answer: 'none'"):
        task.scored(nameless, torch.tensor([1]), {1})
    for broken in ("{}", '{"added_tokens": []}', "["):
        (folder / "tokenizer.json").write_text(broken)
        with pytest.raises(InputError, match="holds no tokenizer"):
            Task(folder, "number")
