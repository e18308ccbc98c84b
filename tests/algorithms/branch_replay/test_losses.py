"""Losses whose gradient would be lost, or that are none: one line instead, and no gradient."""

import pytest
import torch

from algorithms.branch_replay.config import ReplayConfig
from algorithms.branch_replay.losses import PerBranch, derivative
from algorithms.branch_replay.replay import BranchReplay
from algorithms.branch_replay.tree import group
from algorithms.common.errors import InputError, NonFiniteError
from tests.families import tiny
from tests.replays import coupled, distance, naive, responses, take_gradients, tokens

PROMPT, BRANCHES = tokens(9), responses(5, 3)


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


def refused(model, loss_fn, message, branches=BRANCHES, error=InputError, **settings):
    with pytest.raises(error, match=message) as caught:
        BranchReplay(model, ReplayConfig(chunk=7, **settings)).step(PROMPT, branches, loss_fn)
    assert "\n" not in str(caught.value)
    assert all(p.grad is None for p in model.parameters())


def without_grad(log_probs):
    with torch.no_grad():
        return torch.cat(log_probs).sum()


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda lps: torch.tensor(2.5),
        lambda lps: torch.cat(lps).sum().detach(),
        lambda lps: (torch.cat(lps) > -3.0).sum(),
        lambda lps: torch.tensor(torch.cat(lps).sum().item()),
        without_grad,
    ],
)
def test_a_loss_without_a_derivative(model, loss_fn):
    refused(model, loss_fn, "^loss_fn: does not depend on the log-probabilities")
    replay = BranchReplay(model)
    with pytest.raises(InputError, match="^loss_fn: does not depend"):
        replay.step_trees([group(PROMPT, BRANCHES)], lambda trees: loss_fn(trees[0]))


@pytest.mark.parametrize("settings", [{}, {"branches_per_pass": 1}])
@pytest.mark.parametrize("which", [0, 1])
def test_a_term_without_a_derivative(model, which, settings):
    """Also where the other branch's has one, in one batch or two, in one pass or two."""

    def term(i, log_probs):
        return log_probs.sum().detach() if i == which else log_probs.sum()

    message = f"^PerBranch: term {which}: does not depend on the log-probabilities"
    refused(model, PerBranch(term), message, **settings)
    refused(model, lambda lps: PerBranch(term)(lps), message, **settings)


def test_without_scored_tokens_a_constant_is_what_a_loss_can_be(model):
    replay = BranchReplay(model)
    for loss_fn in (lambda lps: torch.tensor(2.5), PerBranch(lambda i, lp: torch.tensor(1.25))):
        out = replay.step(PROMPT, responses(0, 0), loss_fn)
        assert out.loss == 2.5
        assert all(not g.any() for g in take_gradients(model).values())


@pytest.mark.parametrize("branches", [BRANCHES, responses(0, 0)])
def test_a_loss_that_depends_on_weights_too(model, branches):
    weight = model.lm_head.weight
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    for penalty in (lambda: 0.1 * weight.square().sum(), lambda: scale, lambda: scale.exp() * 2):
        refused(
            model,
            lambda lps, penalty=penalty: torch.cat(lps).sum() + penalty(),
            "^loss_fn: depends on a tensor .* besides the log-probabilities",
            branches,
        )
        refused(
            model,
            PerBranch(lambda i, lp, penalty=penalty: lp.sum() * penalty()),
            "^loss_fn: depends on a tensor .* besides the log-probabilities",
            branches,
        )
    refused(model, lambda lps: weight.square().sum(), r"depends on a tensor \[61, 32\]")
    refused(model, lambda lps: scale, r"depends on a tensor \[\] ")


def test_weights_without_their_graph_may_be_in_a_loss(model):
    size = float(model.lm_head.weight.detach().square().sum())
    loss = BranchReplay(model).step(
        PROMPT, BRANCHES, lambda lps: coupled(lps) + model.lm_head.weight.detach().square().sum()
    )
    take_gradients(model)
    plain = BranchReplay(model).step(PROMPT, BRANCHES, coupled)
    take_gradients(model)
    assert loss.loss == pytest.approx(plain.loss + size)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (lambda lp: None, "not a NoneType"),
        (lambda lp: 1.5, "not a float"),
        (lambda lp: [lp.sum()], "not a list"),
        (lambda lp: lp, r"not torch.float64 \[[53]\]"),
        (lambda lp: lp.sum() * 1j, r"not torch.complex128 \[\]"),
    ],
)
def test_what_is_no_scalar(model, value, said):
    refused(
        model, PerBranch(lambda i, lp: value(lp)), f"^PerBranch: term [01]: must return .*{said}"
    )
    refused(model, lambda lps: value(lps[0]), f"^loss_fn: must return a scalar tensor, {said}")
    empty = [*BRANCHES, tokens(0)]
    refused(
        model, PerBranch(lambda i, lp: lp.sum() if len(lp) else None), "term 2: must return", empty
    )


@pytest.mark.parametrize("loss_fn", [None, 0.5, "mean"])
def test_what_is_no_function(model, loss_fn):
    refused(model, loss_fn, "^loss_fn: must be a function, not a ")
    with pytest.raises(InputError, match="^loss_fn: must be a function, not a "):
        BranchReplay(model).step_trees([group(PROMPT, BRANCHES)], loss_fn)
    with pytest.raises(InputError, match="^PerBranch: must be a function, not a "):
        PerBranch(loss_fn)


def test_trees_take_no_loss_per_branch(model):
    with pytest.raises(InputError, match="^loss_fn: PerBranch is for step"):
        BranchReplay(model).step_trees([group(PROMPT, BRANCHES)], PerBranch(lambda i, lp: lp.sum()))


@pytest.mark.parametrize("branches", [responses(5, 0), responses(0)])
def test_the_mean_of_an_empty_response_is_not_finite(model, branches):
    mean = PerBranch(lambda i, lp: lp.mean())
    refused(model, mean, "nan", branches, NonFiniteError)
    refused(model, lambda lps: mean(lps), "nan", branches, NonFiniteError)


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("loss_fn", [coupled, PerBranch(lambda i, lp: (i + 1) * lp.square().sum())])
def test_gradients_that_are_turned_off_around_a_step_are_found(model, off, loss_fn):
    _, log_probs, truth = naive(model, PROMPT, BRANCHES, loss_fn)
    with off():
        replay = BranchReplay(model, ReplayConfig(chunk=7))
        captured = replay.capture(PROMPT.clone())
        old = replay.log_probs(captured, BRANCHES)
        replay.step(PROMPT.clone(), [b.clone() for b in BRANCHES], loss_fn)
    assert distance(take_gradients(model), truth) <= 1e-6
    replay.step(captured, BRANCHES, loss_fn)  # nothing that was made inside is spoilt
    assert distance(take_gradients(model), truth) <= 1e-6
    with off():
        replay.step_trees([group(PROMPT, BRANCHES)], lambda trees: loss_fn(trees[0]))
    assert distance(take_gradients(model), truth) <= 1e-6
    for ours, theirs in zip(old, log_probs, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        assert not ours.is_inference()


def test_a_derivative_is_that_of_autograd():
    log_probs = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64)
    value, found = derivative(lambda lps: (lps**2).sum(), log_probs)
    assert value == 14.0 and torch.equal(found, 2 * log_probs)
    value, found = derivative(lambda lp: lp, log_probs[:1])  # the loss is the leaf itself
    assert value == -1.0 and torch.equal(found, torch.ones(1, dtype=torch.float64))
    assert not log_probs.requires_grad
