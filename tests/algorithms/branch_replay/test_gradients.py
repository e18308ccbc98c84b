"""A step that fails leaves .grad as it was, wherever it fails."""

import pytest
import torch

from algorithms.branch_replay.config import ReplayConfig
from algorithms.branch_replay.errors import SelfCheckError, StaleStateError
from algorithms.branch_replay.losses import PerBranch
from algorithms.branch_replay.replay import BranchReplay
from algorithms.branch_replay.traversal import Traversal
from algorithms.branch_replay.tree import group
from algorithms.common.errors import NonFiniteError
from tests.families import tiny
from tests.replays import coupled, responses, take_gradients, tokens

PROMPT, BRANCHES = tokens(9), responses(5, 4, 3)


def interrupted(model, replay, monkeypatch):
    """Ctrl-C in the sweep, when all branches have been replayed."""
    recompute = Traversal._recompute

    def interrupt(self, segment, entry, cotangents):
        if segment.start == 0:
            raise KeyboardInterrupt
        return recompute(self, segment, entry, cotangents)

    monkeypatch.setattr(Traversal, "_recompute", interrupt)
    with pytest.raises(KeyboardInterrupt):
        replay.step_trees([group(PROMPT, BRANCHES)], lambda trees: coupled(trees[0]))


def term_raises(model, replay, monkeypatch):
    def term(i, log_probs):
        return log_probs.sum() / (1 if i < 2 else None)

    with pytest.raises(TypeError):
        replay.step(PROMPT, BRANCHES, PerBranch(term))


def term_is_not_finite(model, replay, monkeypatch):
    def term(i, log_probs):
        return log_probs.sum() * (1.0 if i < 2 else float("nan"))

    with pytest.raises(NonFiniteError):
        replay.step(PROMPT, BRANCHES, PerBranch(term))


def passes_disagree(model, replay, monkeypatch):
    calls, ramp = [], torch.linspace(-0.1, 0.1, model.config.hidden_size)
    hook = model.model.layers[2].register_forward_hook(
        lambda module, inputs, output: calls.append(1) or output + len(calls) * ramp
    )
    with pytest.raises(SelfCheckError):
        replay.step(PROMPT, BRANCHES, coupled)
    hook.remove()


def weights_change(model, replay, monkeypatch):
    def term(i, log_probs):
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(1.01)
        return log_probs.sum()

    with pytest.raises(StaleStateError):
        replay.step(PROMPT, BRANCHES, PerBranch(term))


FAILURES = [interrupted, term_raises, term_is_not_finite, passes_disagree, weights_change]


@pytest.mark.parametrize("fail", FAILURES)
def test_a_failed_step_leaves_gradients_as_they_were(fail, monkeypatch):
    model = tiny("llama")
    # A chunk holds a response, or a loss per branch would take two passes.
    replay = BranchReplay(model, ReplayConfig(chunk=5, branches_per_pass=1))
    parameters = list(model.parameters())
    for parameter in parameters[::2]:  # the others have none yet
        parameter.grad = torch.ones_like(parameter)
    before = [parameter.grad for parameter in parameters]
    fail(model, replay, monkeypatch)
    assert all(parameter.grad is kept for parameter, kept in zip(parameters, before, strict=True))
    assert all(bool((kept == 1).all()) for kept in before if kept is not None)


def test_a_step_adds_to_the_tensors_that_are_there():
    model = tiny("llama")
    replay = BranchReplay(model, ReplayConfig(chunk=4))
    replay.step(PROMPT, BRANCHES, coupled)
    once = take_gradients(model)
    replay.step(PROMPT, BRANCHES, coupled)
    held = {name: p.grad for name, p in model.named_parameters()}
    replay.step(PROMPT, BRANCHES, coupled)
    for name, parameter in model.named_parameters():
        assert parameter.grad is held[name]
        torch.testing.assert_close(parameter.grad, 2 * once[name])


@pytest.mark.parametrize("at", [1, 2])
def test_a_recapture_whose_loss_raises_leaves_gradients_as_they_were(at):
    model = tiny("llama")
    config = ReplayConfig(mode="response_only", chunk=4, refresh_every=2, refresh_bound=0.0)
    replay = BranchReplay(model, config)
    captured = replay.capture(PROMPT)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    calls = []

    def loss_fn(log_probs):  # of the step with the old prompt, then with the fresh one
        calls.append(1)
        if len(calls) == at:
            raise ZeroDivisionError
        return coupled(log_probs)

    with pytest.raises(ZeroDivisionError):
        replay.step(captured, BRANCHES, loss_fn)
    assert all(bool((parameter.grad == 1).all()) for parameter in model.parameters())
