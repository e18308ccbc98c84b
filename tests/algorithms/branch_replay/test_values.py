"""Values come out of the replay with the gradient of full sequences, and PPO learns by them."""

import copy
import math

import pytest
import torch

from algorithms.branch_replay import collect, objectives, reference
from algorithms.branch_replay.config import (
    LearnerConfig,
    LoRAConfig,
    ObjectiveConfig,
    ReplayConfig,
    RolloutConfig,
)
from algorithms.branch_replay.errors import SelfCheckError
from algorithms.branch_replay.learner import Learner, Settings
from algorithms.branch_replay.lora import add_lora
from algorithms.branch_replay.replay import BranchReplay
from algorithms.branch_replay.values import add_value_head
from algorithms.common.errors import FieldError, InputError
from tests.families import tiny, true_float64
from tests.lookups import Kept, end, lookup_prompts, reader
from tests.replays import distance, responses, take_gradients, tokens


def valued(model, seed=0):
    """With a value head that is not 0."""
    head = add_value_head(model)
    torch.manual_seed(seed)
    torch.nn.init.normal_(head.weight, std=0.5)
    torch.nn.init.constant_(head.bias, 0.1)
    return model


def coupled(scores):
    """Of both columns, with coefficients that depend on all of them."""
    flat = torch.cat([scores[0][:0], *scores])
    weights = torch.linspace(-1.0, 1.5, flat.numel(), dtype=flat.dtype).view_as(flat)
    return (weights * flat).sum() + 0.01 * (flat[:, 0] * flat[:, 1]).sum() ** 2


def partly(question, found):
    return float((found < 6).double().mean())


CHUNKED = ReplayConfig(chunk=4, branches_per_pass=3)


