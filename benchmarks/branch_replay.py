"""What branch replay costs against full sequences and against the peer PrefixGrouper, on one core.

A Llama of four layers, random tokens, float32. A time is the best of several rounds in which all
contestants take turns, a speed-up is a ratio of best times, and its spread the interquartile range
of the ratios within each round. Full sequences run with causal SDPA, no checkpointing, the head on
response positions only, and one, two or four of them at a time, whichever is fastest. Above eight
branches their time is that of the best eight times the number of eights. Times, megabytes and both
ways to run the peer are printed; the file has ratios.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch

from algorithms.branch_replay.costs import naive_flops, replay_flops
from algorithms.branch_replay.measure import describe
from algorithms.branch_replay.trunk import Trunk
from benchmarks.float64 import true_float64
from benchmarks.groups import Group, naive_step, pin_to_one_core, relative_l2, take_gradients
from benchmarks.prefix_grouper import ADAPTER, DIRECT, prefix_grouper_step
from benchmarks.replay_case import EIGHT, LEAST, MOST, Case, Found, Step
from benchmarks.replay_memory import growth, memory_against_peer, planner_error, resident_growth
from benchmarks.report import Figures, run
from benchmarks.timing import Measured, measured

FULL = Case()
QUICK = Case(rounds=2, long_prompt=None, processes=1)


def main(argv: Sequence[str]) -> int:
    """Command line; returns the exit code."""
    pin_to_one_core()
    return run("branch_replay", (__doc__ or "").splitlines()[0], measure, argv)


def measure(quick: bool) -> Figures:
    """All figures."""
    return measure_case(QUICK if quick else FULL)


def measure_case(case: Case) -> Figures:
    """All figures of one case, each with its spread; starts processes."""
    found = {
        **speed(case),
        **speed_at_long_prompt(case),
        **growth(case),
        **resident_growth(case),
        **memory_against_peer(case),
        **planner_error(case),
        **gradient_errors(case),
    }
    figures: dict[str, float | None] = {}
    for key, value in found.items():
        figures[key] = None if value is None else value.median
        figures[f"{key}_spread"] = None if value is None else value.spread
    return figures


def speed(case: Case) -> Found:
    """All times at the usual prompt."""
    model = case.model()
    groups = {g: case.group(model, case.prompt, g) for g in (EIGHT, MOST)}
    at_once = fastest_naive(model, groups[EIGHT])
    contestants: dict[str, Step] = {"naive": partial(naive_step, model, groups[EIGHT], at_once)}
    for g, group in groups.items():
        for mode in ("exact", "response_only"):
            contestants[f"{mode}_g{g}"] = case.replay(model, group, mode)
        for way in (ADAPTER, DIRECT):
            contestants[f"{way}_g{g}"] = partial(prefix_grouper_step, model, group, way)
    for name, step in contestants.items():
        if name != "naive":  # which has just run
            step()
    times = rounds(model, contestants, case.rounds)
    found: Found = {}
    for mode in ("exact", "response_only"):
        fractions = []
        for g in groups:
            naive = [seconds * g / EIGHT for seconds in times["naive"]]
            gain = best_ratio(naive, times[f"{mode}_g{g}"])
            found[f"{mode}_speedup_g{g}"] = gain
            limit = flop_limit(model, mode, case.prompt, case.response, g)
            print(f"{mode}, {g} branches: limit by FLOPs {limit:.2f}", flush=True)
            fractions.append(Measured(gain.median / limit, gain.spread / limit))
        found[f"{mode}_limit_fraction"] = min(fractions, key=lambda fraction: fraction.median)
    for g in groups:
        theirs = min((times[f"{way}_g{g}"] for way in (ADAPTER, DIRECT)), key=min)
        found[f"time_vs_prefix_grouper_g{g}"] = best_ratio(times[f"exact_g{g}"], theirs)
    return found


def speed_at_long_prompt(case: Case) -> Found:
    """The speed-up where attention is all; minutes, for naive is."""
    key = f"exact_speedup_p16k_g{EIGHT}"
    if case.long_prompt is None:
        return {key: None}
    model = case.model()
    group = case.group(model, case.long_prompt, EIGHT)
    contestants: dict[str, Step] = {
        "naive": partial(naive_step, model, group, fastest_naive(model, group.take(4))),
        "exact": case.replay(model, group, "exact"),
    }
    times = rounds(model, contestants, case.long_rounds)
    return {key: best_ratio(times["naive"], times["exact"])}


def fastest_naive(model: Any, group: Group) -> int:
    """How many full sequences at a time are fastest."""
    sizes = (1, 2, 4)
    times = [timed(model, partial(naive_step, model, group, n)) for n in sizes]
    for n, seconds in zip(sizes, times, strict=True):
        each = seconds / len(group.responses)
        print(f"naive, prompt of {len(group.prompt)}, {n} at a time: {each:.3g} s each", flush=True)
    return min(zip(times, sizes, strict=True))[1]


def rounds(model: Any, contestants: dict[str, Step], count: int) -> dict[str, list[float]]:
    """Seconds of each contestant by round; they take turns."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(count):
        for name, step in contestants.items():
            times[name].append(timed(model, step))
    for name, seconds in times.items():
        print(f"{name}: best of {count} rounds {min(seconds):.3g} s", flush=True)
    return times


