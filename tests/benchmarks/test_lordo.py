"""The benchmark of LoRDO at toy size: its keys, its bytes by formula, and what it keeps."""

import json
import math
from dataclasses import replace

import pytest

from algorithms.common.model import parameter_count
from algorithms.lordo.selection import low_rank_names
from benchmarks import lordo
from benchmarks.lordo_study.arms import ARMS, FOLLOWS, GRID, OUR_EVERY, PAPER_EVERY, RATES
from benchmarks.lordo_study.search import Study, needed
from benchmarks.lordo_study.setting import Setting
from benchmarks.lordo_study.training import new_model, train
from benchmarks.study import queue
from tests import toys
from tests.benchmarks.studies import Inline, write_tokens

EVERY_TOY, STEPS, WORKERS, RANK = 2, 6, 2, 3
SETTING = Setting(model=toys.MODEL, workers=WORKERS, sequences=2, length=8, steps=STEPS, held_out=4)


def toy(arm):
    """The same arm with rank 3 and a sync every two steps."""
    if arm.low_rank is not None:
        arm = replace(arm, low_rank=replace(arm.low_rank, rank=RANK))
    if arm.sync is not None:
        periods = {
            name: getattr(arm.sync, name) * EVERY_TOY // arm.sync.every
            for name in ("every", "momentum_every", "variance_every")
        }
        arm = replace(arm, sync=replace(arm.sync, **periods))
    return arm


def study(names=tuple(ARMS), **changes):
    arms = {name: toy(ARMS[name]) for name in names}
    given = {"setting": SETTING, "arms": arms, "rates": RATES, "follows": FOLLOWS}
    return Study(**(given | {"seeds": 1, "search": False} | changes))


@pytest.fixture
def tokens(tmp_path):
    return write_tokens(tmp_path)


@pytest.fixture
def inline(monkeypatch):
    monkeypatch.setattr(queue, "ProcessPoolExecutor", Inline)


def sizes():
    """D, F, W, P: dense entries, matrix entries, and entries of the two thin factors."""
    model = new_model(SETTING, 0)
    chosen = set(low_rank_names(model))
    shapes = [p.shape for name, p in model.named_parameters() if name in chosen]
    full = sum(math.prod(shape) for shape in shapes)
    return (
        parameter_count(model) - full,
        full,
        sum(RANK * max(shape) for shape in shapes),
        sum(RANK * min(shape) for shape in shapes),
    )


