"""The benchmark of asynchronous pipelines at toy size: its keys, its runs, and what it keeps."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from algorithms.common.loop import learning_rate
from benchmarks import async_pipeline
from benchmarks.async_study import diagnosis, step_cost
from benchmarks.async_study.arms import GRID, LONG, RATES, ROWS, at_rate
from benchmarks.async_study.training import Run, loss, new_model, train
from benchmarks.study import queue
from benchmarks.study.plan import Study, best_rate, needed
from tests.benchmarks.studies import Inline, write_tokens

UPDATES = 8


@pytest.fixture
def tokens(tmp_path):
    return write_tokens(tmp_path)


def toy(row):
    """The same row with two sequences of eight tokens, and eight updates; long runs have twelve."""
    updates = UPDATES if row.setting != LONG else 12
    setting = replace(
        row.setting, sequences=2, length=8, updates=updates, evaluate_every=2, held_out=4
    )
    return replace(row, setting=setting)


def study(names=tuple(ROWS), **changes):
    rows = {name: toy(ROWS[name]) for name in names}
    rates = {name: RATES.get(name, RATES[ROWS[name].follows or name]) for name in ROWS}
    return Study(
        **({"rows": rows, "rates": rates, "grid": GRID, "seeds": 1, "search": False} | changes)
    )


@pytest.fixture
def inline(monkeypatch):
    monkeypatch.setattr(queue, "ProcessPoolExecutor", Inline)
    monkeypatch.setattr(step_cost, "TURN", 1)


@pytest.mark.slow
def test_all_keys_are_there(tokens, tmp_path, inline, capsys):
    figures = async_pipeline.measure_study(study(), tokens, tmp_path, turns=2)
    for key in (
        "ratio_to_sync_adamw",
        "ratio_delay28_to_sync_adamw",
        "ratio_to_sync_same",
        "slowdown_adamw",
        "slowdown_own_long",
        "fewer_than_adamw_pct",
        "fewer_than_best_baseline_pct",
        "fewer_than_strengthened_baseline_pct",
        "delay28_fewer_than_best_pct",
        "paper_preset_ratio_to_sync_adamw",
        "no_stash_penalty_rotation",
        "no_stash_penalty_adamw",
        "stage_aware_gain_pct",
        "step_cost_ratio",
        "misalignment_ratio",
        "moe_ratio_to_sync_adamw",
    ):
        assert {key, f"{key}_spread"} <= set(figures)
    assert "device_hours_vs_best_async_pct" in figures
    assert figures["slowdown_adamw"] > 0 and figures["step_cost_ratio"] > 0
    assert figures["ours.lr"] == GRID[RATES["ours"]] == figures["ours_long.lr"]
    lines = [line for line in capsys.readouterr().out.splitlines() if "seed 0" in line]
    assert len(lines) == len(ROWS)


def test_misalignment_is_that_of_every_stage(tokens, tmp_path, inline, monkeypatch):
    monkeypatch.setattr(diagnosis, "DRAWS", 5)
    monkeypatch.setattr(diagnosis, "SEQUENCES", 2)
    row = toy(ROWS["ours"])
    row = replace(row, setting=replace(row.setting, updates=2))
    found = diagnosis.misaligned(row, RATES["ours"], 2, tokens, tmp_path)
    assert set(found) == set(diagnosis.DIAGNOSED)
    assert all(value > 0 for value in found.values())
    kept = [path.read_text() for path in tmp_path.glob("*.json")]
    assert len(kept) == 2
    assert all(len(json.loads(each)["rotated"]) == 8 for each in kept)


def test_one_stage_is_plain_training(tokens):
    """Fused AdamW of torch over the model's own groups, one clip over all parameters."""
    row = toy(ROWS["sync_adamw"])
    job = row.job("sync_adamw", 8, 0)
    run = Run(job.arm, job.setting, 0, tokens)
    model = new_model(job.setting, 0)
    settings = job.arm.optimizer.optimizer
    shared = {"betas": (0.9, 0.999), "eps": settings.eps, "lr": 0.0, "fused": True}
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    plain = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}],
        **shared,
    )
    for step in range(3):
        rows = run.batch(step)
        value = loss_of(model, rows)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in plain.param_groups:
            group["lr"] = learning_rate(step + 1, settings.lr, job.setting.training(0))
        plain.step()
        plain.zero_grad()
        run.update()
    for own, theirs in zip(run.model.parameters(), model.parameters(), strict=True):
        assert torch.allclose(own, theirs, rtol=0, atol=1e-6)


