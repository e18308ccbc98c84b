"""Prompts and preferences in the columns of others."""

import pytest

from algorithms.common.errors import InputError
from tasks.prompts import read_preferences, read_prompts
from tasks.rows import write_rows

CHAT = [{"role": "user", "content": "2 + 2?"}]
VERL = {
    "data_source": "sums",
    "prompt": CHAT,
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 12, "split": "train"},
}


def written(folder, rows, name="p.parquet"):
    path = folder / name
    write_rows(path, rows)
    return path


@pytest.mark.parametrize("name", ["p.jsonl", "p.parquet"])
def test_trl_columns(tmp_path, name):
    rows = [{"prompt": "2 + 2?", "solution": "4"}, {"prompt": "3 + 3?", "solution": "6"}]
    assert read_prompts(written(tmp_path, rows, name)) == [
        rows[0] | {"prompt_id": "0", "question": ""},
        rows[1] | {"prompt_id": "1", "question": ""},
    ]


@pytest.mark.parametrize("name", ["p.jsonl", "p.parquet"])
def test_verl_columns(tmp_path, name):
    (row,) = read_prompts(written(tmp_path, [VERL], name))
    assert row == VERL | {"prompt_id": "12", "question": "", "answer": "4"}


def test_questions_on_one_prompt(tmp_path):
    rows = [
        {"prompt_id": f"a/{i}", "prompt": "k1 v1 k2 v2", "question": f"? k{i}", "answer": f"v{i}"}
        for i in (1, 2)
    ]
    assert read_prompts(written(tmp_path, rows)) == rows


@pytest.mark.parametrize("name", ["p.jsonl", "p.parquet"])
def test_preferences(tmp_path, name):
    rows = [{"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}]
    assert read_preferences(written(tmp_path, rows, name)) == [rows[0] | {"prompt_id": "0"}]
    chat = {"prompt": CHAT, "chosen": [{"role": "assistant", "content": "4"}]}
    chat["rejected"] = [{"role": "assistant", "content": "5"}]
    assert read_preferences(written(tmp_path, [chat], name)) == [chat | {"prompt_id": "0"}]


def test_preferences_with_their_prompt_in_both_responses(tmp_path):
    """The shape of many of TRL's datasets."""
    answers = [[{"role": "assistant", "content": text}] for text in ("4", "5")]
    rows = [
        {"chosen": "The sky is blue.", "rejected": "The sky is green."},
        {"chosen": "The sky is", "rejected": "The sky is green."},
    ]
    assert read_preferences(written(tmp_path, rows, "p.jsonl")) == [
        {"prompt": "The sky is", "chosen": " blue.", "rejected": " green.", "prompt_id": "0"},
        {"prompt": "The sky is", "chosen": "", "rejected": " green.", "prompt_id": "1"},
    ]
    chat = {"chosen": CHAT + answers[0], "rejected": CHAT + answers[1]}
    (row,) = read_preferences(written(tmp_path, [chat]))
    assert row == {
        "prompt": CHAT,
        "chosen": answers[0],
        "rejected": answers[1],
        "prompt_id": "0",
    }
    path = written(tmp_path, [{"chosen": "a", "rejected": "b"}])
    with pytest.raises(InputError, match="row 1: no column 'prompt', and chosen and rejected sha"):
        read_preferences(path)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "x"}, "no column 'prompt'; it has: text"),
        ({"prompt": 7}, "prompt: must be a text or a list of messages, not a int"),
        ({"prompt": ""}, "prompt: is empty"),
        ({"prompt": []}, "prompt: is empty"),
        ({"prompt": [{"role": "user"}]}, "prompt[0]: must have a role and a content, both texts"),
        ({"prompt": "x", "question": 3}, "question: must be a text, not a int"),
        ({"prompt": "x", "question": []}, "question: must be a text, not a list"),
        (
            {"prompt": "x", "reward_model": {"style": "rule"}},
            "reward_model: must hold ground_truth",
        ),
        ({"prompt": "x", "prompt_id": 1.5}, "prompt_id: must be a text or an integer, not a float"),
    ],
)
def test_bad_prompts_are_one_line_that_says_where(tmp_path, row, message):
    path = written(tmp_path, [{"prompt": "fine"}, row], "p.jsonl")
    with pytest.raises(InputError) as error:
        read_prompts(path)
    assert str(error.value) == f"{path}: line 2: {message}"


def test_equal_ids_and_files_without_rows_are_refused(tmp_path):
    path = written(tmp_path, [{"prompt": "x", "prompt_id": "a"}] * 2, "p.jsonl")
    with pytest.raises(InputError) as error:
        read_prompts(path)
    assert str(error.value) == f"{path}: line 2: prompt_id: 'a' is also that of line 1"
    with pytest.raises(InputError, match="holds no rows$"):
        read_prompts(written(tmp_path, [], "q.jsonl"))


def test_a_preference_for_the_same_response_is_refused(tmp_path):
    path = written(tmp_path, [{"prompt": "x", "chosen": "a", "rejected": "a"}])
    with pytest.raises(InputError, match="row 1: rejected: is the same as chosen$"):
        read_preferences(path)
