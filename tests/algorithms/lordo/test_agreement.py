"""Ranks that find other projections take that of rank 0; ranks that agree send eight bytes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from algorithms.common.comm import Comm
from algorithms.common.meter import Counter
from algorithms.lordo.agreement import same_on_all_ranks
from tests.distributed import RankPool


def agreed(comm: Comm, odd: int | None) -> tuple[Tensor, Tensor, Counter]:
    flat = torch.arange(100.0)
    if comm.rank == odd:
        flat[7] += 1e-5
    before = flat.clone()
    result = same_on_all_ranks(comm, "projection")(flat)
    assert torch.equal(flat, before)
    return before, result, comm.counters["projection"]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_equal_ranks_send_a_hash(ranks: RankPool, world_size: int) -> None:
    for own, result, counter in ranks.run(agreed, None, world_size=world_size):
        assert torch.equal(result, own)
        assert counter.payload_bytes == 8 and counter.calls == 1


@pytest.mark.parametrize("odd", [0, 1, 3])
def test_one_bit_on_one_rank_makes_all_take_rank_0(ranks: RankPool, odd: int) -> None:
    results = ranks.run(agreed, odd)
    for _, result, counter in results:
        assert torch.equal(result, results[0][0])
        assert counter.payload_bytes == 8 + 400 and counter.calls == 2