def loss_of(model, rows):
    scores = model(input_ids=rows[:, :-1]).logits
    return torch.nn.functional.cross_entropy(scores.flatten(0, 1), rows[:, 1:].flatten())


def test_arms_see_the_same_batches_and_hold_out_the_same_text(tokens):
    runs = [
        Run(toy(ROWS[name]).arm, toy(ROWS[name]).setting, 1, tokens) for name in ("ours", "adamw")
    ]
    for step in (0, 5):
        assert torch.equal(*(run.batch(step) for run in runs))
    validation, test = (runs[0].held_out(split) for split in ("validation", "test"))
    assert validation.shape == test.shape and not torch.equal(validation, test)
    found = loss(runs[0].model, test)
    assert found == pytest.approx(loss_of(runs[1].model, test).item(), rel=1e-5)


def test_the_curve_has_its_points_and_the_final_loss_is_their_end(tokens):
    job = toy(ROWS["ours_x4"]).job("ours_x4", 8, 0)
    result = train(job, tokens)
    assert [update for update, _ in result["curve"]] == [0, 2, 4, 6, 8]
    assert result["final"] == pytest.approx(np.mean([value for _, value in result["curve"][-3:]]))
    assert job.arm.delays == [28, 24, 20, 16, 12, 8, 4, 0]


def test_a_run_that_diverges_has_no_final_loss(tokens):
    row = toy(ROWS["adamw"])
    hot = replace(row, arm=at_rate(row.arm, 0))
    settings = replace(hot.arm.optimizer.optimizer, lr=1e30)
    hot = replace(hot.arm, optimizer=replace(hot.arm.optimizer, optimizer=settings))
    job = replace(row.job("adamw", 0, 0), arm=hot)
    assert train(job, tokens)["final"] is None
    assert "diverged" in job.line(train(job, tokens))


def test_rates_are_searched_on_validation_and_reported_on_test():
    """Losses are made up: least at rate 10, or 13 for ours."""
    names = ("sync_adamw", "ours", "ours_long")
    searched = study(names, search=True, seeds=2)
    results = {}

    def lookup(job):
        return results.get(job.key(""))

    ran = []
    while waiting := [job for job in needed(searched, lookup) if lookup(job) is None]:
        job = waiting[0]
        rate = GRID.index(job.arm.optimizer.optimizer.lr)
        best = 13 if job.arm.stages > 1 else 10
        results[job.key("")] = {"final": None if rate > 14 else abs(rate - best)}
        ran.append((job.name, rate, job.seed, job.split))
    assert [best_rate(searched, name, lookup) for name in names] == [10, 13, 13]
    assert {(name, seed, split) for name, _, seed, split in ran if split == "validation"} == {
        ("sync_adamw", 0, "validation"),
        ("ours", 0, "validation"),
    }
    reported = [(name, rate, seed) for name, rate, seed, split in ran if split == "test"]
    assert sorted(reported) == [
        *(("ours", 13, seed) for seed in (0, 1)),
        *(("ours_long", 13, seed) for seed in (0, 1)),
        *(("sync_adamw", 10, seed) for seed in (0, 1)),
    ]


def test_every_row_has_a_rate_or_follows_one_that_has():
    for name, row in ROWS.items():
        assert (name in RATES) == (row.follows is None)
        assert row.follows is None or row.follows in RATES
    assert set(async_pipeline.QUICK) <= set(RATES)
