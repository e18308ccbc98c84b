"""The modelled speed-up of an update is the ratio that torch's own FLOP counter finds."""

import dataclasses

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from algorithms.branch_replay.collect import Group, Rolled
from algorithms.branch_replay.config import LoRAConfig, ReplayConfig
from algorithms.branch_replay.lora import add_lora
from algorithms.branch_replay.losses import PerBranch
from algorithms.branch_replay.prompts import Prompt, Question
from algorithms.branch_replay.reference import step
from algorithms.branch_replay.replay import BranchReplay
from algorithms.branch_replay.speedup import Speedup
from kernels import dispatch
from kernels.shared_prefix_attention import OP
from tests.families import tiny
from tests.replays import responses, take_gradients, tokens

LOSS = PerBranch(lambda i, log_probs: log_probs.sum())


def rolled(prompt, lengths, question=0):
    group = Group(
        Question("0", tokens(question), {}),
        responses(*lengths),
        torch.zeros(len(lengths)),
        [False] * len(lengths),
        None,
        own=False,
    )
    return Rolled(Prompt(tokens(prompt), [group.question]), [group])


def without_attention(speedup):
    """Products of weights alone: what the counter sees of attention depends on the kernel."""
    speedup.shape = dataclasses.replace(speedup.shape, attention=())
    return speedup


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("mode", ["exact", "response_only"])
def test_it_is_the_ratio_of_the_counter(mode, adapters):
    model = tiny("llama", torch.float32)
    if adapters:
        add_lora(model, LoRAConfig(rank=1), seed=0)
    model.set_attn_implementation("sdpa")
    replay = BranchReplay(model, ReplayConfig(mode=mode, chunk=100))
    item = rolled(41, [6] * 8, question=2)
    speedup = without_attention(Speedup(replay, pairwise=False))
    naive, ours = speedup.flops(item)
    counts = []
    for run in (
        lambda: step(model, item.prompt.tokens, item.nodes(), LOSS),
        lambda: replay.step(item.prompt.tokens, item.nodes(), LOSS),
    ):
        forced = dispatch.override(OP, "reference")
        with FlopCounterMode(display=False) as counter, forced, sdpa_kernel(SDPBackend.MATH):
            run()
        take_gradients(model)
        products = counter.get_flop_counts()["Global"]
        attention = sum(n for op, n in products.items() if "bmm" in str(op))
        counts.append(counter.get_total_flops() - attention)
    # Full sequences run the head on the prompt too, replay has a forward of it more. Of adapters
    # the model counts the mean share of what is trained, for all products alike.
    head = speedup.shape.head
    counts[0] -= (4.0 if adapters else 6.0) * head * 8 * 40
    counts[1] -= 2.0 * head * 8 * 8
    assert naive / ours == pytest.approx(counts[0] / counts[1], rel=0.02 if adapters else 1e-9)
    assert naive / ours > 3


def test_pairs_and_responses_in_pieces_take_a_pass_more():
    model = tiny("llama", torch.float32)
    item = rolled(50, [8] * 4)
    whole = BranchReplay(model, ReplayConfig(chunk=8))
    cut = BranchReplay(model, ReplayConfig(chunk=7))
    one = Speedup(whole, pairwise=False).flops(item)
    two = Speedup(whole, pairwise=True).flops(item)
    assert two[0] == one[0] and two[1] > one[1]
    assert Speedup(cut, pairwise=False).flops(item) == two


def test_measuring_leaves_gradients_and_modes_as_they_were():
    model = tiny("llama", torch.float32).train()
    model.model.norm.weight.grad = torch.ones_like(model.model.norm.weight)
    Speedup(BranchReplay(model), pairwise=False)
    assert model.training and bool((model.model.norm.weight.grad == 1).all())
    assert [p for p in model.parameters() if p.grad is not None] == [model.model.norm.weight]


def test_a_longer_prompt_saves_more():
    speedup = Speedup(BranchReplay(tiny("llama", torch.float32)), pairwise=False)
    ratios = [
        naive / ours for naive, ours in (speedup.flops(rolled(n, [5] * 8)) for n in (4, 40, 400))
    ]
    assert 0.5 < ratios[0] < ratios[1] < ratios[2]
