"""Rounds: where they begin and end, what they send, and what they refuse."""

from __future__ import annotations

import io
import logging
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from algorithms.common.codec import CODECS
from algorithms.common.errors import FieldError, InputError, NonFiniteError
from algorithms.lordo.config import LowRankConfig, SyncConfig
from algorithms.lordo.optimizer import LoRDO
from algorithms.lordo.sync import Sync
from algorithms.lordo.wire import Reduced
from tests.local_workers import (
    DENSE,
    NESTEROV,
    Stacked,
    assert_equal_weights,
    low_rank,
    sync_config,
    weights,
    worker,
)

# Resume


@pytest.mark.parametrize("stop", [4, 6, 7])
@pytest.mark.parametrize(
    "changes",
    [{}, {"wire": "int4", "residual": "buffer", "delay": 2, "outer_state": "int8", **NESTEROV}],
)
def test_resumes_bit_for_bit_at_any_step(stop: int, changes: dict[str, Any]) -> None:
    """In the middle of a round, right after a sync, and with a round in flight."""
    config = sync_config(**changes)
    codec = CODECS.get(config.wire)
    whole = Stacked(2, config, low_rank(), dtype=torch.float32, codec=codec)
    for step in range(1, stop + 1):
        whole.step(step)
    file = io.BytesIO()
    torch.save([each.state() for each in whole.workers], file)
    file.seek(0)
    resumed = Stacked(2, config, low_rank(), dtype=torch.float32, codec=codec)
    for each, state in zip(resumed.workers, torch.load(file, weights_only=True), strict=True):
        each.load(state)
    resumed.owners = [each.clone() for each in whole.owners]
    resumed.flight = whole.flight  # who averages keeps what came of it
    for step in range(stop + 1, 15):
        whole.step(step)
        resumed.step(step)
    for own, other in zip(resumed.workers, whole.workers, strict=True):
        for name, parameter in own.named.items():
            assert torch.equal(parameter, other.named[name])
        assert torch.equal(own.sync.x_sync, other.sync.x_sync)


def test_refuses_the_state_of_another_model() -> None:
    state = worker(0, sync_config(), low_rank(), world_size=1).sync.state_dict()
    lone = Parameter(torch.zeros(3))
    sync = Sync([("lone", lone)], torch.optim.AdamW([lone]), sync_config(), world_size=1)
    with pytest.raises(InputError, match=r"^x_sync: holds \d+ values, the model 3$"):
        sync.load_state_dict(state)


# One worker, odd periods


def alone(sync: SyncConfig, method: LowRankConfig | None = None) -> Stacked:
    return Stacked(1, sync, method, dtype=torch.float32)


def test_one_worker_that_averages_keeps_its_weights_bit_for_bit() -> None:
    synced = alone(sync_config(every=2, momentum_every=2, variance_every=4))
    plain = worker(0, sync_config(every=99), None, world_size=1, dtype=torch.float32)
    for step in range(1, 8):
        synced.step(step)
        plain.train(step)
        plain.optimizer.step()
        for name, parameter in plain.named.items():
            assert torch.equal(synced.workers[0].named[name], parameter)


def test_one_delayed_worker_keeps_its_weights_bit_for_bit() -> None:
    synced, plain = alone(sync_config(every=3, momentum_every=0, variance_every=0, delay=2)), None
    plain = alone(sync_config(every=99, momentum_every=0, variance_every=0))
    for step in range(1, 9):
        synced.step(step)
        plain.step(step)
        assert_equal_weights([synced.workers[0], plain.workers[0]])


@pytest.mark.parametrize("lr", [1.0, 1e-30])
def test_outer_rate_of_one_takes_the_step_and_of_nothing_undoes_it(lr: float) -> None:
    workers = alone(SyncConfig(every=2, outer="nesterov", outer_lr=lr))
    start = workers.workers[0].sync.x_sync.clone()
    workers.step(1)
    workers.workers[0].train(2)
    workers.workers[0].optimizer.step()
    own = torch.cat([p.detach().flatten() for p in workers.workers[0].named.values()])
    sync = workers.workers[0].sync
    workers.apply(2, workers.exchange([sync.contributions(2)]))
    expected = start + (own - start) if lr == 1 else start
    assert torch.equal(sync.x_sync, expected)
    assert_equal_weights([workers.workers[0], workers.workers[0]])


