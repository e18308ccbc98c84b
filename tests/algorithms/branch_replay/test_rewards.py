"""Rewards by name, and what is said of those that fail."""

import pytest

from algorithms.branch_replay.rewards import exact_match, find_reward, number, regex, score
from algorithms.common.errors import InputError


def of_length(prompt, completion, row):
    """A reward of one's own."""
    return len(prompt) + len(completion) + row["more"]


@pytest.mark.parametrize(
    ("reward", "completion", "answer", "value"),
    [
        (exact_match, " v1 v2\n", "v1 v2", 1.0),
        (exact_match, "v1 v2 v3", "v1 v2", 0.0),
        (exact_match, "7", 7, 1.0),
        (exact_match, "", "", 1.0),
        (number, "First 12, so 1,234.50 it is.", "1234.5", 1.0),
        (number, "It is 48.", 48, 1.0),
        (number, "48 or 49", 48, 0.0),
        (number, "-3", "3", 0.0),
        (number, "none", "3", 0.0),
        (regex, "the code is 48!", r"\b48\b", 1.0),
        (regex, "the code is 148", r"\b48\b", 0.0),
    ],
)
def test_built_in_rewards(reward, completion, answer, value):
    assert reward("", completion, {"answer": answer}) == value


def test_rewards_are_found_by_name():
    assert find_reward("number") is number
    dotted = find_reward("algorithms.branch_replay.rewards:regex")
    assert dotted is regex
    assert score(of_length, "ab", "c", {"more": 0.5}, "row 1") == 3.5
    assert score(lambda *_: True, "", "", {}, "row 1") == 1.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "exact",
            "reward: 'exact' is neither module:function nor one of exact_match, number, regex, "
            "reasoning_gym",
        ),
        ("no.module:f", "reward: no.module: ModuleNotFoundError: No module named 'no'"),
        ("math:f", "reward: math has no function 'f'"),
        ("math:pi", "reward: math has no function 'pi'"),
        ("this_exits:f", "reward: this_exits: SystemExit: 0"),
    ],
)
def test_a_reward_that_is_none_is_named(tmp_path, monkeypatch, name, message):
    (tmp_path / "this_exits.py").write_text("raise SystemExit(0)")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError) as error:
        find_reward(name)
    assert str(error.value) == message


def raising(prompt, completion, row):
    raise RuntimeError("two\nlines")


def leaving(prompt, completion, row):
    raise SystemExit(0)


class Odd:
    def __float__(self):
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (leaving, "p.jsonl: line 3: reward: SystemExit: 0"),
        (lambda *_: Odd(), "p.jsonl: line 3: reward: must return a number, not a Odd"),
        (lambda *_: 10**400, "p.jsonl: line 3: reward: must return a number that a float holds"),
        (raising, "p.jsonl: line 3: reward: RuntimeError: two lines"),
        (exact_match, "p.jsonl: line 3: reward: KeyError: 'answer'"),
        (lambda *_: None, "p.jsonl: line 3: reward: must return a number, not a NoneType"),
        (lambda *_: "high", "p.jsonl: line 3: reward: must return a number, not a str"),
        (lambda *_: float("nan"), "p.jsonl: line 3: reward: must return a finite number, not nan"),
    ],
)
def test_a_reward_that_fails_names_the_row(reward, message):
    with pytest.raises(InputError) as error:
        score(reward, "", "", {}, "p.jsonl: line 3")
    assert str(error.value) == message


def test_a_number_task_without_a_number_names_the_row():
    with pytest.raises(InputError, match="^r: reward: ValueError: answer: 'x' holds no number$"):
        score(number, "", "3", {"answer": "x"}, "r")
