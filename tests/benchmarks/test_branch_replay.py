"""The benchmark of branch replay at toy size: figures, FLOP limit and measuring tools."""

import math
import os
import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from algorithms.branch_replay.config import ReplayConfig
from algorithms.branch_replay.costs import naive_flops, replay_flops
from algorithms.branch_replay.measure import describe
from algorithms.branch_replay.planner import Work
from algorithms.branch_replay.trunk import Trunk
from benchmarks import branch_replay
from benchmarks.branch_replay import (
    best_ratio,
    flop_limit,
    gradient_errors,
    measure_case,
    speed,
)
from benchmarks.float64 import true_float64
from benchmarks.groups import naive_step, random_group, relative_l2, take_gradients
from benchmarks.memory import allocated_peak, in_fresh_process, resident_peak
from benchmarks.prefix_grouper import ADAPTER, DIRECT, prefix_grouper_step
from benchmarks.replay_case import Case, replay_step
from benchmarks.replay_memory import memory_against_peer
from benchmarks.timing import Measured

TOY = Case(
    width=32,
    layers=2,
    prompt=128,
    response=8,
    chunk=64,
    rounds=2,
    long_prompt=160,
    error_prompt=128,
    processes=1,
    planned=((32, 2, Work(100, 9, 3), ReplayConfig(chunk=30, branches_per_pass=2)),),
)
KEYS = (
    "exact_speedup_g8",
    "exact_speedup_g32",
    "response_only_speedup_g8",
    "response_only_speedup_g32",
    "exact_speedup_p16k_g8",
    "exact_limit_fraction",
    "response_only_limit_fraction",
    "peak_growth_g2_g8_pct",
    "peak_growth_g2_g32_pct",
    "rss_growth_g2_g32_pct",
    "time_vs_prefix_grouper_g8",
    "time_vs_prefix_grouper_g32",
    "memory_vs_prefix_grouper_g8",
    "memory_vs_prefix_grouper_g32",
    "grad_error_fp64",
    "grad_error_fp32",
    "grad_error_bf16_vs_naive",
    "planner_peak_error_pct",
)


@pytest.mark.slow
def test_all_figures_are_measured():
    figures = measure_case(TOY)
    assert set(figures) == {*KEYS, *(f"{key}_spread" for key in KEYS)}
    assert all(math.isfinite(value) for value in figures.values())


def test_speed_memory_and_errors(capsys):
    found = {**speed(TOY), **memory_against_peer(TOY), **gradient_errors(TOY)}
    assert set(found) < set(KEYS)
    assert found["grad_error_fp64"].median < 1e-12
    assert found["grad_error_fp32"].median < 1e-5
    assert 0.1 < found["grad_error_bf16_vs_naive"].median < 10
    assert 0 < found["memory_vs_prefix_grouper_g32"].median < 1
    for mode in ("exact", "response_only"):
        limit = flop_limit(TOY.model(), mode, TOY.prompt, TOY.response, 8)
        fraction = found[f"{mode}_limit_fraction"].median
        assert 0 < fraction <= found[f"{mode}_speedup_g8"].median / limit
    printed = capsys.readouterr().out
    for line in (f"{ADAPTER}_g32: best of 2 rounds", f"{DIRECT}_g8: best of 2", "4 at a time"):
        assert line in printed


def test_the_quick_form_leaves_the_long_prompt_out():
    assert branch_replay.QUICK.long_prompt is None
    assert branch_replay.FULL.long_prompt == 16384
    assert branch_replay.speed_at_long_prompt(branch_replay.QUICK) == {
        "exact_speedup_p16k_g8": None
    }


def test_the_limits_are_those_of_the_derivation():
    model = branch_replay.FULL.model()
    for mode, branches, limit in (
        ("exact", 8, 7.9),  # without kept attention 6.85 and 17.4
        ("exact", 32, 19.2),
        ("response_only", 8, 20.9),
        ("response_only", 32, 36.2),
    ):
        assert flop_limit(model, mode, 4096, 64, branches) == pytest.approx(limit, rel=0.015)


