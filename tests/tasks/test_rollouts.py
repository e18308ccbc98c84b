"""Rollouts in Parquet, and given ones."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from algorithms.branch_replay.rollout_row import Rollout
from algorithms.common.errors import InputError
from tasks.rollouts import SCHEMA, STEP, collect, hand_over, read_rollouts, write_rollouts

ROLLOUTS = [
    Rollout("7/0", 0, [3, 4], [-0.1, -1e-17], 0.5, False),
    Rollout("7/0", 1, [], [], 0.0, True),
]


def test_rollouts_survive_parquet_to_the_last_bit(tmp_path):
    path = tmp_path / "rollouts.parquet"
    write_rollouts(path, ROLLOUTS)
    assert pq.read_schema(path).equals(SCHEMA)
    assert read_rollouts(path) == ROLLOUTS


def test_no_rollouts_are_an_empty_table(tmp_path):
    path = tmp_path / "rollouts.parquet"
    write_rollouts(path, [])
    assert read_rollouts(path) == []


def test_jsonl_of_another_engine_is_read_and_checked(tmp_path):
    path = tmp_path / "given.jsonl"
    rows = [rollout.to_row() | {"model": "x"} for rollout in ROLLOUTS]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_rollouts(path) == ROLLOUTS
    rows[1]["log_probs"] = [-1.0]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(InputError, match="given.jsonl: line 2: log_probs: 1 of them for 0 tokens$"):
        read_rollouts(path)
    for column, value in (("tokens", [2**63]), ("branch", 2**63), ("reward", 10**400)):
        path.write_text(json.dumps(rows[0] | {column: value}) + "\n")
        with pytest.raises(InputError, match=f"given.jsonl: line 1: {column}: must be "):
            read_rollouts(path)


def test_what_ranks_left_is_one_file_by_step_and_rank_and_may_be_learned_from(tmp_path):
    folder = tmp_path / "rollouts"
    folder.mkdir()
    rows = {
        10: [(1, Rollout("b", 0, [1], [-0.5], 1.0, False))],
        2: [(1, Rollout("a", 0, [], [], 0.0, True)), (2, Rollout("c", 1, [2], [-1.0], 0.0, False))],
    }
    for rank, found in rows.items():
        lines = [json.dumps({"step": step} | rollout.to_row()) + "\n" for step, rollout in found]
        (folder / f"rank_{rank}.jsonl").write_text("".join(lines))
    out = tmp_path / "data" / "rollouts" / "exact.parquet"
    collect(folder, out)
    assert pq.read_schema(out).equals(SCHEMA.insert(0, STEP))
    assert [rollout.prompt_id for rollout in read_rollouts(out)] == ["a", "b", "c"]
    assert pq.read_table(out).column("step").to_pylist() == [1, 1, 2]
    first = out.read_bytes()
    collect(folder, out)
    assert out.read_bytes() == first, "what DVC tracks repeats"
    hand_over(out, tmp_path / "given.jsonl")
    assert read_rollouts(tmp_path / "given.jsonl") == read_rollouts(out)


def test_preferences_are_handed_over_and_checked(tmp_path):
    row = {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5", "source": "people"}
    pq.write_table(pa.Table.from_pylist([row, row]), tmp_path / "pairs.parquet")
    hand_over(tmp_path / "pairs.parquet", tmp_path / "given.jsonl")
    found = [json.loads(line) for line in (tmp_path / "given.jsonl").read_text().splitlines()]
    del row["source"]
    assert found == [row | {"prompt_id": "0"}, row | {"prompt_id": "1"}]
    (tmp_path / "pairs.jsonl").write_text(json.dumps(row | {"rejected": " 4"}) + "\n")
    with pytest.raises(InputError, match="pairs.jsonl: line 1: rejected: is the same as chosen$"):
        hand_over(tmp_path / "pairs.jsonl", tmp_path / "given.jsonl")
