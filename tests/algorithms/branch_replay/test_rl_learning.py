"""The lookup task from a warm start to a better reader, and both gradients on the way."""

import copy

import pytest
import torch

from algorithms.branch_replay.config import LearnerConfig, RolloutConfig
from algorithms.branch_replay.learner import Learner, Settings
from algorithms.branch_replay.lookup import LookupConfig
from algorithms.branch_replay.warm_start import warm_start
from tests.lookups import Kept, end, lookup_prompts, reader, scorer
from tests.replays import distance

TASK = LookupConfig(questions=2)  # longer, and with more records, than the start has seen
ROLLOUT = RolloutConfig(max_tokens=3, batch=16)


def learner(model, optimizer, **settings):
    config = LearnerConfig(**({"group": 8} | settings))
    return Learner(
        model,
        optimizer,
        Settings(rollout=ROLLOUT, learner=config),
        eos=[end(TASK)],
        score=scorer(TASK),
        seed=0,
    )


def gradient(model, prompts, step, **settings):
    """That one update would step by."""
    model = copy.deepcopy(model)
    kept = Kept(model.parameters())
    learner(model, kept, clip_norm=0, **settings).update(prompts, step)
    return kept.gradient


@pytest.mark.slow
def test_reward_rises_and_the_gradient_stays_that_of_full_sequences():
    sizes = {"hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.1}
    model = reader(TASK, num_attention_heads=4, num_key_value_heads=4, **sizes)
    warm_start(model, TASK, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0)
    learns = learner(model, optimizer)
    rewards = []
    for step in range(60):
        prompts = lookup_prompts(8, TASK, seed=step)
        if step % 20 == 10:
            exact = gradient(model, prompts, step)
            assert distance(exact, gradient(model, prompts, step, naive=True)) <= 1e-4
        metrics = learns.update(prompts, step)
        assert metrics["selfcheck/max"] <= 1e-3
        rewards.append(metrics["reward/mean"])
    start, final = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    assert final >= start + 0.2, rewards
