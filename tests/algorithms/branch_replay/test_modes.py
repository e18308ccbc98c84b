"""response_only, truncated, offload, bfloat16 keys, kept attention; the prompt's term."""

import pytest
import torch

from algorithms.branch_replay import reference
from algorithms.branch_replay.config import ReplayConfig
from algorithms.branch_replay.losses import PerBranch
from algorithms.branch_replay.replay import BranchReplay
from algorithms.branch_replay.tree import Node, group
from algorithms.common.errors import FieldError
from kernels import dispatch
from kernels.shared_prefix_attention import OP, cpu
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

HYBRID = "falcon_h1"


@pytest.mark.parametrize("family", ["llama", "mistral", HYBRID, "lfm2"])
def test_a_token_of_the_prompt_alone_gets_a_gradient_only_in_exact_mode(family):
    model = tiny(family, tie_word_embeddings=False)
    prompt, branches = tokens(12) % 20 + 1, [b % 20 + 30 for b in responses(5, 3)]
    prompt[2] = 25
    name = next(n for n, _ in model.named_parameters() if "embed" in n)
    with true_float64(model):
        _, _, truth = naive(model, prompt, branches)
        _, exact = replayed(model, prompt, branches, chunk=4)
        _, partial = replayed(model, prompt, branches, chunk=4, mode="response_only")
    assert float(truth[name][25].norm()) > 0
    torch.testing.assert_close(exact[name][25], truth[name][25], rtol=1e-10, atol=1e-13)
    assert torch.equal(partial[name][25], torch.zeros_like(partial[name][25]))
    assert float(partial[name][branches[0][0]].norm()) > 0


def test_response_only_is_the_gradient_with_the_prompt_computed_by_other_weights():
    """Finite differences: the loss is moved by the weights of the branches, not of the prompt."""
    model = tiny("llama")
    prompt, branches = tokens(9), responses(5, 4)
    parameter = model.model.layers[1].self_attn.k_proj.weight
    with true_float64(model):
        _, gradients = replayed(model, prompt, branches, mode="response_only", chunk=4)
        direction = torch.randn_like(parameter)
        replay = BranchReplay(model, ReplayConfig(chunk=4))
        captured = replay.capture(prompt)

        def loss(step: float) -> float:
            with torch.no_grad():
                parameter.add_(direction, alpha=step)
            captured.version = captured.seen = replay.capture(prompt).version  # pretend it is fresh
            value = coupled(replay.log_probs(captured, branches))
            with torch.no_grad():
                parameter.add_(direction, alpha=-step)
            return float(value)

        slope = (loss(1e-5) - loss(-1e-5)) / 2e-5
    wanted = float((gradients["model.layers.1.self_attn.k_proj.weight"] * direction).sum())
    assert slope == pytest.approx(wanted, rel=1e-5)


def test_truncation_leads_from_response_only_to_exact():
    model = tiny(HYBRID)
    prompt, branches = tokens(17), responses(5, 3)
    with true_float64(model):
        _, _, truth = naive(model, prompt, branches)
        _, none = replayed(model, prompt, branches, mode="response_only", chunk=4)
        apart = [distance(none, truth)]
        for chunks in range(1, 5):
            _, gradients = replayed(
                model, prompt, branches, mode="truncated", truncated_chunks=chunks, chunk=4
            )
            apart.append(distance(gradients, truth))
    assert apart[0] > 0.05 and apart[4] <= 1e-12
    assert all(a > 1e-6 for a in apart[:4])


def test_response_only_goes_through_the_blocks_of_a_long_response():
    model = tiny(HYBRID)
    prompt, branches = tokens(9), responses(11)
    with true_float64(model):
        _, whole = replayed(model, prompt, branches, mode="response_only", chunk=100)
        _, blocks = replayed(model, prompt, branches, mode="response_only", chunk=4)
    assert distance(blocks, whole) <= 1e-12


@pytest.mark.parametrize("family", ["mistral", "gpt_oss", "deepseek_v3", HYBRID])
def test_offload_is_exact(family):
    model = tiny(family)
    with true_float64(model):
        assert error(model, tokens(23), responses(9, 1, 12), chunk=7, offload=True) <= 1e-12


@pytest.mark.parametrize("twin", ["reference", "blocks"])
@pytest.mark.parametrize("settings", [{"offload": True}, {"kv_dtype": "bf16"}], ids=str)
def test_a_prefix_elsewhere_gets_its_gradient_from_every_twin(settings, twin):
    """Its attention asks for gradients by `torch.autograd.grad`."""
    model = tiny("llama")
    prompt, branches = tokens(23), responses(9, 4)
    config = {"chunk": 7, "tolerance": 1.0} | settings
    with true_float64(model):
        _, usual = replayed(model, prompt, branches, **config)
        with dispatch.override(OP, twin):
            _, forced = replayed(model, prompt, branches, **config)
    assert distance(forced, usual) <= 1e-12


