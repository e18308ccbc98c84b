"""Several prompts of equal length in one batch: the same as each of them alone."""

import pytest
import torch

from algorithms.branch_replay import reference
from algorithms.branch_replay.config import ReplayConfig, RolloutConfig
from algorithms.branch_replay.losses import PerBranch
from algorithms.branch_replay.replay import BranchReplay
from algorithms.branch_replay.rollouts import Branch, Sampler
from algorithms.branch_replay.tree import Node
from algorithms.branch_replay.trunk import Trunk
from algorithms.common.errors import FieldError, InputError
from tests.families import FAMILIES, tiny, true_float64
from tests.replays import coupled, distance, error, replayed, responses, take_gradients, tokens

PROMPTS = tokens(36).view(3, 12)
BEHIND = (2, 0, 0, 2, 2)
"""The second prompt has none."""
BRANCHES = [
    Node(response, behind=i) for response, i in zip(responses(4, 1, 6, 3, 5), BEHIND, strict=True)
]
EOS = (3, 7, 11, 19, 23)


def term(i, log_probs):
    return (i - 1.5) * log_probs.sum() + log_probs.square().sum()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_equals_full_sequences(family):
    model = tiny(family)
    with true_float64(model):
        assert error(model, PROMPTS, BRANCHES, chunk=7, branches_per_pass=2) <= 1e-12


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"chunk": 6, "keep_attention": True},
        {"chunk": 6, "offload": True},
        {"chunk": 6, "window": 5},
        {"mode": "response_only"},
        {"mode": "truncated", "chunk": 6, "truncated_chunks": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "falcon_h1"])
def test_settings_mean_what_they_mean_for_one_prompt(family, settings):
    """The sum of the prompts' own steps, by a loss of both kinds."""
    model = tiny(family)
    replay = BranchReplay(model, ReplayConfig(**settings))
    with true_float64(model):
        for i, prompt in enumerate(PROMPTS):
            chosen = [j for j, behind in enumerate(BEHIND) if behind == i]
            own = [Node(BRANCHES[j].tokens) for j in chosen]
            replay.step(prompt, own, lambda lps, c=chosen: sum(map(term, c, lps), torch.zeros(())))
        truth = take_gradients(model)
        for loss in (PerBranch(term), lambda lps: PerBranch(term)(lps)):
            _, found = replayed(model, PROMPTS, BRANCHES, loss, **settings)
            assert distance(found, truth) <= 1e-12
        captured = replay.capture(PROMPTS)
        replay.step(captured, BRANCHES, PerBranch(term))
        assert distance(take_gradients(model), truth) <= 1e-12


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_sampled_is_that_of_full_sequences(family):
    """Two rows a prompt for four, none and three branches, whose questions have 0 to 2 tokens."""
    model = tiny(family)
    behind = (2, 0, 0, 2, 2, 0, 0)
    branches = [Branch(60 + i, tokens(i % 3, seed=i), p) for i, p in enumerate(behind)]
    config = RolloutConfig(max_tokens=9, batch=2)
    with true_float64(model):
        replay = BranchReplay(model, ReplayConfig(chunk=5))
        found = Sampler(replay, config, EOS).sample(replay.capture(PROMPTS), branches)
        for response, branch in zip(found, branches, strict=True):
            whole = torch.cat([PROMPTS[branch.behind], branch.question])
            ids, log_probs, cut = reference.sample(model, whole, branch.seed, config, EOS)
            assert (response.tokens.tolist(), response.truncated) == (ids, cut)
            assert response.log_probs.tolist() == pytest.approx(log_probs, rel=1e-10, abs=1e-12)
    assert len({len(r.tokens) for r in found}) > 1


def test_prompts_of_one_token():
    model = tiny("qwen3")
    with true_float64(model):
        assert error(model, PROMPTS[:, :1], BRANCHES) <= 1e-12


def test_prompts_run_as_one_batch(monkeypatch):
    """Three forwards whatever there are prompts: capture, leaves, prompts again."""
    model = tiny("llama")
    replay = BranchReplay(model)
    shapes = []
    forward = Trunk.forward

    def recorded(trunk, inputs, run, state):
        shapes.append(tuple(inputs.shape))
        return forward(trunk, inputs, run, state)

    monkeypatch.setattr(Trunk, "forward", recorded)
    out = replay.step(PROMPTS, BRANCHES, PerBranch(term))
    assert shapes == [(3, 11), (9, 6), (3, 11)]
    assert (out.tokens_without_graph, out.tokens_with_graph) == (33, 33 + 19)


@pytest.mark.parametrize(
    ("branches", "message"),
    [
        (responses(3), "responses[0]: behind is None, must be one of 3 prompts, counted from 0"),
        ([Node(tokens(2), behind=3)], "responses[0]: behind is 3, must be one of 3 prompts, c"),
        ([Node(tokens(2), behind=-1)], "responses[0]: behind is -1, must be one of 3 prompts, c"),
        ([Node(tokens(2), [Node(tokens(2))], behind=0)], "responses[0]: behind several prompts a"),
        ([Node(tokens(9), behind=0)], "responses[0]: behind several prompts a response has no"),
    ],
)
def test_what_cannot_be_behind_several_prompts_is_named(branches, message):
    replay = BranchReplay(tiny("llama"), ReplayConfig(chunk=8))
    with pytest.raises(InputError) as caught:
        replay.step(PROMPTS, branches, coupled)
    assert str(caught.value).startswith(message)


def test_other_refusals():
    replay = BranchReplay(tiny("llama"))
    with pytest.raises(InputError, match="^responses: say which prompt they are behind, but there"):
        replay.step(PROMPTS[0], BRANCHES, coupled)
    with pytest.raises(InputError, match=r"^branches\[0\].behind: is 3, of 3 prompts"):
        captured = replay.capture(PROMPTS)
        Sampler(replay, RolloutConfig(max_tokens=2), EOS).sample(
            captured, [Branch(0, tokens(1), 3)]
        )
    with pytest.raises(FieldError, match="prompts_per_pass above 1"):
        ReplayConfig(aux_loss=0.1, prompts_per_pass=2)
    moe = BranchReplay(tiny("qwen3_moe"), ReplayConfig(aux_loss=0.1))
    with pytest.raises(InputError, match="^aux_loss: must be 0 with several prompts in one"):
        moe.step(PROMPTS, BRANCHES, coupled)
