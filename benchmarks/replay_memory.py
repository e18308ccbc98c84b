"""Memory of branch replay: by the number of branches, against the peer, and as planned."""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from algorithms.branch_replay.measure import describe
from algorithms.branch_replay.planner import replay_bytes
from algorithms.branch_replay.trunk import Trunk
from benchmarks.memory import (
    allocated_peak,
    in_fresh_process,
    reset_resident_peak,
    resident,
    resident_peak,
)
from benchmarks.prefix_grouper import ADAPTER, DIRECT, prefix_grouper_step
from benchmarks.replay_case import EIGHT, LEAST, MOST, Case, Found, Step, replay_step
from benchmarks.timing import Measured, measured


def growth(case: Case) -> Found:
    """Memory of exact mode by the number of branches at fixed branches per pass."""
    model = case.model()
    peaks = {}
    for g in (LEAST, EIGHT, MOST):
        step = case.replay(model, case.group(model, case.prompt, g), "exact", LEAST)
        peaks[g] = peak_with_gradients(model, step)
        print(f"exact, {g} branches, {LEAST} a pass: {peaks[g] / 1e6:.1f} MB", flush=True)
    return {
        f"peak_growth_g{LEAST}_g{g}_pct": Measured(100 * (peaks[g] / peaks[LEAST] - 1), 0.0)
        for g in (EIGHT, MOST)
    }


def peak_with_gradients(model: Any, step: Step) -> int:
    """Bytes that a step allocates besides weights and gradients."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return allocated_peak(step)


def resident_growth(case: Case) -> Found:
    """The same growth as the system sees it."""
    peaks: dict[int, list[int]] = {LEAST: [], MOST: []}
    for _ in range(case.processes):
        for g, seen in peaks.items():
            seen.append(in_fresh_process(resident_of_step, case, g))
    for g, seen in peaks.items():
        shown = ", ".join(f"{size / 1e6:.1f}" for size in seen)
        print(f"exact, {g} branches, {LEAST} a pass: resident {shown} MB", flush=True)
    pairs = zip(peaks[LEAST], peaks[MOST], strict=True)
    percent = measured([100 * (most / least - 1) for least, most in pairs])
    return {f"rss_growth_g{LEAST}_g{MOST}_pct": percent}


def resident_of_step(case: Case, branches: int) -> int:
    """Bytes that one step adds to this process, which has run a small one before."""
    model = case.model()
    warm_up = case.group(model, case.chunk // 8, LEAST)
    case.replay(model, warm_up, "exact", LEAST)()
    step = case.replay(model, case.group(model, case.prompt, branches), "exact", LEAST)
    gc.collect()
    before = resident()
    reset_resident_peak()
    step()
    return resident_peak() - before


def memory_against_peer(case: Case) -> Found:
    """Peak of exact mode over the lower one of the peer's two."""
    model = case.model()
    found: Found = {}
    for g in (EIGHT, MOST):
        group = case.group(model, case.prompt, g)
        ours = peak_with_gradients(model, case.replay(model, group, "exact"))
        theirs = {}
        for way in (ADAPTER, DIRECT):
            step = partial(prefix_grouper_step, model, group, way)
            theirs[way] = peak_with_gradients(model, step)
            print(f"{way}, {g} branches: {theirs[way] / 1e6:.1f} MB", flush=True)
        print(f"exact, {g} branches, {EIGHT} a pass: {ours / 1e6:.1f} MB", flush=True)
        found[f"memory_vs_prefix_grouper_g{g}"] = Measured(ours / min(theirs.values()), 0.0)
    return found


def planner_error(case: Case) -> Found:
    """Worst error of the planned peak of a step, over models and groups of several sizes."""
    worst = 0.0
    for width, layers, work, config in case.planned:
        sized = replace(case, width=width, layers=layers, response=work.response)
        model = sized.model()
        planned, _ = replay_bytes(describe(Trunk(model)), work, config)
        group = sized.group(model, work.prompt, work.group)
        taken = allocated_peak(replay_step(model, group, config))
        print(
            f"planned {planned / 1e6:.1f} MB, taken {taken / 1e6:.1f} MB: width {width}, {layers} "
            f"layers, {work}, {config.mode}, chunk {config.chunk}, "
            f"{config.branches_per_pass} a pass",
            flush=True,
        )
        worst = max(worst, 100 * abs(planned / taken - 1))
    return {"planner_peak_error_pct": Measured(worst, 0.0)}
