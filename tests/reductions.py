"""What ranks hold in tests, and what reducing it must give."""

from __future__ import annotations

import torch
from torch import Tensor

from algorithms.common.comm import Op


def values(rank: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """What rank `rank` holds; the same in the test and on the rank."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64).mul(50).to(dtype)


def assert_reduced(found: list[Tensor], held: list[Tensor], op: Op) -> None:
    stacked = torch.stack(held)
    if op == "max":
        expected = stacked.amax(0)
    else:
        expected = stacked.sum(0) if op == "sum" else stacked.mean(0)
    for each in found:
        assert torch.equal(each, found[0])  # every rank ends with the same bits
        if len(held) <= 2 or op == "max":
            assert torch.equal(each, expected)
        else:
            torch.testing.assert_close(each, expected, rtol=0, atol=1e-12)
