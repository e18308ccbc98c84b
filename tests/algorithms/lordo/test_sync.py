"""Syncs of stacked workers against the slow reference, and real ranks against stacked workers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from algorithms.common.codec import CODECS
from algorithms.common.comm import Comm
from algorithms.common.errors import InputError
from algorithms.lordo.agreement import same_on_all_ranks
from algorithms.lordo.config import LowRankConfig, SyncConfig
from algorithms.lordo.optimizer import LoRDO
from algorithms.lordo.sync import Sync
from algorithms.lordo.wire import Pending, Reducer
from tests.distributed import RankPool
from tests.local_workers import (
    LOW_RANK,
    NESTEROV,
    Stacked,
    assert_equal_weights,
    low_rank,
    reference,
    step_reference,
    sync_config,
    worker,
)

# Against the reference, in float64

SYNCS = {
    "average": {},
    "nesterov": NESTEROV,
    "nesterov without momentum": {"outer": "nesterov", "outer_lr": 0.5},
    "other periods": {"momentum_every": 4, "variance_every": 1},
    "moments alone": {"every": 50, "momentum_every": 2, "variance_every": 3},
    "weights alone": {"momentum_every": 0, "variance_every": 0},
    "every step": {"every": 1, "momentum_every": 1, "variance_every": 1},
    "delayed": {"delay": 2, **NESTEROV},
    "int4": {"wire": "int4", **NESTEROV},
    "int4, residual in the weights": {"wire": "int4", "residual": "weights", **NESTEROV},
    "int4, residual in a buffer": {"wire": "int4", "residual": "buffer"},
    "int4, in the weights, delayed": {"wire": "int4", "residual": "weights", "delay": 1},
    "int4, in a buffer, delayed": {"wire": "int4", "residual": "buffer", "delay": 2},
}
METHODS: dict[str, dict[str, Any]] = {
    "global": {},
    "power": {"compute": "power"},
    "dct": {"compute": "dct"},
    "local": {"projection": "local"},
    "local with error feedback": {"projection": "local", "error_feedback": True},
    "frozen": {"projection": "frozen"},
    "random": {"projection": "random"},
    "no qhm": {"qhm": "none"},
    "low-rank qhm": {"qhm": "low_rank"},
    "scalar": {"scaling": "scalar"},
    "energy": {"scaling": "energy", "mu": 2.0},
    "lift": {"scaling": "lift", "mu": 3.0},
    "error feedback": {"error_feedback": True},
    "omega": {"omega": 0.9},
}
CASES = [(name, "global") for name in SYNCS] + [("average", name) for name in METHODS]
CASES += [("delayed", "random"), ("delayed", "local"), ("int4", "power")]
# Not int4 with dct: frequencies of a coded matrix can hold exactly as much, and rounding decides.


@pytest.mark.parametrize(("sync", "method"), CASES)
def test_stacked_workers_equal_the_reference(sync: str, method: str) -> None:
    config, options = sync_config(**SYNCS[sync]), low_rank(**METHODS[method])
    codec = CODECS.get(config.wire)
    workers = Stacked(3, config, options, codec=codec)
    twin = reference(3, config, options, codec)
    for step in range(1, 15):
        workers.step(step)
        step_reference(twin, step)
        assert largest_difference(workers, twin) < 1e-12
    bases = workers.workers[0].sync.bases
    assert bases is not None
    assert sorted(bases.overlaps.values()) == pytest.approx(sorted(twin_overlaps(twin)))
    workers.flush(14)
    twin.flush()
    assert largest_difference(workers, twin) < 1e-12
    if "weights" not in sync:
        assert_equal_weights(workers.workers)


def largest_difference(workers: Stacked, twin: Any) -> float:
    pairs = [
        (own, twin.workers[each.index].x[name])
        for each in workers.workers
        for name, own in each.named.items()
        if own.numel()
    ]
    pairs += [
        (value, torch.cat([each.flatten() for each in twin.x_sync.values()]))
        for value in [workers.workers[-1].sync.x_sync]
    ]
    return max((own.detach() - other).abs().max().item() for own, other in pairs)


def twin_overlaps(twin: Any) -> list[float]:
    """Of the last refresh: the mean over the three experts' matrices where they stand."""
    values = list(twin.overlaps)
    place = list(LOW_RANK).index("1.mlp.experts")
    return values and [*values[:place], sum(values[place : place + 3]) / 3, *values[place + 3 :]]


def final(sync: SyncConfig, method: LowRankConfig) -> Tensor:
    workers = Stacked(2, sync, method, codec=CODECS.get(sync.wire))
    for step in range(1, 8):
        workers.step(step)
    return torch.cat([p.detach().flatten() for p in workers.workers[0].named.values()])


def test_every_option_counts() -> None:
    """Otherwise the reference could agree because neither knows the option."""
    plain = final(sync_config(), low_rank())
    for changes in list(SYNCS.values())[1:]:
        assert (final(sync_config(**changes), low_rank()) - plain).abs().max() > 1e-4, changes
    for changes in list(METHODS.values())[1:]:
        assert (final(sync_config(), low_rank(**changes)) - plain).abs().max() > 1e-4, changes


def test_projections_move_and_moments_meet_in_the_test_above() -> None:
    workers = Stacked(3, sync_config(), low_rank())
    lowest = 1.0
    for step in range(1, 13):
        workers.step(step)
        bases = workers.workers[0].sync.bases
        assert bases is not None
        lowest = min([lowest, *bases.overlaps.values()])
        first = [each.optimizer.state[each.named["0.attn.in"]] for each in workers.workers]
        met = step % 6 == 0
        assert torch.equal(first[0]["exp_avg"], first[1]["exp_avg"]) == met
        assert torch.equal(first[0]["exp_avg_sq"], first[1]["exp_avg_sq"]) == (step == 12)
        assert torch.equal(first[0]["projection"], first[1]["projection"])
    assert lowest < 0.7


