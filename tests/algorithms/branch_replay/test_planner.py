"""FLOPs against torch's counter, peaks against the profiler's memory events, and the choice."""

import dataclasses

import pytest
import torch
from torch._C._profiler import _EventType
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from algorithms.branch_replay.config import ReplayConfig
from algorithms.branch_replay.costs import (
    Attention,
    Shape,
    naive_flops,
    packed_flops,
    replay_flops,
    tokens_forward,
)
from algorithms.branch_replay.losses import PerBranch
from algorithms.branch_replay.measure import Speed, describe, time_it
from algorithms.branch_replay.planner import Work, choose, pick, replay_bytes
from algorithms.branch_replay.replay import BranchReplay
from algorithms.branch_replay.trunk import Trunk
from algorithms.common.errors import FieldError, InputError
from kernels import dispatch
from kernels.shared_prefix_attention import OP
from tests.families import tiny
from tests.replays import responses, take_gradients, tokens

LAYER = dict(heads=4, key_dim=32, value_dim=32, window=None)

# Llama of width 128 with 4 layers, d_h 32, 512 tokens: the model of the benchmark.
SHAPE = Shape(
    weights=3 * 181248.0,
    top=181248.0,
    top_keys=32768.0,
    top_back=16384.0,
    head=512.0 * 128,
    layers=4,
    vocabulary=512,
    attention=tuple(Attention(**LAYER, top=i == 3) for i in range(4)),
    parameter_bytes=3428864,
    graph_bytes=41836.0,
    prompt_graph_bytes=32212.0,
    kv_bytes=2048,
    grad_bytes=2048,
    output_bytes=3 * 4 * (32 + 1) * 4,
    state_bytes=0,
    item=4,
    wide=4,
)


@pytest.mark.parametrize("window", [None, 1, 4, 9, 100])
@pytest.mark.parametrize(("count", "before"), [(1, 0), (7, 0), (5, 3), (3, 20)])
def test_pairs(window, count, before):
    layer = Attention(**(LAYER | {"window": window}), top=False)
    pairs = sum(min(before + i + 1, window or 1000) for i in range(count))
    assert layer.pairs(count, before) == pairs


def test_attention_backward_is_two_and_a_half_forwards():
    shape = (1, 4, 64, 32)
    forward = sdpa_flop_count(shape, shape, shape)
    assert sdpa_backward_flop_count(shape, shape, shape, shape) == 2.5 * forward
    layer = Attention(**LAYER, top=False)
    assert 2 * layer.product(64 * 64) == forward


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "qwen3_moe", "deepseek_v3"])
def test_flops_of_full_sequences_are_those_of_the_counter(family):
    model = tiny(family, torch.float32)
    model.set_attn_implementation("sdpa")
    shape = describe(Trunk(model))
    count = 24
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens(count)[None], use_cache=False).logits.sum().backward()
    # The counted products are dense, and without the scores' recomputation.
    attention = 6.0 * sum(layer.product(count * count) for layer in shape.attention)
    ours = tokens_forward(dataclasses.replace(shape, attention=()), count, 0, scored=True).update
    # Routed experts that no token chose, and rotary angles, make the difference.
    assert counter.get_total_flops() == pytest.approx(ours + attention, rel=0.02)


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("mode", ["exact", "response_only"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "deepseek_v3"])
def test_flops_of_a_replay_are_those_of_the_counter(family, mode, passes):
    """Of GPT-2's top layer queries, keys and values are one product, of Llama's they are three and
    the prompt's queries have no backward."""
    model = tiny(family, torch.float32)
    replay = BranchReplay(model, ReplayConfig(mode=mode, chunk=16))
    shape = describe(replay.trunk)
    answers = responses(9, 9)
    loss = PerBranch(lambda i, lps: lps.sum())

    def coupled(log_probs):
        return loss(log_probs)

    forced = dispatch.override(OP, "reference")
    with FlopCounterMode(display=False) as counter, forced:
        replay.step(tokens(49), answers, loss if passes == 1 else coupled)
    take_gradients(model)
    open_tokens = 48 if mode == "exact" else 0
    bare = dataclasses.replace(shape, attention=())
    ours = replay_flops(bare, 49, [9, 9], open_tokens=open_tokens, passes=passes)
    ours += 2.0 * shape.head * 18 if passes == 1 else 0.0  # log-probabilities come first
    for layer in shape.attention:  # dense rectangles; backward is four products, or three
        chunks = 0 if layer.top else sum(16 * (16 * i + 16) for i in range(3))
        own, behind = 2 * 9 * 9, 2 * 9 * 48
        ours += layer.product(chunks) * (8 if mode == "exact" else 2)
        ours += layer.product(own + behind) * 2 * passes
        ours += layer.product(own) * 4 + layer.product(behind) * 4
    assert counter.get_total_flops() == pytest.approx(ours, rel=1e-9)


