"""As a library: the ten lines of the README, and losses of every kind."""

import pytest
import torch

from algorithms.branch_replay.config import ReplayConfig
from algorithms.branch_replay.losses import PerBranch
from algorithms.branch_replay.replay import BranchReplay
from tests.families import tiny, true_float64
from tests.replays import coupled, distance, naive, replayed, responses, take_gradients, tokens

PROMPT = tokens(12)
BRANCHES = responses(5, 7, 3, 5)
OLD = [torch.linspace(-5, -1, len(b), dtype=torch.float64) for b in BRANCHES]
ADVANTAGES = torch.tensor([1.0, -0.5, 0.3, -0.8], dtype=torch.float64)


def test_ten_lines():
    model, prompt, answers = tiny("qwen3", torch.float32), PROMPT, BRANCHES
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5])

    replay = BranchReplay(model, ReplayConfig(mode="exact", chunk=1024, branches_per_pass=8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    old = replay.log_probs(prompt, answers)

    def loss_fn(log_probs):  # GRPO: any function of the log-probabilities will do
        ratios = [(new - before).exp() for new, before in zip(log_probs, old, strict=True)]
        return -sum(a * r.mean() for a, r in zip(advantages, ratios, strict=True)) / len(ratios)

    out = replay.step(prompt, answers, loss_fn)
    optimizer.step()
    optimizer.zero_grad()
    after = replay.step(prompt, answers, loss_fn)

    assert out.loss == pytest.approx(-float(advantages.mean()), abs=1e-5)
    assert out.pass_difference <= 1e-5
    assert after.loss < out.loss


def clipped(log_probs):
    """PPO's clip per token, mean over all tokens, and the k3 estimate of a KL."""
    total = count = 0
    for lp, old, a in zip(log_probs, OLD, ADVANTAGES, strict=True):
        ratio = (lp - old).exp()
        total = total - torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a).sum()
        total = total + 0.1 * ((old - lp).exp() - (old - lp) - 1).sum()
        count += len(lp)
    return total / count


def sequence_ratio(log_probs):
    """GSPO: one ratio per sequence, the geometric mean of its tokens'."""
    ratios = torch.stack([(lp - o).mean().exp() for lp, o in zip(log_probs, OLD, strict=True)])
    return -torch.minimum(ratios * ADVANTAGES, ratios.clamp(0.9, 1.1) * ADVANTAGES).mean()


def preference(log_probs):
    """DPO: pairs of branches in one sigmoid; cannot be cut into a sum over branches."""
    margins = torch.stack([lp.sum() - o.sum() for lp, o in zip(log_probs, OLD, strict=True)])
    return -torch.nn.functional.logsigmoid(0.1 * (margins[::2] - margins[1::2])).sum()


def group_softmax(log_probs):
    """A distribution over the whole group."""
    scores = torch.stack([lp.mean() for lp in log_probs])
    return -(scores.log_softmax(0) * ADVANTAGES).sum()


def top_tokens(log_probs):
    """Only the half of all tokens that the model finds most surprising."""
    flat = torch.cat(log_probs)
    return -flat[flat <= flat.median()].mean()


@pytest.mark.parametrize(
    "loss_fn", [clipped, sequence_ratio, preference, group_softmax, top_tokens]
)
def test_any_loss_on_log_probabilities(loss_fn):
    model = tiny("qwen3")
    with true_float64(model):
        loss, _, truth = naive(model, PROMPT, BRANCHES, loss_fn)
        out, gradients = replayed(model, PROMPT, BRANCHES, loss_fn, chunk=5, branches_per_pass=2)
    assert out.loss == pytest.approx(loss, rel=1e-11)
    assert distance(gradients, truth) <= 1e-12


def test_a_loss_times_zero_gives_no_gradient():
    """As GRPO does when all advantages are zero."""
    model = tiny("qwen3")
    out, gradients = replayed(model, PROMPT, BRANCHES, lambda lps: 2.5 + 0.0 * torch.cat(lps).sum())
    assert out.loss == 2.5
    assert all(not g.any() for g in gradients.values())


def test_a_captured_prompt_is_not_run_again():
    model = tiny("qwen3")
    replay = BranchReplay(model, ReplayConfig(chunk=7))
    captured = replay.capture(PROMPT)
    fresh = replay.log_probs(PROMPT, BRANCHES)
    for ours, theirs in zip(replay.log_probs(captured, BRANCHES), fresh, strict=True):
        assert torch.equal(ours, theirs)
    out = replay.step(captured, BRANCHES, clipped)
    assert out.tokens_without_graph == sum(map(len, BRANCHES))
    assert out.tokens_with_graph == len(PROMPT) - 1 + sum(map(len, BRANCHES))


def test_a_captured_prompt_serves_responses_that_need_more_room():
    model = tiny("falcon_h1")
    with true_float64(model):
        _, _, truth = naive(model, PROMPT, responses(14))
        replay = BranchReplay(model, ReplayConfig(chunk=5))
        captured = replay.capture(PROMPT)
        replay.step(captured, responses(14), lambda lps: lps[0].sum())
        model.zero_grad()
        replay.step(captured, responses(14), coupled)
    assert distance(take_gradients(model), truth) <= 1e-12


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3", {}),
        ("qwen3", {"chunk": 4}),
        ("falcon_h1", {}),
        ("qwen3_moe", {}),
        ("qwen3_moe", {"aux_loss": 0.1}),
    ],
)
def test_a_loss_per_branch_takes_one_pass_where_it_can(family, settings):
    model = tiny(family)
    answers = [*BRANCHES, tokens(0)]

    def term(i, log_probs):
        return (i + 1) * (log_probs**2).sum() + 7.0

    with true_float64(model):
        config = {"chunk": 11, "branches_per_pass": 2} | settings
        _, two = replayed(model, PROMPT, answers, lambda lps: PerBranch(term)(lps), **config)
        loss, log_probs, _ = naive(model, PROMPT, answers, PerBranch(term))
        out, one = replayed(model, PROMPT, answers, PerBranch(term), **config)
    assert distance(one, two) <= 1e-12
    assert out.loss == pytest.approx(loss, rel=1e-11)
    for ours, theirs in zip(out.log_probs[0], log_probs, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
    assert (out.pass_difference is None) == (not settings)
