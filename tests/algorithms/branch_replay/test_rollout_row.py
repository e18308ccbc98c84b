"""Rows of rollouts: a round trip, and what is said of bad ones."""

import pytest

from algorithms.branch_replay.rollout_row import Rollout
from algorithms.common.errors import InputError

ROW = {
    "prompt_id": "7",
    "branch": 0,
    "tokens": [4, 5],
    "log_probs": [-0.5, 0.0],
    "reward": 1.0,
    "truncated": False,
}


def test_rows_survive_a_round_trip():
    assert Rollout.from_row(ROW, "x").to_row() == ROW
    empty = ROW | {"tokens": [], "log_probs": [], "extra": 1}
    assert Rollout.from_row(empty, "x").tokens == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_id": 7}, "r: row 3: prompt_id: must be text, not 7"),
        ({"branch": -1}, "r: row 3: branch: must be an integer, not negative, not -1"),
        ({"tokens": [4, 5.5]}, "r: row 3: tokens: must be a list of token ids, not [4, 5.5]"),
        ({"tokens": None}, "r: row 3: tokens: must be a list of token ids, not None"),
        ({"log_probs": [-0.5]}, "r: row 3: log_probs: 1 of them for 2 tokens"),
        ({"log_probs": [0.1, -0.5]}, "r: row 3: log_probs: 0.1 is above 0"),
        (
            {"log_probs": [float("nan"), -0.5]},
            "r: row 3: log_probs: must be a list of finite numbers, not [nan, -0.5]",
        ),
        ({"reward": None}, "r: row 3: reward: must be a finite number, not None"),
        ({"reward": True}, "r: row 3: reward: must be a finite number, not True"),
        ({"truncated": 0}, "r: row 3: truncated: must be true or false, not 0"),
    ],
)
def test_bad_rows_are_one_line_that_says_where(changes, message):
    with pytest.raises(InputError) as error:
        Rollout.from_row(ROW | changes, "r: row 3")
    assert str(error.value) == message


def test_a_missing_column_is_named():
    with pytest.raises(InputError, match="^r: no column 'reward'; it has: prompt_id, branch"):
        Rollout.from_row({k: v for k, v in ROW.items() if k != "reward"}, "r")
