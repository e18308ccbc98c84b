"""Routers: equal decisions in all passes, and a load-balancing loss that counts as naive does."""

import pytest
import torch

from algorithms.branch_replay import reference
from algorithms.branch_replay.config import ReplayConfig
from algorithms.branch_replay.errors import SelfCheckError
from algorithms.branch_replay.moe import find_routers
from algorithms.branch_replay.replay import BranchReplay
from algorithms.branch_replay.tree import group
from algorithms.common.errors import InputError
from tests.families import tiny, true_float64
from tests.replays import coupled, distance, replayed, responses, take_gradients, tokens

FAMILIES = ("qwen3_moe", "gpt_oss", "qwen3_next", "deepseek_v3")


@pytest.mark.parametrize("family", FAMILIES)
def test_routers_are_found(family):
    assert len(find_routers(tiny(family))) == (2 if family == "deepseek_v3" else 3)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "qwen3_next"])
@pytest.mark.parametrize("lengths", [(9, 1, 0, 12), (4,)])
def test_the_auxiliary_loss_equals_full_sequences(family, lengths):
    model = tiny(family)
    trees = [group(tokens(17), responses(*lengths)), group(tokens(8, 3), responses(3, 2))]

    def loss_fn(branches):
        return coupled([b for tree in branches for b in tree])

    with true_float64(model):
        _, _, balance = reference.step_trees(model, trees, loss_fn, aux_loss=3.0)
        truth = take_gradients(model)
        reference.step_trees(model, trees, loss_fn)
        without = take_gradients(model)
        replay = BranchReplay(model, ReplayConfig(chunk=5, branches_per_pass=2, aux_loss=3.0))
        out = replay.step_trees(trees, loss_fn)
        gradients = take_gradients(model)
    assert out.aux_loss == pytest.approx(balance, rel=1e-12)
    assert distance(without, truth) > 1e-4
    assert distance(gradients, truth) <= 1e-12


def test_the_auxiliary_loss_is_the_one_of_transformers():
    model = tiny("qwen3_moe")
    prompt, branches = tokens(9), [tokens(4, 1), tokens(4, 2)]
    with true_float64(model):
        rows = torch.stack([torch.cat([prompt, b])[:-1] for b in branches])
        theirs = model(rows, output_router_logits=True, use_cache=False).aux_loss
        replay = BranchReplay(model, ReplayConfig(chunk=4, aux_loss=1.0))
        out = replay.step(prompt, branches, coupled)
    assert out.aux_loss == pytest.approx(theirs.item(), rel=1e-12)


def test_the_auxiliary_loss_of_a_tree_counts_tokens_once_per_leaf():
    from tests.algorithms.branch_replay.test_trees import forest, loss_fn

    model = tiny("qwen3_moe")
    with true_float64(model):
        _, _, balance = reference.step_trees(model, forest(), loss_fn, aux_loss=1.0)
        truth = take_gradients(model)
        out = BranchReplay(model, ReplayConfig(chunk=3, aux_loss=1.0)).step_trees(forest(), loss_fn)
        gradients = take_gradients(model)
    assert out.aux_loss == pytest.approx(balance, rel=1e-12)
    assert distance(gradients, truth) <= 1e-12


def test_other_decisions_in_a_later_pass_raise():
    model = tiny("qwen3_moe")
    replay = BranchReplay(model, ReplayConfig(chunk=4, tolerance=1e9))
    router = find_routers(model)[1]
    calls = []

    def tie(module, inputs, output):
        """A router near a tie, that falls to another side from its sixth call on."""
        calls.append(module)
        logits, scores, chosen = output
        return logits, scores, chosen if len(calls) < 6 else (chosen + 1) % 4

    router.register_forward_hook(tie)
    with pytest.raises(SelfCheckError, match="router 1 sent"):
        replay.step(tokens(17), responses(5, 3), coupled)


