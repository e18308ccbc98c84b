"""Newton-Schulz against the plain iteration in float64 and against the singular value
decomposition."""

import pytest
import torch
from torch import Tensor, nn

from algorithms.lordo.muon_reference import orthogonalise
from algorithms.lordo.newton_schulz import MUON, POLAR, newton_schulz, newton_schulz_all

SHAPES = [(4, 64, 64), (3, 64, 256), (2, 20, 7), (1, 1, 9), (5, 1, 1)]


def gaussian(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def with_singular_values(values: Tensor, n: int, count: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """X [count, m, n], its left [count, m, m] and right [count, n, m] singular vectors."""
    m = len(values)
    left = torch.linalg.qr(gaussian(count, m, m))[0]
    right = torch.linalg.qr(gaussian(count, n, m, seed=1))[0]
    return (left * values) @ right.mT, left, right


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("quintics", [POLAR, MUON, POLAR[:1], POLAR[:2]])
def test_equals_the_plain_iteration_on_each_matrix(shape, quintics):
    X = gaussian(*shape)
    expected = torch.stack([orthogonalise(each, quintics) for each in X])
    torch.testing.assert_close(newton_schulz(X, quintics), expected, rtol=0, atol=1e-12)


def test_muons_quintic_is_that_of_torch():
    """torch computes in bfloat16."""
    X = gaussian(64, 100, dtype=torch.float32)
    weight = nn.Parameter(torch.zeros_like(X))
    weight.grad = X
    torch.optim.Muon([weight], lr=1.0, weight_decay=0.0, momentum=0.0).step()
    found = newton_schulz(X[None], MUON)[0]
    torch.testing.assert_close(found, -weight.detach(), rtol=0, atol=0.05)


def test_float32_is_near_it_even_for_tiny_singular_values():
    for smallest in (-1, -3, -8):
        X, _, _ = with_singular_values(torch.logspace(0, smallest, 64, dtype=torch.float64), 256)
        found = newton_schulz(X.float())
        assert found.dtype == torch.float32
        expected = torch.stack([orthogonalise(each) for each in X])
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=3e-4)


@pytest.mark.parametrize("quintics, low, high", [(POLAR, 0.77, 1.20), (MUON, 0.68, 1.21)])
@pytest.mark.parametrize("n", [64, 200])
def test_singular_values_come_near_one_and_vectors_stay(n, quintics, low, high):
    values = torch.logspace(0, -2, 64, dtype=torch.float64)
    assert 0.003 < values[-1] / values.norm() < 0.006
    X, left, right = with_singular_values(values, n)
    turned = left.mT @ newton_schulz(X, quintics) @ right
    values = turned.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(turned, torch.diag_embed(values), rtol=0, atol=1e-10)
    assert values.min() > low and values.max() < high


@pytest.mark.parametrize("bf16", [False, True])
def test_one_direction_alone_does_not_grow(bf16):
    """The largest singular value there is: all of the norm."""
    X = gaussian(50, 20, 1, dtype=torch.float32) @ gaussian(50, 1, 30, dtype=torch.float32, seed=1)
    values = torch.linalg.svdvals(newton_schulz(X, bf16=bf16))
    assert values[:, 0].min() > 0.7 and values[:, 0].max() < 1.3
    assert bf16 or values[:, 1:].max() < 1e-3


def test_shapes_that_share_a_short_side_do_not_disturb_each_other():
    batches = [gaussian(3, 8, 8), gaussian(2, 8, 30), gaussian(4, 5, 8), gaussian(1, 30, 8)]
    for X, found in zip(batches, newton_schulz_all(batches), strict=True):
        torch.testing.assert_close(found, newton_schulz(X), rtol=0, atol=1e-13)
        torch.testing.assert_close(found.mT, newton_schulz(X.mT), rtol=0, atol=1e-13)


@pytest.mark.parametrize("bf16", [False, True])
def test_scale_does_not_matter_and_zeros_stay(bf16):
    X = gaussian(2, 6, 10, dtype=torch.float32)
    if not bf16:
        for scale in (2.0**-40, 2.0**40):
            assert torch.equal(newton_schulz(X * scale), newton_schulz(X))
    X[1] = 0
    found = newton_schulz(X, bf16=bf16)
    assert torch.equal(found[1], X[1]) and bool(found[0].any())
    assert float(newton_schulz(X * 1e-30, bf16=bf16).abs().max()) < 1  # too small to be told from 0


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_comes_out_so_and_alone(bad, bf16):
    X = gaussian(3, 6, 10, dtype=torch.float32)
    expected = newton_schulz(X, bf16=bf16)
    X[1, 2, 3] = bad
    found = newton_schulz(X, bf16=bf16)
    assert bool(found[1].isnan().all())
    assert torch.equal(found[[0, 2]], expected[[0, 2]])


def test_bfloat16_is_taken_only_when_asked_for_on_the_cpu():
    X = gaussian(2, 16, 40, dtype=torch.float32)
    assert torch.equal(newton_schulz(X), newton_schulz(X, bf16=False))
    coarse = newton_schulz(X, bf16=True)
    assert coarse.dtype == torch.float32
    assert torch.equal(coarse, coarse.to(torch.bfloat16).float())
    torch.testing.assert_close(coarse, newton_schulz(X), rtol=0, atol=0.1)


@pytest.mark.gpu
def test_cuda_computes_in_bfloat16_and_comes_near():
    X = gaussian(2, 16, 40, dtype=torch.float32)
    found = newton_schulz(X.cuda())
    assert torch.equal(found, found.to(torch.bfloat16).float())
    torch.testing.assert_close(found.cpu(), newton_schulz(X), rtol=0, atol=0.1)
    torch.testing.assert_close(newton_schulz(X.cuda(), bf16=False).cpu(), newton_schulz(X))