def _forward(query, key, *args, out_shape=None, **kwargs):
    return _flash(query, key, products=2, causal=args[2:3] == (True,))


def _backward(grad, query, key, *args, out_shape=None, **kwargs):
    return _flash(query, key, products=5, causal=args[4])


def _flash(query, key, products, causal):
    """FLOPs of a flash call: so many products over the pairs that it computes."""
    *batch, rows, dim = query
    pairs = rows * (rows + 1) / 2 if causal else rows * key[-2]
    return products * 2 * math.prod(batch) * pairs * dim


def _in_place(total, a, b, *args, out_shape=None, **kwargs):
    return 2 * math.prod(a) * b[-1]


def counted(step):
    """What torch's counter says of a step; it does not know flash attention on CPUs."""
    aten = torch.ops.aten
    known = {
        aten._scaled_dot_product_flash_attention_for_cpu: _forward,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward,
        aten.baddbmm_: _in_place,
        aten.addmm_: _in_place,
    }
    with FlopCounterMode(display=False, custom_mapping=known) as counter:
        step()
    return counter.get_total_flops()


@pytest.mark.parametrize("branches", [2, 8])
def test_flops_are_those_that_torch_counts(branches):
    case = Case(width=128, layers=3, prompt=513, response=32, chunk=256)
    model = case.model()
    group = case.group(model, case.prompt, branches)
    shape, responses = describe(Trunk(model)), [case.response] * branches
    naive = counted(lambda: naive_step(model, group))
    assert naive == pytest.approx(naive_flops(shape, case.prompt, responses), rel=0.002)
    for mode, keep in (("exact", True), ("exact", False), ("response_only", False)):
        settings = ReplayConfig(
            mode=mode, chunk=case.chunk, branches_per_pass=branches, keep_attention=keep
        )
        ours = counted(replay_step(model, group, settings))
        swept = case.prompt if mode == "exact" else 0
        limit = replay_flops(
            shape,
            case.prompt,
            responses,
            open_tokens=swept,
            passes=1,
            keep_attention=keep,
        )
        # What the limit leaves out: branches are scored before their loss is differentiated, and
        # the loop for queries alone multiplies one more column.
        more = 2 * shape.head * sum(responses)
        if mode == "response_only" and branches == 8:
            more += sum(4 * layer.product(sum(responses) * 512) / 64 for layer in shape.attention)
        assert ours == pytest.approx(limit + more, rel=1e-6), (mode, keep)


def test_the_peer_s_gradient_is_exact_both_ways():
    model = TOY.model().double()
    group = random_group(512, prompt=40, response=7, branches=3)
    with true_float64(model):
        naive_step(model, group)
        truth = take_gradients(model)
        naive_step(model, group, at_once=2)
        assert relative_l2(take_gradients(model), truth) < 1e-12
        for way in (ADAPTER, DIRECT):
            prefix_grouper_step(model, group, way)
            assert relative_l2(take_gradients(model), truth) < 1e-12
    assert model.config._attn_implementation == "sdpa"


def test_a_ratio_is_that_of_the_best_rounds_and_its_spread_that_of_pairs():
    assert best_ratio([4.0, 9.0], [2.0, 3.0]) == Measured(2.0, 0.5)


def test_the_profiler_sees_the_worst_moment():
    def step():
        first = torch.zeros(1000, dtype=torch.float32)
        del first
        torch.zeros(3000, dtype=torch.float32)

    assert allocated_peak(step) == pytest.approx(12000, abs=128)


def test_a_fresh_process_has_a_peak_of_its_own():
    held = bytearray(os.urandom(1)) * 500_000_000
    assert in_fresh_process(resident_peak) < len(held) < resident_peak()


def test_it_runs_on_one_core():
    code = (
        "import os, torch; from benchmarks.groups import pin_to_one_core; pin_to_one_core();"
        "print(len(os.sched_getaffinity(0)), torch.get_num_threads())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "1"]
