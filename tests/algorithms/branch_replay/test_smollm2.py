"""A real model: updates of SmolLM2-135M-Instruct in bf16, on keys in a chat."""

import random
import re

import pytest
import torch

from algorithms.branch_replay.config import (
    LearnerConfig,
    ObjectiveConfig,
    ReplayConfig,
    RolloutConfig,
)
from algorithms.branch_replay.learner import Learner, Settings
from algorithms.branch_replay.prompts import shared_prompt
from algorithms.common.pretrained import load_model, load_tokenizer
from tests.smollm2 import smollm2

NAMES = ["apple", "river", "candle", "tiger"]


def chat(words, seed):
    """Four keys with numbers of two digits, and a question for each: one prompt, four questions."""
    draw = random.Random(seed)
    numbers = dict(zip(NAMES, draw.sample(range(10, 100), len(NAMES)), strict=True))
    records = " ".join(f"The code of {name} is {number}." for name, number in numbers.items())
    rows = []
    for name, number in numbers.items():
        text = f"{records}\nWhat is the code of {name}? Answer with the number."
        asked = words.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
        )
        ids = words.encode(asked, add_special_tokens=False)
        rows.append((f"{seed}/{name}", ids, {"answer": str(number)}))
    return shared_prompt(rows)


@pytest.mark.slow
def test_two_updates_of_a_real_model_in_bf16():
    path = smollm2()
    words, model = load_tokenizer(path), load_model(path, torch.bfloat16)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    said = []

    def score(question, tokens):
        said.append(words.decode(tokens.tolist(), skip_special_tokens=True))
        return float(question.row["answer"] in re.findall(r"\d+", said[-1]))

    learner = Learner(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-4),
        Settings(
            rollout=RolloutConfig(max_tokens=16, batch=16),
            replay=ReplayConfig(branches_per_pass=16),
            objective=ObjectiveConfig(name="grpo"),
            learner=LearnerConfig(group=4),
        ),
        eos=[words.eos_token_id],
        score=score,
        seed=0,
    )
    for step in range(2):
        prompt = chat(words, seed=step)
        assert len(prompt.questions) == 4 and len(prompt.tokens) > 60
        metrics = learner.update([prompt], step)
        assert metrics["reward/mixed_groups"] > 0 and 0 < metrics["reward/mean"] < 1
        assert metrics["grad_norm"] > 0
        assert 0 < metrics["selfcheck/max"] <= 0.5  # full sequences are 0.24 from float32's
        assert metrics["replay/speedup_model"] > 2
    assert len(said) == 2 * 16 and len(set(said)) > 4
    # Norms, near 1, are too coarse in bf16 for a step of 1e-4.
    still = [name for name, p in model.named_parameters() if torch.equal(p, before[name])]
    assert all(name.endswith("norm.weight") for name in still)
