"""Stacked workers against real gloo ranks: the same weights bit for bit, the same bytes."""

from dataclasses import replace

import pytest
import torch

from algorithms.common.codec import CODECS
from algorithms.common.config import OptimizerConfig
from algorithms.common.errors import NonFiniteError
from algorithms.common.loop import token_loss
from algorithms.common.meter import Counter
from algorithms.common.model import logits
from algorithms.lordo import methods
from algorithms.lordo.config import ArmConfig, LowRankConfig, SyncConfig
from algorithms.lordo.stacked import StackedMeter, build
from algorithms.lordo.wire import Reducer
from tests import toys
from tests.loops import new_model

ADAM = OptimizerConfig(lr=1e-2, weight_decay=0.0, clip_norm=0.5)
LORDO = ArmConfig(
    method="local",
    inner="lordo",
    optimizer=ADAM,
    low_rank=LowRankConfig(rank=3),
    sync=SyncConfig(every=2, momentum_every=4, variance_every=6),
)
ARMS = {
    "local_adam": ArmConfig(
        method="local",
        optimizer=ADAM,
        sync=SyncConfig(every=3, momentum_every=3, variance_every=3),
    ),
    "lordo_global": LORDO,
    "int4": replace(
        LORDO,
        sync=SyncConfig(
            every=2,
            outer="nesterov",
            outer_momentum=0.7,
            outer_state="int8",
            wire="int4",
            residual="weights",
        ),
    ),
    "lordo_ns": replace(
        LORDO,
        inner="lordo_ns",
        momentum="bf16",
        low_rank=LowRankConfig(rank=3, projection="frozen"),
        sync=SyncConfig(every=3),
    ),
    "lordo_ns_carry": replace(
        LORDO,
        inner="lordo_ns",
        low_rank=LowRankConfig(rank=3, projection="frozen", carry=0.6),
        sync=SyncConfig(every=3),
    ),
    "muloco": replace(LORDO, inner="muon", low_rank=None, sync=SyncConfig(every=3)),
    "muloco_in_grad": replace(
        LORDO, inner="muon", low_rank=None, momentum="grad", sync=SyncConfig(every=3)
    ),
    "lowrank_ddp": ArmConfig(
        method="lowrank_ddp",
        optimizer=ADAM,
        low_rank=LowRankConfig(rank=3, error_feedback=True),
    ),
    "delayed": replace(LORDO, sync=SyncConfig(every=3, momentum_every=6, delay=2)),
}
STEPS = 7
"""Ends inside a round of every arm."""


def tokens(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(toys.VOCAB, (2, 9), generator=generator)


def train_on_rank(comm, arm):
    """As the training loop drives a method."""
    model = new_model()
    method = methods.build(model, arm, comm, seed=0)
    for step in range(1, STEPS + 1):
        batch = tokens(step, comm.rank)
        token_loss(logits(method.module, batch[:, :-1]), batch[:, 1:]).backward()
        method.gradient_norm()
        method.update(step, ADAM.lr / step)
    method.flush(STEPS)
    with method.synced():
        weights = [parameter.detach().clone() for parameter in model.parameters()]
    return weights, comm.counters


def train_stacked(arm, workers):
    stacked = build(arm, [new_model() for _ in range(workers)], seed=0)
    for step in range(1, STEPS + 1):
        stacked.backward([tokens(step, rank) for rank in range(workers)])
        stacked.update(step, ADAM.lr / step)
    stacked.flush(STEPS)
    with stacked.synced() as model:
        weights = [parameter.detach().clone() for parameter in model.parameters()]
    return weights, stacked.meter.counters


def assert_same_as_ranks(ranks, arm, workers):
    mine, counters = train_stacked(arm, workers)
    before = [parameter.detach() for parameter in new_model().parameters()]
    assert not any(torch.equal(a, b) for a, b in zip(mine, before, strict=True))
    for theirs, counted in ranks.run(train_on_rank, arm, world_size=workers):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
        assert counted == counters


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("name", ["lordo_global", "int4"])
def test_an_arm_is_that_of_real_ranks_bit_for_bit(ranks, name, workers):
    assert_same_as_ranks(ranks, ARMS[name], workers)


@pytest.mark.parametrize(
    "name",
    ["local_adam", "lordo_ns", "lordo_ns_carry", "muloco", "muloco_in_grad", "delayed"],
)
def test_other_local_arms_on_four_ranks(ranks, name):
    assert_same_as_ranks(ranks, ARMS[name], 4)


def test_low_rank_ddp_on_two_ranks_whose_sums_have_one_order(ranks):
    assert_same_as_ranks(ranks, ARMS["lowrank_ddp"], 2)


def test_ddp_is_that_of_real_ranks_but_for_rounding(ranks):
    arm = ArmConfig(optimizer=ADAM)
    mine, counters = train_stacked(arm, 4)
    for theirs, counted in ranks.run(train_on_rank, arm):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
        assert counted["gradients"].payload_bytes == counters["gradients"].payload_bytes


def count_round(comm, numel, codec):
    Reducer(comm, "delta", CODECS.get(codec))(torch.ones(numel))
    return comm.counters["delta"]


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4", "int2", "sign", "top_k"])
@pytest.mark.parametrize("numel", [1, 1000])
def test_a_round_is_counted_as_the_reducer_counts_it(ranks, numel, codec):
    meter = StackedMeter(4)
    meter.reducer("delta", torch.ones(numel), CODECS.get(codec))
    assert ranks.run(count_round, numel, codec) == [meter.counters["delta"]] * 4


def test_bytes_of_an_int4_round_by_hand():
    """1000 values on 4 workers: parts of 256, four blocks of 34 bytes each."""
    meter = StackedMeter(4)
    meter.reducer("delta", torch.ones(1000), CODECS["int4"])
    assert meter.counters["delta"] == Counter(4 * 4 * 34, 2 * 3 * 4 * 34, 2)


def test_a_gradient_that_is_not_finite_ends_the_run():
    stacked = build(ARMS["lordo_global"], [new_model() for _ in range(2)], seed=0)
    with torch.no_grad():
        next(stacked.workers[1].model.parameters()).fill_(torch.nan)
    with pytest.raises(NonFiniteError, match="worker 1: loss is nan"):
        stacked.backward([tokens(1, rank) for rank in range(2)])
