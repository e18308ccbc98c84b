"""The run of an arm: killed and stopped anywhere it repeats the uninterrupted one, on any ranks."""

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from algorithms.branch_replay import methods
from algorithms.branch_replay.config import (
    LearnerConfig,
    LoRAConfig,
    ObjectiveConfig,
    ReplayConfig,
    RolloutConfig,
)
from algorithms.branch_replay.job_config import GIVEN
from algorithms.common import model
from algorithms.common.comm import Comm
from algorithms.common.errors import InputError
from algorithms.common.metrics import read_rows
from tests.post_training import arm, attempt, equal, folders, job, newest, told

KL = ObjectiveConfig(kl=0.05, entropy=0.01)
VALUES = ObjectiveConfig(name="ppo", value=0.5, entropy=0.1)
ARMS = {
    "exact": arm(),
    "response_only": arm(replay=ReplayConfig(mode="response_only")),
    "refresh": arm(replay=ReplayConfig(mode="response_only", refresh_every=3)),
    "reference": arm(objective=KL, learner=LearnerConfig(group=4, inner_epochs=2)),
    "pairs": arm(objective=ObjectiveConfig(name="dpo")),
    "lora": arm(objective=KL, lora=LoRAConfig(rank=2)),
    "values": arm(objective=VALUES, lora=LoRAConfig(rank=2)),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return folders(tmp_path_factory.mktemp("inputs"))


def alone():
    return Comm(None, torch.device("cpu"))


@pytest.mark.parametrize("name", ARMS)
def test_killed_and_stopped_it_repeats_the_uninterrupted_run(inputs, tmp_path, name):
    config = job(inputs, ARMS[name])
    whole = attempt(alone(), config, tmp_path / "whole")
    norms = [row["grad_norm"] for row in read_rows(tmp_path / "whole" / "metrics.jsonl")[1:]]
    assert sum(norm > 0 for norm in norms) > 1, "there was something to learn"
    broken = tmp_path / "broken"
    assert attempt(alone(), config, broken, stop_at=2) is None
    assert newest(broken) == (3 if name == "refresh" else 2), "a stop waits for a refresh to end"
    assert attempt(alone(), config, broken, kill_at=5) is None
    assert newest(broken) == (3 if name == "refresh" else 4), "and so does a checkpoint"
    resumed = attempt(alone(), config, broken)
    assert whole is not None and resumed is not None
    assert equal(resumed, whole)
    assert told(broken) == told(tmp_path / "whole")


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_share_prompts_out_and_some_have_none(inputs, tmp_path, ranks, world_size):
    """Three prompts on two or four ranks: the weights of one rank, but for the order of sums."""
    one = attempt(alone(), job(inputs, steps=2), tmp_path / "one")
    config = job(inputs, steps=2, ranks=world_size)
    several = ranks.run(attempt, config, tmp_path / "several", world_size=world_size)
    assert all(equal(weights, several[0]) for weights in several)
    for name, value in one.items():
        torch.testing.assert_close(several[0][name], value, rtol=0, atol=1e-4)
    rows, completions, rollouts = told(tmp_path / "several")
    first, shown, [own] = told(tmp_path / "one")
    assert [r["reward/heldout"] for r in rows if r["step"] == 0] == [first[0]["reward/heldout"]]
    assert [row for row in completions if row["step"] == 0] == [
        row for row in shown if row["step"] == 0
    ]
    assert [len(of_rank) for of_rank in rollouts] == (
        [64, 32] if world_size == 2 else [32, 32, 32, 0]
    )

    def drawn(rows):
        return sorted((row["prompt_id"], row["branch"], row["tokens"]) for row in rows)

    mixed = [row for of_rank in rollouts for row in of_rank if row["step"] == 1]
    assert drawn(mixed) == drawn([row for row in own if row["step"] == 1])


def test_rows_have_the_names_of_every_stage_and_those_of_rewards(inputs, tmp_path):
    attempt(alone(), job(inputs, ARMS["reference"]), tmp_path / "run")
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(7))
    assert {
        "train/loss", "tokens", "tokens_per_s", "lr", "grad_norm", "device_hours", "gpu_hours",
        "comm/payload_bytes", "comm/wire_bytes", "memory/peak_bytes", "memory/optimizer_bytes",
        "reward/mean", "replay/tokens_grad", "replay/tokens_nograd", "replay/speedup_model", "kl",
        "entropy", "ratio/max", "clip_fraction", "selfcheck/max",
    } <= set(rows[1])  # fmt: skip
    assert [row["step"] for row in rows if "reward/heldout" in row] == [0, 3, 6]
    assert all(0 <= row["selfcheck/max"] <= 1e-3 for row in rows[1:])
    assert all(row["replay/speedup_model"] > 1 for row in rows[1:])
    assert rows[-1]["kl"] > 0, "the reference stayed as it was"
    learned = read_rows(tmp_path / "run" / "rollouts" / "rank_0.jsonl")
    mine = methods.build(job(inputs), tmp_path, alone())._mine(0)
    of_prompts = sum(len(p.tokens) + sum(len(q.tokens) for q in p.questions) for p in mine)
    responses = sum(len(row["tokens"]) for row in learned if row["step"] == 1)
    assert rows[1]["tokens"] == of_prompts + responses


