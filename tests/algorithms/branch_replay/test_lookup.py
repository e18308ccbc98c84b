"""The lookup task: sizes, answers that are in the prompt, equal rows for equal seeds."""

import pytest

from algorithms.branch_replay.lookup import LookupConfig, make_tokenizer, rows, vocabulary
from algorithms.common.errors import FieldError


@pytest.mark.parametrize(
    "config",
    [
        LookupConfig(),
        LookupConfig(records=8, filler=37, questions=3),
        LookupConfig(records=1, filler=0),
        LookupConfig(records=16, questions=16),
    ],
)
def test_every_answer_follows_its_key_in_a_prompt_of_the_right_size(config):
    tokenizer = make_tokenizer(config)
    made = list(rows(config, 20, seed=3))
    assert len(made) == 20 * config.questions
    assert len({row["prompt_id"] for row in made}) == len(made)
    for row in made:
        symbols = row["prompt"].split()
        assert len(symbols) == 1 + 3 * config.records + config.filler
        key = row["question"].split()[1]
        place = symbols.index(key)
        assert symbols.count(key) == 1
        assert " ".join(symbols[place + 1 : place + 3]) == row["answer"]
        ids = tokenizer.encode(row["prompt"]).ids
        assert len(ids) == len(symbols) and tokenizer.decode(ids, skip_special_tokens=False)


def test_questions_on_one_prompt_differ():
    config = LookupConfig(questions=4)
    made = list(rows(config, 5, seed=0))
    for first in range(0, 20, 4):
        assert len({row["prompt"] for row in made[first : first + 4]}) == 1
        assert len({row["question"] for row in made[first : first + 4]}) == 4


def test_rows_depend_on_seed_split_and_place_alone():
    config = LookupConfig()
    few, many = list(rows(config, 3, seed=5)), list(rows(config, 9, seed=5))
    assert few == many[:3]
    assert list(rows(config, 3, seed=6)) != few
    assert list(rows(config, 3, 5, "val"))[0]["prompt"] != few[0]["prompt"]


def test_the_vocabulary_is_that_of_the_sizes():
    assert len(vocabulary(LookupConfig())) == 43
    assert (
        make_tokenizer(LookupConfig()).decode(
            make_tokenizer(LookupConfig()).encode("v1 v15 <end>").ids
        )
        == "v1 v15"
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"records": 17}, r"records: must be at most keys \(16\)"),
        ({"questions": 7}, r"questions: must be at most records \(6\)"),
        ({"filler": -1}, "filler: must not be negative"),
        ({"values": 0}, "values: must be positive"),
    ],
)
def test_bad_sizes_are_named(settings, message):
    with pytest.raises(FieldError, match=message):
        LookupConfig(**settings)