def timed(model: Any, step: Step) -> float:
    """Seconds of one step that finds no gradients, as the core's clock of this process counts them:
    those of the wall, less what other processes had of the core."""
    model.zero_grad()
    gc.collect()
    begun = time.process_time()
    step()
    return time.process_time() - begun


def best_ratio(above: Sequence[float], below: Sequence[float]) -> Measured:
    """Of the best rounds, for other work on the machine only adds; spread over pairs of rounds."""
    pairs = measured([a / b for a, b in zip(above, below, strict=True)])
    return Measured(min(above) / min(below), pairs.spread)


def flop_limit(model: Any, mode: str, prompt: int, response: int, branches: int) -> float:
    """The speed-up over naive at equal FLOP/s."""
    shape, responses = describe(Trunk(model)), [response] * branches
    exact = mode == "exact"
    ours = replay_flops(
        shape,
        prompt,
        responses,
        open_tokens=prompt if exact else 0,
        passes=1,
        keep_attention=exact,
    )
    return naive_flops(shape, prompt, responses) / ours


def gradient_errors(case: Case) -> Found:
    """Relative L2 over all parameters against full sequences in float64, their casts included."""
    single = case.model()
    half = case.model()
    for parameter in half.parameters():  # not its rotary frequencies, which stay in float32
        parameter.data = parameter.data.bfloat16()
    group = case.group(single, case.error_prompt, 2 * LEAST)
    double = deepcopy(single).double()
    with true_float64(double):
        truth = gradient(double, partial(naive_step, double, group))
        errors = [relative_l2(gradient(double, case.replay(double, group, "exact")), truth)]
    errors.append(relative_l2(gradient(single, case.replay(single, group, "exact")), truth))

    double = deepcopy(half).double()
    with true_float64(double):
        truth = gradient(double, partial(naive_step, double, group))
    ours = relative_l2(gradient(half, case.replay(half, group, "exact")), truth)
    theirs = relative_l2(gradient(half, partial(naive_step, half, group)), truth)
    print(f"bfloat16: error {ours:.3g}, of full sequences {theirs:.3g}", flush=True)
    errors.append(ours / theirs)
    keys = ("grad_error_fp64", "grad_error_fp32", "grad_error_bf16_vs_naive")
    return {key: Measured(error, 0.0) for key, error in zip(keys, errors, strict=True)}


def gradient(model: Any, step: Step) -> list[torch.Tensor]:
    model.zero_grad()
    step()
    return take_gradients(model)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