def test_an_epoch_has_every_prompt_once_and_another_order_than_the_next(inputs, tmp_path):
    made = methods.build(job(inputs), tmp_path, alone())
    epochs = [[made._mine(2 * epoch + part) for part in range(2)] for epoch in range(3)]
    names = [[p.questions[0].prompt_id for part in epoch for p in part] for epoch in epochs]
    assert all(len({*epoch}) == 6 for epoch in names), "7 prompts are two updates of 3"
    assert names[0] != names[1] != names[2]


def test_given_rollouts_are_learned_from_as_they_are(inputs, tmp_path):
    """The log of one run, given to another: nothing is sampled, and ratios are taken to the log."""
    attempt(alone(), job(inputs, steps=2), tmp_path / "logged")
    rows = read_rows(tmp_path / "logged" / "rollouts" / "rank_0.jsonl")
    run = tmp_path / "given"
    run.mkdir()
    (run / GIVEN).write_text("".join(json.dumps(row) + "\n" for row in rows))
    weights = attempt(alone(), job(inputs, arm(given="log.parquet"), steps=2), run)
    assert weights is not None
    learned = read_rows(run / "rollouts" / "rank_0.jsonl")
    assert {json.dumps(row | {"step": 0}) for row in learned} == {
        json.dumps(row | {"step": 0}) for row in rows
    }
    first, second = read_rows(run / "metrics.jsonl")[1:3]
    assert first["selfcheck/max"] == 0 and first["ratio/max"] != 1.0
    assert math.isfinite(second["train/loss"])
    (run / GIVEN).write_text(json.dumps(rows[0] | {"prompt_id": "nobody's"}) + "\n")
    with pytest.raises(InputError, match='^log.parquet: prompt_id "nobody\'s" is none'):
        methods.build(job(inputs, arm(given="log.parquet")), run, alone())


def test_preferences_are_learned_from_and_by_pairs_alone(inputs, tmp_path):
    row = {"prompt": "k0 v1", "chosen": "v1 v2", "rejected": "v0 v0"}
    rows = [row | {"prompt_id": str(i)} for i in range(3)]
    (tmp_path / GIVEN).write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = arm(objective=ObjectiveConfig(name="dpo"), given="mine.jsonl")
    attempt(alone(), job(inputs, pairs), tmp_path)
    losses = [row["train/loss"] for row in read_rows(tmp_path / "metrics.jsonl")[1:]]
    assert losses[0] == pytest.approx(math.log(2)), "of a policy that is its reference"
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.9 * losses[0]
    with pytest.raises(InputError, match="mine.jsonl: holds preferences, which grpo cannot"):
        methods.build(job(inputs, arm(given="mine.jsonl")), tmp_path, alone())


def test_what_is_published_is_an_ordinary_model_that_answers_as_the_trained_one(inputs, tmp_path):
    config = job(inputs, ARMS["values"], steps=2)
    made = methods.build(config, tmp_path, alone())
    made.run()
    trained = made.learner.model
    tokens = torch.arange(6)[None]
    before = model.logits(trained, tokens)
    published = methods.published(trained)
    model.save(published, Path(inputs["prompts_dir"]), tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    torch.testing.assert_close(model.logits(loaded, tokens), before)
    start = AutoModelForCausalLM.from_pretrained(inputs["policy_dir"])
    assert loaded.state_dict().keys() == start.state_dict().keys()
    assert not torch.equal(model.logits(start, tokens), before), "it has learned"


def test_weights_of_bf16_are_learned_in_bf16(inputs, tmp_path):
    weights = attempt(alone(), job(inputs, precision="bf16", steps=4), tmp_path / "run")
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert 0 < rows[1]["selfcheck/max"] < 0.1
    assert any(row["grad_norm"] > 0 for row in rows[1:])


def test_too_few_prompts_and_too_long_responses_are_one_line(inputs, tmp_path):
    long = arm(rollout=RolloutConfig(max_tokens=60))
    message = r"prompt train/0/0: \d+ tokens and 60 of a response are more than the model's 64 pos"
    with pytest.raises(InputError, match=message):
        methods.build(job(inputs, long), tmp_path, alone())
    with pytest.raises(InputError, match="takes 8 prompts, there are 7 to learn from"):
        methods.build(job(inputs, prompts=8), tmp_path, alone())
    with pytest.raises(InputError, match="eval_prompts: is 5, there are 4 held-out prompts$"):
        methods.build(job(inputs, eval_prompts=5), tmp_path, alone())
    row = {"prompt_id": "train/0/0", "branch": 0, "reward": 0.0, "truncated": True}
    row |= {"tokens": [3] * 60, "log_probs": [-1.0] * 60}
    (tmp_path / methods.GIVEN).write_text(json.dumps(row) + "\n")
    with pytest.raises(InputError, match=message):
        methods.build(job(inputs, arm(given="log.jsonl"), prompts=1), tmp_path, alone())