def test_kept_attention_saves_its_forward_in_the_sweep():
    answers = [64] * 8
    for open_tokens, chunk_pairs in (
        (4095, 4095 * 4096 // 2),
        (1000, 1000 * 3095 + 1000 * 1001 // 2),
    ):
        plain, kept = (
            replay_flops(SHAPE, 4096, answers, open_tokens=open_tokens, keep_attention=keep)
            for keep in (False, True)
        )
        forward = sum(2 * layer.product(chunk_pairs) for layer in SHAPE.attention[:3])
        assert plain - kept == pytest.approx(forward, rel=1e-9)


def test_limits_of_the_benchmark():
    """Speed-ups that FLOPs allow with one pass: what the derivation gives by hand."""
    limits = {}
    for group in (8, 32):
        answers = [64] * group
        naive = naive_flops(SHAPE, 4096, answers)
        for mode in ("exact", "kept", "response_only"):
            ours = replay_flops(
                SHAPE,
                4096,
                answers,
                open_tokens=0 if mode == "response_only" else 4095,
                passes=1,
                keep_attention=mode == "kept",
            )
            limits[mode, group] = naive / ours
        assert naive / packed_flops(SHAPE, 4096, answers) == pytest.approx(group * 0.84, rel=0.4)
    assert limits["exact", 8] == pytest.approx(6.85, rel=0.02)
    assert limits["exact", 32] == pytest.approx(17.4, rel=0.02)
    assert limits["kept", 8] == pytest.approx(7.9, rel=0.02)
    assert limits["kept", 32] == pytest.approx(19.2, rel=0.02)
    assert limits["response_only", 8] == pytest.approx(20.9, rel=0.02)
    assert limits["response_only", 32] == pytest.approx(36.2, rel=0.02)


def peak(function) -> int:
    """Most bytes that were allocated at once inside `function`, by the profiler's events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        function()
    assert profiled.profiler is not None
    events = list(profiled.profiler.kineto_results.experimental_event_tree())
    changes = []
    while events:
        event = events.pop()
        events.extend(event.children)
        if event.tag == _EventType.Allocation:
            changes.append((event.start_time_ns, event.extra_fields.alloc_size))
    now = most = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


@pytest.mark.parametrize(
    ("family", "mode", "work", "settings"),
    [
        ("llama", "exact", Work(401, 40, 4), {"chunk": 128, "branches_per_pass": 2}),
        ("qwen3", "response_only", Work(401, 60, 6), {"chunk": 64, "branches_per_pass": 3}),
        ("gpt2", "exact", Work(201, 100, 2), {"chunk": 64, "branches_per_pass": 2}),
        ("falcon_h1", "exact", Work(201, 30, 4), {"chunk": 100, "branches_per_pass": 2}),
        ("llama", "exact", Work(401, 40, 4), {"chunk": 128, "keep_attention": True}),
        ("qwen3", "truncated", Work(401, 40, 4), {"chunk": 100, "truncated_chunks": 2}),
        (
            "qwen3",
            "truncated",
            Work(401, 40, 4),
            {"chunk": 100, "truncated_chunks": 2, "keep_attention": True},
        ),
    ],
)
def test_planned_peaks_are_those_of_the_profiler(family, mode, work, settings):
    sizes = {"max_position_embeddings": 1024, "n_positions": 1024}
    if family == "qwen3":  # wide enough for blocks of scores not to matter
        sizes |= {"hidden_size": 128, "intermediate_size": 344, "head_dim": 32}
    model = tiny(family, torch.float32, **sizes)
    config = ReplayConfig(mode=mode, **settings)
    replay = BranchReplay(model, config)
    planned, _ = replay_bytes(describe(replay.trunk), work, config)
    answers = [tokens(work.response, i) for i in range(work.group)]

    def loss_fn(log_probs):
        return sum(lp.sum() for lp in log_probs)

    measured = peak(lambda: replay.step(tokens(work.prompt), answers, loss_fn))
    assert planned == pytest.approx(measured, rel=0.15)


SPEED = Speed(flops_per_second=6e10, overhead=5e-3)


def test_a_large_budget_takes_exact_replay_in_few_passes():
    choice = pick(SHAPE, SPEED, Work(4096, 64, 8), budget=1e9)
    assert choice.config.mode == "exact" and not choice.config.offload
    assert choice.config.keep_attention and "attention kept" in str(choice)
    assert choice.config.branches_per_pass == 8
    assert [row.name for row in choice.rows] == ["naive", "packed", "exact", "response_only"]
    naive, packed, exact, response_only = (row.seconds for row in choice.rows)
    assert naive > exact > response_only and packed < naive
    assert "picked: exact" in str(choice) and "peak MB" in str(choice)


def test_less_memory_means_smaller_pieces_then_the_host_then_a_constant_prompt():
    work = Work(16384, 64, 8)
    found = []
    for budget in (400e6, 100e6, 60e6, 36e6):
        choice = pick(SHAPE, SPEED, work, budget)
        assert choice.picked.bytes <= budget
        found.append(choice.config)
    assert [c.mode for c in found[:3]] == ["exact"] * 3
    assert found[0].chunk > found[1].chunk
    assert [c.keep_attention for c in found[:3]] == [True, False, False]
    assert not found[1].offload and found[2].offload
    with pytest.raises(InputError, match=r"^budget: 1 MB are too few, .* takes"):
        pick(SHAPE, SPEED, work, 1e6)


def test_planning_leaves_the_model_as_it_was():
    model = tiny("qwen3_moe", torch.float32)
    weights = [p.clone() for p in model.parameters()]
    choice = choose(model, Work(100, 10, 4), budget=1e9)
    assert choice.picked.seconds > 0
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    speed = time_it(Trunk(model), describe(Trunk(model)))
    assert speed.flops_per_second > 0 and speed.overhead >= 0


@pytest.mark.parametrize("field", ["prompt", "response", "group"])
@pytest.mark.parametrize("value", [0, -3, 2.0, True, None, "8"])
def test_work_that_is_none(field, value):
    with pytest.raises(FieldError, match=f"^{field}: must be a positive integer, not "):
        Work(**({"prompt": 10, "response": 5, "group": 2} | {field: value}))


@pytest.mark.parametrize("budget", [0, -1.0, float("nan"), "1e9", None, True, [1e9]])
def test_a_budget_that_is_none(budget):
    with pytest.raises(InputError, match="^budget: must be a positive number of bytes, not "):
        pick(SHAPE, SPEED, Work(100, 10, 4), budget)


@pytest.mark.parametrize("trained", [(), ("lm_head",)])
def test_a_frozen_decoder_has_no_plan(trained):
    model = tiny("llama", torch.float32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(trained) if trained else False)
    with pytest.raises(InputError, match="^model: all weights of its decoder are frozen"):
        choose(model, Work(100, 10, 4), budget=1e9)


def test_a_partly_frozen_decoder_has_one():
    model = tiny("llama", torch.float32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.2." in name)
    assert choose(model, Work(100, 10, 4), budget=1e9).picked.seconds > 0


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_planning_where_gradients_are_turned_off(off):
    model = tiny("llama", torch.float32)
    with off():
        assert choose(model, Work(100, 10, 4), budget=1e9).picked.seconds > 0


def test_planning_under_autocast():
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(InputError, match="^torch.autocast"):
        choose(tiny("llama", torch.float32), Work(100, 10, 4), budget=1e9)


def test_what_is_no_model_has_no_plan():
    with pytest.raises(InputError, match="^model: must be a causal language model"):
        choose(None, Work(100, 10, 4), budget=1e9)