KEEP = {"chunk": 7, "keep_attention": True}


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("mistral", {"window": 5}),
        ("gpt_oss", {"aux_loss": 0.1}),
        ("deepseek_v3", {"branches_per_pass": 1}),
        (HYBRID, {"mode": "truncated", "truncated_chunks": 2}),
    ],
)
def test_kept_attention_changes_no_bit(family, settings):
    model = tiny(family)
    prompt, branches = tokens(23), responses(9, 1, 12)
    with true_float64(model):
        _, plain = replayed(
            model, prompt, branches, **(KEEP | settings | {"keep_attention": False})
        )
        _, kept = replayed(model, prompt, branches, **(KEEP | settings))
    assert all(torch.equal(kept[name], plain[name]) for name in plain)


def test_kept_attention_of_a_forest_and_of_a_captured_prompt():
    model = tiny("llama")
    prompt, branches = tokens(23), responses(9, 4)
    inner = Node(tokens(8, 1), [Node(tokens(9, 2)), Node(tokens(3, 3))])
    forest = [Node(tokens(9), [inner, Node(tokens(4, 4))], scored=False), group(prompt, branches)]

    def loss_fn(trees):
        return coupled([branch for tree in trees for branch in tree])

    with true_float64(model):
        reference.step_trees(model, forest, loss_fn)
        truth = take_gradients(model)
        replay = BranchReplay(model, ReplayConfig(**KEEP))
        replay.step_trees(forest, loss_fn)
        assert distance(take_gradients(model), truth) <= 1e-12
        _, _, truth = naive(model, prompt, branches)
        captured = replay.capture(prompt)
        for _ in range(2):
            replay.step(captured, branches, coupled)
            assert distance(take_gradients(model), truth) <= 1e-12


def test_kept_attention_is_not_computed_in_the_sweep(monkeypatch):
    computed = []
    merged = cpu._merged

    def counted(query, *args):
        computed.append(query.shape[2])
        return merged(query, *args)

    monkeypatch.setattr(cpu, "_merged", counted)
    model = tiny("llama")
    loss = PerBranch(lambda i, log_probs: log_probs.sum())
    lower = model.config.num_hidden_layers - 1  # the top layer's does not run for a prompt
    for keep, forwards in ((False, 2), (True, 1)):
        replay = BranchReplay(model, ReplayConfig(chunk=11, keep_attention=keep))
        computed.clear()
        replay.step(tokens(23), responses(9), loss)
        assert computed.count(11) == 2 * lower * forwards


def test_offload_does_not_keep_the_prefix_with_a_graph():
    """What is fetched for one layer is gone before the next: backward saves nothing of it."""
    model = tiny("llama")
    saved: list[tuple[int, ...]] = []

    def pack(tensor):
        saved.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        replayed(model, tokens(51), responses(3), chunk=64, offload=True, mode="response_only")
    assert saved and not any(50 in shape for shape in saved)


def test_keys_in_bfloat16_round_what_branches_see():
    model = tiny("llama", torch.float32)
    prompt, branches = tokens(23), responses(9, 4)
    _, _, truth = naive(model, prompt, branches)
    _, gradients = replayed(model, prompt, branches, chunk=8, kv_dtype="bf16", tolerance=0.0)
    assert 1e-5 < distance(gradients, truth) < 0.1


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"chunk": 0}, "chunk"),
        ({"truncated_chunks": 2}, "truncated_chunks"),
        ({"refresh_every": 2}, "refresh_every"),
        ({"refresh_every": 2, "mode": "response_only", "aux_loss": 0.1}, "aux_loss"),
        ({"tolerance": -1.0}, "tolerance"),
        ({"keep_attention": True, "mode": "response_only"}, "keep_attention"),
        ({"keep_attention": True, "offload": True}, "keep_attention"),
        ({"keep_attention": True, "kv_dtype": "bf16"}, "keep_attention"),
    ],
)
def test_settings_without_sense_are_refused(settings, field):
    with pytest.raises(FieldError, match=f"^{field}:"):
        ReplayConfig(**settings)


@pytest.mark.parametrize("family", ["llama", "mistral", "lfm2", "qwen3_5_text", HYBRID])
@pytest.mark.parametrize("window", [1, 5])
def test_an_imposed_window_equals_a_masked_full_sequence(family, window):
    model = tiny(family)
    tree = group(tokens(23), responses(9, 1, 12))

    def loss_fn(trees):
        return coupled(trees[0])

    with true_float64(model):
        _, log_probs, _ = reference.step_trees(model, [tree], loss_fn, window=window)
        truth = take_gradients(model)
        replay = BranchReplay(model, ReplayConfig(chunk=7, window=window))
        out = replay.step_trees([tree], loss_fn)
        gradients = take_gradients(model)
    for ours, theirs in zip(out.log_probs[0], log_probs[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
    assert distance(gradients, truth) <= 1e-12
