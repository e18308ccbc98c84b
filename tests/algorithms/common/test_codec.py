"""The flat all-reduce, plain and through codecs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from algorithms.common.codec import Bf16Codec, Codec
from algorithms.common.comm import Comm
from algorithms.common.meter import Counter, all_reduce_wire_bytes
from tests.distributed import RankPool
from tests.reductions import assert_reduced, values

WORLDS = pytest.mark.parametrize("world_size", [1, 2, 4])

SHAPES = [(3, 5), (7,), (), (0, 4), (2, 2, 2)]
NUMEL = 15 + 7 + 1 + 8


def flat(comm: Comm, codec: Codec | None) -> tuple[list[Tensor], Counter]:
    tensors = [values(comm.rank, *shape) for shape in SHAPES]
    tensors.append(values(comm.rank, 4, 6).t())
    tensors.append(values(comm.rank, 9, dtype=torch.float32))
    comm.all_reduce_flat(iter(tensors), "test", "mean", codec)
    return tensors, comm.counters["test"]


@WORLDS
def test_flat_all_reduce_is_one_collective_per_dtype(ranks: RankPool, world_size: int) -> None:
    results = ranks.run(flat, None, world_size=world_size)
    for index, shape in enumerate([*SHAPES, (4, 6)]):
        held = [values(r, *shape) for r in range(world_size)]
        held = [h.t() for h in held] if shape == (4, 6) else held
        assert_reduced([tensors[index] for tensors, _ in results], held, "mean")
    payload = (NUMEL + 24) * 8, 9 * 4
    wire = sum(all_reduce_wire_bytes(size, world_size) for size in payload)
    assert [c for _, c in results] == [Counter(sum(payload), wire, 2)] * world_size


def flat_of_many(comm: Comm, count: int) -> Counter:
    comm.all_reduce_flat([torch.ones(3) for _ in range(count)], "test")
    return comm.counters["test"]


def test_flat_all_reduce_does_not_depend_on_the_number_of_tensors(ranks: RankPool) -> None:
    assert ranks.run(flat_of_many, 200, world_size=2) == [Counter(2400, 2400, 1)] * 2


class Ternary:
    """A lossy code of another size than its input: the sign, one byte a value."""

    def encode(self, flat: Tensor) -> Tensor:
        return (flat.sign() + 1).to(torch.uint8)

    def decode(self, encoded: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        assert encoded.numel() == numel
        return encoded.to(dtype) - 1


@WORLDS
@pytest.mark.parametrize("codec, value_bytes", [(Bf16Codec(), 2), (Ternary(), 1)])
def test_codec(ranks: RankPool, world_size: int, codec: Codec, value_bytes: int) -> None:
    results = ranks.run(flat, codec, world_size=world_size)
    for index, shape in enumerate(SHAPES):
        total = torch.zeros(shape, dtype=torch.float64)
        for rank in range(world_size):  # the order in which every rank adds
            held = values(rank, *shape).reshape(-1)
            total += codec.decode(codec.encode(held), held.numel(), held.dtype).view(shape)
        for tensors, _ in results:
            assert torch.equal(tensors[index], total / world_size)
    payload = (NUMEL + 24 + 9) * value_bytes
    expected = Counter(payload, (world_size - 1) * payload, 2)
    assert [counter for _, counter in results] == [expected] * world_size


def test_bf16_codec_rounds_to_nearest_even_and_keeps_its_input() -> None:
    held = torch.tensor([1.0, 1 + 2**-8, 1 + 3 * 2**-8, -3e38, float("inf"), 0.0])
    before = held.clone()
    encoded = Bf16Codec().encode(held)
    assert encoded.dtype == torch.uint8 and encoded.shape == (12,)
    decoded = Bf16Codec().decode(encoded, 6, torch.float32)
    assert decoded.tolist()[:3] == [1.0, 1.0, 1 + 2**-6]
    assert torch.equal(held, before)
