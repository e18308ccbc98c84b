"""Shapes at the edges, against full sequences in true float64."""

import pytest
import torch

from algorithms.branch_replay.config import ReplayConfig
from algorithms.branch_replay.replay import BranchReplay
from tests.families import tiny, true_float64
from tests.replays import (
    coupled,
    distance,
    error,
    naive,
    replayed,
    responses,
    take_gradients,
    tokens,
)

HYBRID = "falcon_h1"  # attention, convolution and recurrence in every layer

CASES = {
    "prompt-of-one-token": (1, (5, 3), {}),
    "prompt-of-two-tokens": (2, (5, 3), {}),
    "an-empty-response": (9, (5, 0, 3), {}),
    "only-empty-responses": (9, (0, 0), {}),
    "no-responses": (9, (), {}),
    "ragged-group": (9, (1, 17, 2, 8, 1), {"branches_per_pass": 3}),
    "group-of-one": (9, (6,), {}),
    "chunk-of-one": (9, (5, 3), {"chunk": 1}),
    "chunk-of-the-prompt": (9, (5, 3), {"chunk": 8}),
    "chunk-larger-than-the-prompt": (9, (5, 3), {"chunk": 100}),
    "responses-longer-than-the-chunk": (9, (11, 5, 8), {"chunk": 4}),
    "long-responses-to-one-token": (1, (11, 5), {"chunk": 4}),
    "one-branch-per-pass": (9, (5, 3, 4), {"branches_per_pass": 1}),
    "head-of-one-token": (9, (5, 3), {"head_chunk": 1}),
}


@pytest.mark.parametrize("family", ["llama", HYBRID])
@pytest.mark.parametrize("case", CASES)
def test_equals_full_sequences(family, case):
    prompt, lengths, settings = CASES[case]
    model = tiny(family)
    with true_float64(model):
        apart = error(model, tokens(prompt), responses(*lengths), **({"chunk": 4} | settings))
    assert apart <= 1e-12


def test_identical_branches_are_one_branch_times_their_number():
    model = tiny("llama")
    prompt, response = tokens(9), tokens(5, seed=1)
    with true_float64(model):
        _, one = replayed(model, prompt, [response], lambda lps: lps[0].sum(), chunk=4)
        _, five = replayed(model, prompt, [response] * 5, lambda lps: sum(lps).sum(), chunk=4)
    assert distance(five, {name: 5 * g for name, g in one.items()}) <= 1e-12


def test_a_branch_that_begins_as_another():
    model = tiny("llama")
    whole = tokens(8, seed=1)
    with true_float64(model):
        assert error(model, tokens(9), [whole, whole[:3]], chunk=4) <= 1e-12


def test_order_of_branches_does_not_matter():
    model = tiny(HYBRID)
    prompt, branches = tokens(9), responses(5, 8, 3)

    def mean(log_probs):
        return torch.cat(log_probs).mean()

    with true_float64(model):
        _, forward = replayed(model, prompt, branches, mean, branches_per_pass=2)
        _, backward = replayed(model, prompt, branches[::-1], mean, branches_per_pass=2)
    assert distance(forward, backward) <= 1e-12


def test_zero_advantages_leave_the_divergence():
    """GRPO with equal rewards: the clipped part is zero, the k3 estimate of the KL is not."""
    model = tiny("llama")
    prompt, branches = tokens(9), responses(5, 7)
    reference = [torch.full((len(b),), -3.0, dtype=torch.float64) for b in branches]

    def loss_fn(log_probs):
        total = torch.zeros((), dtype=torch.float64)
        for ours, theirs in zip(log_probs, reference, strict=True):
            ratio = (ours - ours.detach()).exp()
            apart = theirs - ours
            total = total - (0.0 * ratio).sum() + 0.1 * (apart.exp() - apart - 1).sum()
        return total

    with true_float64(model):
        _, _, truth = naive(model, prompt, branches, loss_fn)
        out, gradients = replayed(model, prompt, branches, loss_fn, chunk=4)
    assert out.loss > 0 and max(float(g.abs().max()) for g in truth.values()) > 0
    assert distance(gradients, truth) <= 1e-12


def test_end_of_text_and_padding_tokens_mean_nothing():
    """Masks come from lengths: token 0 is begin, end and padding of these models."""
    model = tiny("llama")
    prompt = torch.tensor([0, 5, 0, 7, 0])
    branches = [torch.tensor([0, 0, 3]), torch.tensor([4, 0]), torch.tensor([0])]
    with true_float64(model):
        assert error(model, prompt, branches, chunk=2) <= 1e-12


def test_groups_do_not_leak_into_each_other():
    model = tiny(HYBRID)
    groups = [(tokens(9, seed=s), [tokens(4, seed=s + 1), tokens(6, seed=s + 2)]) for s in (1, 5)]
    replay = BranchReplay(model, ReplayConfig(chunk=4))

    def gradients(order):
        for prompt, branches in order:
            replay.step(prompt, branches, coupled)
        return take_gradients(model)

    with true_float64(model):
        assert distance(gradients(groups), gradients(groups[::-1])) <= 1e-12


def test_gradients_are_added_to_what_is_there():
    model = tiny("llama")
    prompt, branches = tokens(9), responses(4)
    with true_float64(model):
        _, once = replayed(model, prompt, branches)
        replay = BranchReplay(model)
        replay.step(prompt, branches, coupled)
        replay.step(prompt, branches, coupled)
        twice = take_gradients(model)
    assert distance(twice, {name: 2 * g for name, g in once.items()}) <= 1e-12


def test_frozen_parameters_get_no_gradient():
    model = tiny("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1.self_attn.v_proj" in name)
    with true_float64(model):
        assert error(model, tokens(9), responses(5, 3), chunk=4) <= 1e-12
        BranchReplay(model).step(tokens(9), responses(5), coupled)
    touched = [name for name, p in model.named_parameters() if p.grad is not None]
    assert touched == ["model.layers.1.self_attn.v_proj.weight"]