def learner(
    model,
    lr=0.01,
    optimizer=torch.optim.AdamW,
    inner_epochs=1,
    naive=False,
    replay=CHUNKED,
    **objective,
):
    return Learner(
        model,
        optimizer([p for p in model.parameters() if p.requires_grad], lr=lr),
        Settings(
            rollout=RolloutConfig(max_tokens=3, batch=5),
            replay=replay,
            objective=ObjectiveConfig(**({"name": "ppo", "value": 0.5} | objective)),
            learner=LearnerConfig(group=4, clip_norm=0, inner_epochs=inner_epochs, naive=naive),
        ),
        eos=[end()],
        score=partly,
        seed=7,
    )


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_next"])
@pytest.mark.parametrize("settings", [{"chunk": 4, "branches_per_pass": 2}, {"chunk": 3}])
def test_scores_and_gradients_are_those_of_full_sequences(family, settings):
    """A chunk of 3 also cuts responses."""
    model = valued(tiny(family))
    prompt, branches = tokens(11), responses(5, 1, 0, 7)
    with true_float64(model):
        loss, scores = reference.step(model, prompt, branches, coupled, model.value_head)
        truth = take_gradients(model)
        replay = BranchReplay(model, ReplayConfig(**settings), model.value_head)
        out = replay.step(prompt, branches, coupled)
        found = take_gradients(model)
    assert out.loss == pytest.approx(loss, rel=1e-11)
    assert [part.shape for part in out.log_probs[0]] == [(5, 2), (1, 2), (0, 2), (7, 2)]
    for ours, theirs in zip(out.log_probs[0], scores, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
    assert distance(found, truth) <= 1e-12
    assert float(found["value_head.weight"].norm()) > 0


def test_log_probabilities_are_the_same_with_and_without_values():
    model = valued(tiny("llama"))
    plain = BranchReplay(model).log_probs(tokens(9), responses(4, 2))
    both = BranchReplay(model, value_head=model.value_head).log_probs(tokens(9), responses(4, 2))
    for one, two in zip(plain, both, strict=True):
        assert torch.equal(one, two[:, 0])


@pytest.mark.parametrize("inner_epochs", [1, 3])
@pytest.mark.parametrize("gae", [{}, {"gamma": 0.9, "gae_lambda": 0.7}])
def test_an_update_is_that_of_full_sequences(inner_epochs, gae):
    model = valued(reader(dtype=torch.float64))
    prompts = lookup_prompts(2)
    updated, metrics = [], []
    with true_float64(model):
        for naive in (True, False):
            each = copy.deepcopy(model)
            optimizer = torch.optim.SGD
            one = learner(each, 0.1, optimizer, inner_epochs, naive, entropy=0.01, **gae)
            metrics.append(one.update(prompts, 0))
            updated.append(each)
    start, slow, fast = (
        {name: p.detach() for name, p in each.named_parameters()} for each in (model, *updated)
    )
    step = {name: fast[name] - p for name, p in start.items()}
    assert distance(step, {name: slow[name] - p for name, p in start.items()}) <= 1e-10
    for name in ("train/loss", "value/error", "reward/mean", "ratio/max"):
        assert metrics[1][name] == pytest.approx(metrics[0][name], rel=1e-10), name
    assert metrics[0]["value/error"] > 0.01


def test_values_of_a_question_that_is_a_node_are_left_out(monkeypatch):
    model = valued(reader(dtype=torch.float64))
    prompts = lookup_prompts(2)
    gradients = []
    with true_float64(model):
        for short in (8, 0):
            monkeypatch.setattr(collect, "SHORT", short)
            one = learner(copy.deepcopy(model), optimizer=Kept)
            one.update(prompts, 0)
            gradients.append(one.optimizer.gradient)
    assert distance(gradients[1], gradients[0]) <= 1e-12


def test_prompts_that_are_joined_have_the_values_of_each_alone():
    model = valued(reader(dtype=torch.float64))
    prompts = lookup_prompts(3)
    gradients, metrics = [], []
    with true_float64(model):
        for together in (1, 3):
            replay = ReplayConfig(chunk=16, prompts_per_pass=together)
            one = learner(copy.deepcopy(model), optimizer=Kept, replay=replay, gae_lambda=0.9)
            metrics.append(one.update(prompts, 0))
            gradients.append(one.optimizer.gradient)
    assert distance(gradients[1], gradients[0]) <= 1e-12
    assert metrics[1]["value/error"] == pytest.approx(metrics[0]["value/error"], rel=1e-12)


def test_with_both_factors_1_the_advantage_is_the_reward_less_the_value():
    values = torch.tensor([0.25, -1.0, 0.5], dtype=torch.float64)
    assert objectives.gae(2.0, values).tolist() == [1.75, 3.0, 1.5]
    by_hand = [0.9 * -1.0 - 0.25, 0.9 * 0.5 + 1.0, 2.0 - 0.5]
    assert objectives.gae(2.0, values, 0.9, 0.0).tolist() == pytest.approx(by_hand)
    assert objectives.gae(2.0, values[:0]).tolist() == []


def test_the_head_learns_what_responses_are_worth():
    """On one prompt again and again with the trunk frozen: values go to the mean reward."""
    model = reader()
    head = add_value_head(model)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    head.requires_grad_(True)
    one = learner(model, lr=0.05, value=1.0)
    prompts = lookup_prompts(1)
    rows = [one.update(prompts, step) for step in range(30)]
    first, last = (sum(r["value/error"] for r in part) for part in (rows[:5], rows[-5:]))
    assert last < 0.5 * first
    assert math.isfinite(rows[-1]["train/loss"])


def test_it_goes_with_adapters_and_their_reference():
    model = reader(dtype=torch.float64)
    add_lora(model, LoRAConfig(rank=2), seed=0)
    valued(model)
    one = learner(model, kl=0.1)
    with true_float64(model):
        first = one.update(lookup_prompts(2), 0)
        second = one.update(lookup_prompts(2), 1)
    assert first["kl"] == pytest.approx(0.0, abs=1e-12) and second["kl"] > 1e-9


def test_a_replay_with_other_values_in_its_second_pass_is_stopped(monkeypatch):
    model = valued(tiny("llama"))
    replay = BranchReplay(model, ReplayConfig(), model.value_head)
    head = replay.passes.engine.head
    backward = head.backward

    def off(*args):
        scores, cotangent = backward(*args)
        return scores + torch.tensor([0.0, 0.01]), cotangent

    monkeypatch.setattr(head, "backward", off)
    with pytest.raises(SelfCheckError, match="was .* in pass 1 and .* in pass 2"):
        replay.step(tokens(6), responses(3), coupled)


def test_what_does_not_go_together_is_one_line():
    with pytest.raises(InputError, match="^objective.value: the model has no value head"):
        learner(reader())
    with pytest.raises(InputError, match="^value_head: must be a part of the model"):
        BranchReplay(reader(), value_head=torch.nn.Linear(16, 1))
    for settings, message in (
        ({"name": "grpo", "value": 0.5}, "value: must be 0 with grpo"),
        ({"name": "ppo", "gamma": 0.9}, "gamma: has no effect without a value"),
        ({"name": "ppo", "value": 1.0, "gae_lambda": 1.5}, "gae_lambda: must be at most 1"),
        ({"name": "ppo", "value": -1.0}, "value: must be finite, not negative"),
    ):
        with pytest.raises(FieldError, match=f"^{message}"):
            ObjectiveConfig(**settings)