def test_a_period_longer_than_the_run_meets_at_the_flush_only() -> None:
    workers = Stacked(2, sync_config(every=100, momentum_every=0, variance_every=0), low_rank())
    for step in range(1, 6):
        workers.step(step)
    with pytest.raises(AssertionError):
        assert_equal_weights(workers.workers)
    workers.flush(5)
    assert_equal_weights(workers.workers)


def test_flush_keeps_phase_and_projections_and_is_idle_where_nothing_is_open() -> None:
    workers = Stacked(2, sync_config(), low_rank())
    for step in (1, 2, 3):
        workers.step(step)
    syncs = [each.sync for each in workers.workers]
    assert [sync.flush(3) for sync in syncs] == [{}, {}]
    workers.step(4)
    basis = workers.workers[0].optimizer.state[workers.workers[0].named["0.mlp.up"]]["projection"]
    before = basis.clone()
    workers.flush(4)
    assert_equal_weights(workers.workers)
    assert torch.equal(basis, before)
    assert [sync.flush(4) for sync in syncs] == [{}, {}]
    assert [sync.contributions(5) for sync in syncs] == [{}, {}]
    assert set(syncs[0].contributions(6)) == {"delta", "moments"}


def test_synced_shows_the_common_weights_and_gives_the_own_back() -> None:
    config = sync_config(wire="int4", residual="weights")
    workers = Stacked(2, config, low_rank(), codec=CODECS["int4"])
    for step in range(1, 5):
        workers.step(step)
    workers.flush(4)
    own = [p.detach().clone() for p in workers.workers[0].named.values()]
    with workers.workers[0].sync.synced(), workers.workers[1].sync.synced():
        assert_equal_weights(workers.workers)
        flat = torch.cat([p.detach().flatten() for p in workers.workers[0].named.values()])
        assert torch.equal(flat, workers.workers[0].sync.x_sync)
    for parameter, before in zip(workers.workers[0].named.values(), own, strict=True):
        assert torch.equal(parameter, before)
    with pytest.raises(AssertionError):
        assert_equal_weights(workers.workers)


def test_a_round_must_be_applied_before_the_next() -> None:
    each = worker(0, sync_config(every=1), low_rank(), world_size=2)
    each.train(1)
    each.optimizer.step()
    each.sync.contributions(1)
    with pytest.raises(RuntimeError, match="round of step 1 has not been applied"):
        each.sync.contributions(2)


@pytest.mark.parametrize("name", ["momentum_every", "variance_every"])
def test_moments_of_a_delayed_sync_travel_with_weights(name: str) -> None:
    with pytest.raises(FieldError, match=f"{name}: with a delay it must be a multiple of every"):
        SyncConfig(**{"every": 4, "delay": 1, name: 6})


# Buffers


@pytest.mark.parametrize("copies", [1, 20])
def test_a_sync_sends_as_many_buffers_for_many_weights_as_for_few(copies: int) -> None:
    named = [(f"{i}.mlp", Parameter(torch.randn(4, 6))) for i in range(copies)]
    named += [(f"{i}.norm", Parameter(torch.randn(4))) for i in range(copies)]
    matrices = [p for _, p in named[:copies]]
    optimizer = LoRDO([{"params": matrices, "rank": 2}, {"params": [p for _, p in named[copies:]]}])
    config = SyncConfig(every=1, momentum_every=1, variance_every=1)
    sync = Sync(named, optimizer, config, LowRankConfig(rank=2), world_size=4)
    for _, parameter in named:
        parameter.grad = torch.randn_like(parameter)
    first = sync.first_gradient()
    assert {tag: flat.numel() for tag, flat in first.items()} == {"projection": copies * 24}
    optimizer.step()
    given = sync.contributions(1)
    moments = 2 * copies * (2 * 6 + 4)
    assert {tag: flat.numel() for tag, flat in given.items()} == {
        "delta": copies * 28,
        "moments": moments,
    }


def test_moments_of_local_projections_are_never_sent() -> None:
    each = worker(0, sync_config(every=1), low_rank(projection="local"), world_size=2)
    each.train(6)
    assert each.sync.first_gradient() == {}
    each.optimizer.step()
    given = each.sync.contributions(6)
    assert given["moments"].numel() == sum(Tensor.numel(each.named[name]) for name in DENSE)


# Bad pseudo-gradients


def reduced(flat: Tensor) -> Reduced:
    return Reduced(flat, flat)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("tag", ["delta", "moments"])