def test_an_auxiliary_loss_without_routers_raises():
    with pytest.raises(InputError, match="no router"):
        BranchReplay(tiny("llama"), ReplayConfig(aux_loss=0.1))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("mode", ["exact", "response_only"])
def test_a_captured_prompt_is_counted_in_every_step(family, mode):
    model = tiny(family)
    prompt, branches = tokens(17), responses(9, 1, 0, 12)
    config = ReplayConfig(mode=mode, chunk=5, branches_per_pass=2, aux_loss=3.0)
    with true_float64(model):
        fresh = BranchReplay(model, config).step(prompt, branches, coupled)
        truth = take_gradients(model)
        replay = BranchReplay(model, config)
        captured = replay.capture(prompt)
        for _ in range(2):
            replay.log_probs(captured, branches)
            out = replay.step(captured, branches, coupled)
            assert out.aux_loss == pytest.approx(fresh.aux_loss, rel=1e-12)
            assert distance(take_gradients(model), truth) <= 1e-12


@pytest.mark.parametrize("inside", ["same", "other"])
def test_routers_that_run_inside_the_loss_are_not_those_of_the_step(inside):
    model = tiny("qwen3_moe")
    prompt, branches = tokens(9), responses(5, 3)
    config = {"chunk": 4, "aux_loss": 3.0}
    replay = BranchReplay(model, ReplayConfig(**config))
    other = BranchReplay(model, ReplayConfig(chunk=4))

    def loss_fn(log_probs):
        (replay if inside == "same" else other).log_probs(tokens(12, 4), responses(6))
        return coupled(log_probs)

    with true_float64(model):
        plain, truth = replayed(model, prompt, branches, coupled, **config)
        out = replay.step(prompt, branches, loss_fn)
        assert out.aux_loss == plain.aux_loss
        assert distance(take_gradients(model), truth) <= 1e-12


def test_a_captured_prompt_goes_to_the_same_experts_when_it_is_recomputed():
    model = tiny("qwen3_moe")
    replay = BranchReplay(model, ReplayConfig(chunk=4))
    captured = replay.capture(tokens(9))
    model.model.layers[0].mlp.gate.register_forward_hook(
        lambda module, inputs, output: (*output[:2], (output[2] + 1) % 4)
    )
    with pytest.raises(SelfCheckError, match="router 0 sent"):
        replay.step(captured, responses(5, 3), coupled)


@pytest.mark.parametrize("family", FAMILIES)
def test_reuse_of_a_prompt_over_steps(family):
    model = tiny(family)
    settings = {"mode": "response_only", "chunk": 4}
    replay = BranchReplay(model, ReplayConfig(**settings, refresh_every=2, refresh_bound=10.0))
    captured = replay.capture(tokens(9))
    recaptured = []
    for _ in range(4):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.001)
        recaptured.append(replay.step(captured, responses(5, 3), coupled).drift.recaptured)
        ours = take_gradients(model)
    assert recaptured == [False, True] * 2
    _, fresh = replayed(model, tokens(9), responses(5, 3), **settings)
    assert distance(ours, fresh) <= 1e-6


def test_one_prompt_after_another_with_changing_weights():
    """Decisions of an earlier prompt are not taken for those of a later one."""
    model = tiny("qwen3_moe", torch.float32)
    replay = BranchReplay(model, ReplayConfig(chunk=4))
    for seed in range(16):
        captured = replay.capture(tokens(9, seed))
        if seed % 4 == 0:
            replay.step(captured, responses(5, 3), coupled)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))


def test_a_prompt_that_was_captured_without_the_auxiliary_loss_raises():
    model = tiny("qwen3_moe")
    captured = BranchReplay(model, ReplayConfig(chunk=4)).capture(tokens(9))
    with pytest.raises(InputError, match="aux_loss: the prompt was captured without it"):
        BranchReplay(model, ReplayConfig(chunk=4, aux_loss=1.0)).step(
            captured, responses(3), coupled
        )
