"""Where projections come from, and what becomes of the space that they span."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from algorithms.lordo.config import LowRankConfig, SyncConfig
from algorithms.lordo.projection import oriented, overlap
from algorithms.lordo.wire import Reduced
from tests.local_workers import LOW_RANK, RANK, Stacked, Worker, gradients, worker

EVERY = SyncConfig(every=2)


def basis(each: Worker, name: str) -> Tensor:
    found: Tensor = each.optimizer.state[each.named[name]]["projection"]
    return found.clone()


def run(
    method: LowRankConfig, steps: int, sync: SyncConfig = EVERY, decay: float = 0.0
) -> tuple[Stacked, list[dict[str, float]]]:
    workers = Stacked(2, sync, method)
    overlaps = []
    for each in workers.workers:
        for group in each.optimizer.param_groups:
            group["weight_decay"] = decay
    for step in range(1, steps + 1):
        workers.step(step)
        bases = workers.workers[0].sync.bases
        assert bases is not None
        if step % sync.every == 0:
            overlaps.append(dict(bases.overlaps))
    return workers, overlaps


# Stagnation


@pytest.mark.parametrize("compute", ["svd", "power"])
@pytest.mark.parametrize(
    ("qhm", "stuck"), [("none", True), ("low_rank", True), ("full_rank", False)]
)
def test_without_the_full_rank_term_the_space_never_changes(
    qhm: Any, stuck: bool, compute: Any
) -> None:
    """The paper's stagnation: overlap 1 at every sync, and all progress has rank r."""
    method = LowRankConfig(rank=RANK, qhm=qhm, omega=0.5, compute=compute)
    workers, overlaps = run(method, 12)
    start = worker(0, EVERY, method, world_size=2)
    for name in LOW_RANK:
        if name == "1.mlp.gate":
            continue  # at rank m there is one space only
        found = [each[name] for each in overlaps]
        assert (min(found) > 1 - 1e-9) == stuck, found
        moved = workers.workers[0].named[name] - start.named[name]
        ranks = torch.linalg.matrix_rank(moved, rtol=1e-9)
        assert (ranks.max() == RANK) == stuck


def test_error_feedback_does_not_cure_it() -> None:
    _, overlaps = run(LowRankConfig(rank=RANK, qhm="none", error_feedback=True), 8)
    assert min(min(each.values()) for each in overlaps) > 1 - 1e-9


def test_a_projection_of_the_same_space_is_not_taken() -> None:
    workers, _ = run(LowRankConfig(rank=RANK, qhm="none"), 2)
    before = [basis(workers.workers[0], name) for name in LOW_RANK]
    for step in (3, 4, 5, 6):
        workers.step(step)
    for name, old in zip(LOW_RANK, before, strict=True):
        assert torch.equal(basis(workers.workers[0], name), old)


# The first projections


@pytest.mark.parametrize("kind", ["global", "frozen"])
def test_the_first_ones_are_the_leading_directions_of_the_mean_gradient(kind: Any) -> None:
    workers, _ = run(LowRankConfig(rank=RANK, projection=kind), 1)
    start = worker(0, EVERY, None, world_size=2).named
    both = [gradients(start, index, 1) for index in (0, 1)]
    for name in LOW_RANK:
        mean = oriented((both[0][name] + both[1][name]) / 2)
        rank = min(RANK, mean.shape[-2])
        expected = torch.linalg.svd(mean).U[..., :rank].reshape(-1, mean.shape[-2], rank)
        found = basis(workers.workers[1], name).reshape(expected.shape)
        assert overlap(found, expected) == pytest.approx([1] * len(expected))


def test_a_first_gradient_of_zero_leaves_the_random_one(caplog: pytest.LogCaptureFixture) -> None:
    each = worker(0, EVERY, LowRankConfig(rank=RANK), world_size=2)
    each.train(1)
    before = {name: basis(each, name) for name in LOW_RANK}
    each.named["0.attn.in"].grad = None
    given = each.sync.first_gradient()["projection"]
    with caplog.at_level(logging.WARNING):
        each.sync.apply(1, {"projection": Reduced(given, given)})
    assert torch.equal(basis(each, "0.attn.in"), before["0.attn.in"])
    assert not torch.equal(basis(each, "0.attn.out"), before["0.attn.out"])
    assert "the projection of 0.attn.in is kept" in caplog.text
    assert each.sync.first_gradient() == {}


@pytest.mark.parametrize("kind", ["global", "frozen", "random"])
def test_before_any_gradient_all_workers_share_random_ones(kind: Any) -> None:
    first, second = (
        worker(index, EVERY, LowRankConfig(rank=RANK, projection=kind), world_size=2)
        for index in (0, 1)
    )
    for name in LOW_RANK:
        assert torch.equal(basis(first, name), basis(second, name))
    assert not torch.equal(basis(first, "0.attn.in"), basis(first, "0.attn.out"))


# Later ones


def test_frozen_ones_stay_and_random_ones_change_at_every_sync() -> None:
    for kind in ("frozen", "random"):
        workers = Stacked(2, EVERY, LowRankConfig(rank=RANK, projection=kind))  # type: ignore[arg-type]
        seen = []
        for step in range(1, 7):
            workers.step(step)
            seen.append(basis(workers.workers[0], "0.mlp.up"))
            assert torch.equal(seen[-1], basis(workers.workers[1], "0.mlp.up"))
        changed = [not torch.equal(a, b) for a, b in zip(seen, seen[1:], strict=False)]
        assert changed == ([False] * 5 if kind == "frozen" else [True, False, True, False, True])


def test_workers_take_what_they_agreed_on() -> None:
    """Another's projection, and moments that turn into that one."""
    method = LowRankConfig(rank=RANK)

    def negative(flat: Tensor) -> Tensor:
        return -flat

    honest = worker(0, EVERY, method, world_size=2)
    swayed = worker(0, EVERY, method, world_size=2, agree=negative)
    for each in (honest, swayed):
        each.train(1)
        given = each.sync.first_gradient()["projection"]
        each.sync.apply(1, {"projection": Reduced(given, given)})
        each.optimizer.step()
    for name in LOW_RANK:
        assert torch.equal(basis(swayed, name), -basis(honest, name))
        assert torch.allclose(swayed.named[name], honest.named[name], atol=1e-13, rtol=0)
    given = swayed.sync.contributions(2)
    swayed.sync.apply(2, {"delta": Reduced(given["delta"], given["delta"])})
    state = swayed.optimizer.state[swayed.named["0.attn.in"]]
    own = honest.optimizer.state[honest.named["0.attn.in"]]
    turn = state["projection"].T @ own["projection"]
    torch.testing.assert_close(state["exp_avg"], turn @ own["exp_avg"], atol=1e-12, rtol=0)