def test_a_mean_that_is_not_finite_names_the_weight_and_changes_nothing(
    tag: str, value: float
) -> None:
    each = worker(0, sync_config(every=6), low_rank(), world_size=2)
    each.train(6)
    each.optimizer.step()
    given = each.sync.contributions(6)
    spoiled = {key: flat.clone() for key, flat in given.items()}
    spoiled[tag][100] = value
    before = each.state()
    kept = [value.clone() for value in before["weights"].values()] + [each.sync.x_sync.clone()]
    what = {"delta": "pseudo-gradient of 0.attn.out", "moments": "average moment of 0.mlp.down"}
    with pytest.raises(NonFiniteError, match=rf"^step 6: {what[tag]} is not finite$"):
        each.sync.apply(6, {key: reduced(flat) for key, flat in spoiled.items()})
    now = [*each.state()["weights"].values(), each.sync.x_sync]
    assert all(torch.equal(a, b) for a, b in zip(now, kept, strict=True))


def test_finite_means_whose_sum_overflows_are_fine() -> None:
    parameter = Parameter(torch.zeros(4))
    sync = Sync(
        [("p", parameter)], torch.optim.AdamW([parameter]), SyncConfig(every=1), world_size=2
    )
    with torch.no_grad():
        parameter.fill_(3e38)
    given = sync.contributions(1)
    sync.apply(1, {"delta": reduced(given["delta"])})
    assert torch.equal(sync.x_sync, torch.full((4,), 3e38))


@pytest.mark.parametrize("size", [0.0, 1e-42])
def test_a_pseudo_gradient_without_direction_leaves_its_projection(
    size: float, caplog: pytest.LogCaptureFixture
) -> None:
    each = worker(0, sync_config(every=1), low_rank(), world_size=2, dtype=torch.float32)
    each.train(1)
    each.optimizer.step()
    given = each.sync.contributions(1)
    mean = given["delta"].clone()
    mean[: 6 * 10] = size  # of 0.attn.in, the first weight
    states = [each.optimizer.state[each.named[n]] for n in ("0.attn.in", "0.attn.out")]
    before = [[value.clone() for value in state.values()] for state in states]
    with caplog.at_level(logging.WARNING):
        each.sync.apply(1, {"delta": reduced(mean)})
    kept, moved = [
        [torch.equal(a, b) for a, b in zip(old, state.values(), strict=True)]
        for old, state in zip(before, states, strict=True)
    ]
    assert all(kept) and not all(moved)
    lines = [record.message for record in caplog.records if "projection" in record.message]
    assert lines == [
        "step 1: the projection of 0.attn.in is kept, what it would come from is zero or not finite"
    ]


def test_an_optimizer_without_projections_is_refused() -> None:
    parameter = Parameter(torch.zeros(4, 4))
    with pytest.raises(InputError, match="^low_rank: the optimizer's state holds no projection"):
        Sync(
            [("p", parameter)],
            torch.optim.AdamW([parameter]),
            sync_config(),
            low_rank(),
            world_size=1,
        )


def test_frozen_parameters_take_no_part() -> None:
    named = {"a": Parameter(torch.ones(2)), "b": Parameter(torch.ones(3), requires_grad=False)}
    optimizer = torch.optim.AdamW([named["a"]])
    sync = Sync(named.items(), optimizer, SyncConfig(every=1), world_size=2)
    assert sync.contributions(1)["delta"].numel() == 2


def test_an_int8_outer_momentum_takes_a_quarter_and_leads_nearly_the_same_way() -> None:
    ends = []
    for kind in ("fp32", "int8"):
        config = sync_config(outer_state=kind, **NESTEROV)
        workers = Stacked(2, config, low_rank(), dtype=torch.float32)
        for step in range(1, 13):
            workers.step(step)
        assert_equal_weights(workers.workers)
        momenta = [each.sync.outer_momentum for each in workers.workers]
        assert momenta[0] is not None and momenta[1] is not None
        assert torch.equal(momenta[0], momenta[1])
        ends.append((workers.workers[0].sync.x_sync, momenta[0]))
    (plain, kept), (coded, code) = ends
    assert code.dtype == torch.uint8 and code.nbytes == -(-kept.numel() // 64) * 66
    start = torch.cat([weight.flatten() for weight in weights(torch.float32).values()])
    assert 0 < (coded - plain).norm() < 0.05 * (plain - start).norm()