# AdamW inside: local Adam, DES-LOC, DiLoCo


@pytest.mark.parametrize("momentum_every", [0, 3, 6])
def test_any_optimizer_can_be_inside(momentum_every: int) -> None:
    config = sync_config(momentum_every=momentum_every, **NESTEROV)
    workers = Stacked(3, config, None)
    for step in range(1, 7):
        before = [each.sync.x_sync.clone() for each in workers.workers]
        own = [torch.cat([p.detach().flatten() for p in w.named.values()]) for w in workers.workers]
        workers.step(step)
    assert_equal_weights(workers.workers)
    assert not torch.equal(own[0], own[1])
    assert not torch.equal(before[0], workers.workers[0].sync.x_sync)
    states = [each.optimizer.state[each.named["emb"]]["exp_avg"] for each in workers.workers]
    assert torch.equal(states[0], states[1]) == (momentum_every > 0)


def test_a_worker_whose_weight_had_no_gradient_yet_still_meets_the_others() -> None:
    workers = Stacked(2, SyncConfig(every=2, momentum_every=2), None)
    for step in (1, 2):
        for each in workers.workers:
            each.train(step)
        workers.workers[1].named["emb"].grad = None
        for each in workers.workers:
            each.optimizer.step()
        workers.apply(step, workers.exchange([e.sync.contributions(step) for e in workers.workers]))
    assert_equal_weights(workers.workers)


# Real ranks


def on_a_rank(comm: Comm, sync: SyncConfig, method: LowRankConfig | None, steps: int) -> list[Any]:
    agree = same_on_all_ranks(comm, "projection")
    each = worker(
        comm.rank,
        sync,
        method,
        world_size=comm.world_size,
        dtype=torch.float32,
        agree=agree,
    )
    codec = CODECS.get(sync.wire)
    reducers = {
        "delta": Reducer(comm, "delta", codec),
        "moments": Reducer(comm, "moments", None),
        "projection": Reducer(comm, "projection", codec),
    }
    pending: dict[str, Pending] = {}
    since, seen = 0, []
    for step in range(1, steps + 1):
        each.train(step)
        first = each.sync.first_gradient()
        each.sync.apply(step, {tag: reducers[tag](flat) for tag, flat in first.items()})
        each.optimizer.step()
        if pending and step == since + sync.delay:
            each.sync.apply(step, {tag: sent.wait() for tag, sent in pending.items()})
            pending = {}
        given = each.sync.contributions(step)
        if given:
            pending, since = {tag: reducers[tag].start(flat) for tag, flat in given.items()}, step
        if pending and sync.delay == 0:
            each.sync.apply(step, {tag: sent.wait() for tag, sent in pending.items()})
            pending = {}
        seen.append([p.detach().clone() for p in each.named.values()])
    states = [
        value.clone()
        for p in each.named.values()
        for value in each.optimizer.state[p].values()
        if isinstance(value, Tensor)
    ]
    return [seen, states, comm.counters["delta"].calls, "moments" in comm.counters]


REAL: list[tuple[dict[str, Any], dict[str, Any] | None]] = [
    ({}, {}),
    ({"wire": "int4", "residual": "weights", **NESTEROV}, {"compute": "power"}),
    ({"delay": 2}, {"projection": "random", "error_feedback": True}),
    ({"momentum_every": 3}, {"projection": "local"}),
    (NESTEROV, None),
]


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("case", range(len(REAL)))
def test_real_ranks_equal_stacked_workers_bit_for_bit(
    ranks: RankPool, case: int, world_size: int
) -> None:
    """Float32, four rounds with two averages of moments; projections turn in the global cases."""
    changes, options = REAL[case]
    config = sync_config(**changes)
    method = None if options is None else low_rank(**options)
    results = ranks.run(on_a_rank, config, method, 14, world_size=world_size)
    workers = Stacked(
        world_size, config, method, dtype=torch.float32, codec=CODECS.get(config.wire)
    )
    for step in range(1, 15):
        workers.step(step)
        for each, (seen, *_) in zip(workers.workers, results, strict=True):
            for own, theirs in zip(each.named.values(), seen[step - 1], strict=True):
                assert torch.equal(own, theirs)
    for each, (_, states, calls, moments) in zip(workers.workers, results, strict=True):
        own = [
            value
            for p in each.named.values()
            for value in each.optimizer.state[p].values()
            if isinstance(value, Tensor)
        ]
        assert all(torch.equal(a, b) for a, b in zip(own, states, strict=True))
        assert calls == 4 * 2  # an all-to-all and an all-gather for each round
        assert moments


def test_a_bare_average_is_refused_by_its_tag() -> None:
    """Of `Reduced` the sender's own part decides what a residual keeps."""
    weight = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = LoRDO([{"params": [weight], "rank": 1}])
    config = SyncConfig(every=1), LowRankConfig(rank=1)
    made = Sync([("w", weight)], optimizer, *config, world_size=1)
    weight.grad = torch.ones(3, 2)
    with pytest.raises(InputError, match=r"^projection: must be Reduced\(.*\), not Tensor$"):
        made.apply(1, dict(made.first_gradient()))
    assert made.awaits_first_gradient