def padded(numel):
    """Bytes of fp32 in M equal parts."""
    return 4 * -(-numel // WORKERS) * WORKERS


def blocks(numel, size):
    """`size` bytes for 64 values, M equal parts of whole blocks."""
    return size * -(-numel // (64 * WORKERS)) * WORKERS


def test_all_keys_are_there_and_bytes_are_those_of_the_formulas(tokens, tmp_path, inline, capsys):
    figures = lordo.measure_study(study(), tokens, tmp_path, cycles=1)
    assert all(
        isinstance(value, int | float)
        for name, value in figures.items()
        if not name.endswith("_spread")
    )
    for prefix in ("", "paper."):
        for key in (
            "bytes_vs_ddp",
            "bytes_vs_lowrank_ddp",
            "state_vs_adam",
            "outer_state_bytes",
            "x_sync_bytes",
            "gap_vs_lowrank_ddp_pct",
            "gap_vs_lowrank_ddp_ef_pct",
            "gap_vs_des_loc_pct",
            "gap_vs_ddp_pct",
            "wire_bytes_vs_ddp",
            "wire_gap_pct",
            "step_overhead_pct",
        ):
            assert {prefix + key, f"{prefix}{key}_spread"} <= set(figures)
    for key in ("gain_vs_local", "stagnation", "frozen_vs_refreshed"):
        assert f"paper.{key}_pct" in figures and f"{key}_pct" not in figures
    assert figures["paper.subspace_overlap_no_qhm"] == pytest.approx(1, abs=1e-4)

    dense, full, wide, tall = sizes()
    weights, rounds = dense + full, STEPS // EVERY_TOY
    projection = padded(full) + 8  # and a hash of what came of it
    refreshed = projection + 8 * rounds
    expected = {
        "ddp": 4 * weights * STEPS,
        "muon_ddp": 4 * weights * STEPS,
        "lowrank_ddp": 4 * (dense + wide + tall) * STEPS,
        "lowrank_ddp_ef": 4 * (dense + wide + tall) * STEPS,
        "local_adam": rounds * (padded(weights) + padded(2 * weights)),
        "diloco": rounds * padded(weights),
        "lordo_local": rounds * padded(weights),
        "lordo_ns": rounds * blocks(weights, 18) + blocks(full, 18) + 8,
        "lordo_ns_no_carry": rounds * blocks(weights, 34) + blocks(full, 34) + 8,
        "muloco": rounds * blocks(weights, 18),
        "muloco_in_grad": rounds * blocks(weights, 18),
        "lordo_ns_fp32": rounds * padded(weights) + projection,
    }
    for name, size in expected.items():
        assert figures[f"{name}.payload_bytes_per_step"] == pytest.approx(size / STEPS), name
    assert figures["bytes_vs_ddp"] == pytest.approx(expected["ddp"] / expected["lordo_ns"])
    # Moments: K_u = 3 K is due once in six steps, K_v = 6 K never.
    assert figures["lordo_global.payload_bytes_per_step"] * STEPS == pytest.approx(
        rounds * padded(weights) + padded(dense + wide) + refreshed
    )
    assert figures["x_sync_bytes"] == figures["paper.x_sync_bytes"] == 4 * weights
    assert figures["paper.outer_state_bytes"] == 0
    assert figures["paper.state_vs_adam"] == pytest.approx(8 * full / (4 * (2 * wide + tall)))
    assert figures["state_vs_adam"] == pytest.approx(8 * full / (2 * (wide + tall)))
    assert figures["carried_bytes"] == 4 * full and figures["paper.carried_bytes"] == 0
    assert figures["ddp.state_bytes"] == 8 * weights
    assert figures["muloco_in_grad.state_bytes"] == 8 * dense
    assert figures["muloco_in_grad.carried_bytes"] == 4 * full
    assert figures["lordo_ns.lr"] == GRID[RATES["lordo_ns"]] == figures["lordo_ns_fp32.lr"]
    assert figures["low_rank_parameters"] == full
    assert (figures["every"], figures["paper.every"]) == (OUR_EVERY, PAPER_EVERY)
    lines = [line for line in capsys.readouterr().out.splitlines() if "seed 0" in line]
    assert len(lines) == len(ARMS)


def test_finished_runs_are_kept_and_found_again(tokens, tmp_path, inline, monkeypatch):
    small = study(("ddp", "muloco"), seeds=2)
    results = queue.Results(tmp_path, train)
    queue.run_jobs(lambda: needed(small, results.find), tokens, results)
    kept = sorted(tmp_path.glob("*.json"))
    assert len(kept) == 4
    told = json.loads(kept[0].read_text())
    assert told["job"]["setting"]["steps"] == STEPS and told["test_perplexity"] > 1

    again = queue.Results(tmp_path, train)
    monkeypatch.setattr(again, "train", pytest.fail)
    queue.run_jobs(lambda: needed(small, again.find), tokens, again)
    assert [again.find(job) for job in needed(small, again.find)] == [
        {"job": job.to_dict(), **results.find(job)} for job in needed(small, results.find)
    ]

    kept[0].unlink()
    asked = []
    again = queue.Results(tmp_path, train)
    monkeypatch.setattr(again, "train", lambda job, tokens: asked.append(job) or told)
    queue.run_jobs(lambda: needed(small, again.find), tokens, again)
    assert len(asked) == 1 and asked[0].to_dict() == told["job"]


def test_a_run_that_diverges_has_no_perplexity(tokens):
    hot = study(("ddp",), rates={"ddp": 4})
    job = needed(hot, lambda _: None)[0]
    job = replace(job, arm=replace(job.arm, optimizer=replace(job.arm.optimizer, lr=1e30)))
    result = train(job, tokens)
    assert result["validation_perplexity"] is None and result["test_perplexity"] is None


@pytest.mark.slow
def test_two_processes_find_what_one_finds(tokens, tmp_path):
    small = study(("ddp", "lordo_ns"), seeds=2)
    results = queue.Results(tmp_path, train)
    queue.run_jobs(lambda: needed(small, results.find), tokens, results)
    for job in needed(small, results.find):
        assert train(job, tokens)["test_perplexity"] == results.find(job)["test_perplexity"]


def test_the_paper_s_period_is_the_first_with_both_ratios():
    """At 1,280 steps, the first gradient included."""
    model = new_model(Setting(), 0)
    chosen = set(low_rank_names(model))
    shapes = [p.shape for name, p in model.named_parameters() if name in chosen]
    full = sum(math.prod(shape) for shape in shapes)
    weights = parameter_count(model)
    assert (weights, full) == (120_640, 98_304)
    thin = weights - full + sum(8 * max(shape) for shape in shapes)
    baseline = thin + sum(8 * min(shape) for shape in shapes)

    def ratios(every):
        sent = weights / every + thin / every / 3 + thin / every / 6 + full / 1280
        return weights / sent, baseline / sent

    reached = [k for k in range(8, 65, 8) if ratios(k)[0] >= 25 and ratios(k)[1] >= 10]
    assert reached[0] == PAPER_EVERY
