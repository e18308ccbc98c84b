"""Projections and rotations against torch.linalg.svd, scipy-free cosines and sampled moments."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from algorithms.lordo.config import Compute
from algorithms.lordo.projection import (
    cosine_basis,
    orthonormal,
    overlap,
    random_orthonormal,
    rotate,
    top_r,
    usable,
)

KINDS: list[Compute] = ["svd", "power", "dct"]


def matrices(batch: int, m: int, n: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """With well separated singular values."""
    generator = torch.Generator().manual_seed(m * n)
    left = orthonormal(torch.randn(batch, m, m, generator=generator, dtype=torch.float64))
    right = orthonormal(torch.randn(batch, n, m, generator=generator, dtype=torch.float64))
    return (left * 0.5 ** torch.arange(m) @ right.mT).to(dtype)


def assert_orthonormal(Q: Tensor, tolerance: float = 1e-12) -> None:
    identity = torch.eye(Q.shape[-1], dtype=Q.dtype).expand(len(Q), -1, -1)
    torch.testing.assert_close(Q.mT @ Q, identity, atol=tolerance, rtol=0)


@pytest.mark.parametrize(("m", "n", "rank"), [(1, 1, 1), (4, 4, 4), (6, 20, 1), (6, 20, 3)])
def test_svd_gives_the_leading_left_singular_vectors(m: int, n: int, rank: int) -> None:
    D = matrices(3, m, n)
    Q = top_r(D, rank)
    assert_orthonormal(Q)
    expected = torch.linalg.svd(D).U[..., :rank]
    torch.testing.assert_close((Q * expected).sum(dim=1).abs(), torch.ones(3, rank).double())


def test_svd_in_float32_is_as_good_as_the_numbers_are() -> None:
    """A Gram matrix in float32 would lose the directions below 3e-4 of the largest."""
    D = matrices(2, 14, 20, torch.float32)
    Q, U = top_r(D, 14), torch.linalg.svd(D.double()).U
    agreement = (Q.double() * U).sum(dim=1).abs()
    assert 0.5**13 < 2e-4
    assert agreement.min() > 1 - 1e-4


def test_power_is_one_step_from_the_previous_projection() -> None:
    D = matrices(2, 6, 9)
    start = random_orthonormal(2, 6, 2, 3, like=D)
    Q = top_r(D, 2, "power", start)
    assert_orthonormal(Q)
    expected = torch.linalg.qr(D @ D.mT @ start).Q
    assert overlap(Q, expected) == pytest.approx([1, 1])
    for _ in range(40):
        Q = top_r(D, 2, "power", Q)
    assert overlap(Q, top_r(D, 2)) == pytest.approx([1, 1])


def test_cosine_basis_is_the_orthonormal_dct() -> None:
    basis = cosine_basis(7, like=torch.zeros(1, dtype=torch.float64))
    assert_orthonormal(basis[None])
    for k in range(7):
        for i in range(7):
            scale = math.sqrt((1 if k == 0 else 2) / 7)
            assert basis[i, k].item() == pytest.approx(
                scale * math.cos(math.pi * k * (i + 0.5) / 7)
            )


def test_dct_picks_the_strongest_frequencies_and_rotates_exactly() -> None:
    basis = cosine_basis(8, like=torch.zeros(1, dtype=torch.float64))
    weights = torch.tensor([0, 3.0, 0, 1, 0, 0, 2, 0], dtype=torch.float64)
    right = orthonormal(torch.randn(9, 8, dtype=torch.float64)).T
    D = (basis * weights) @ right
    Q = top_r(D[None], 2, "dct")
    assert overlap(Q, basis[None][..., [1, 6]]).item() == pytest.approx(1)
    weights[6], weights[4] = 0, 5
    other = top_r(((basis * weights) @ right)[None], 2, "dct")
    R = other.mT @ Q  # frequencies 1 and 4 against 1 and 6
    assert sorted(R.abs().flatten().tolist()) == pytest.approx([0, 0, 0, 1], abs=1e-12)


@pytest.mark.parametrize("compute", KINDS)
@pytest.mark.parametrize("bad", [0.0, torch.nan, torch.inf, 1e-42])
def test_a_matrix_without_directions_keeps_its_projection(compute: Compute, bad: float) -> None:
    D = matrices(3, 4, 6, torch.float32)
    D[1] = 0
    D[1, 2, 3] = bad
    assert usable(D).tolist() == [True, False, True]
    previous = random_orthonormal(3, 4, 2, 1, like=D)
    Q = top_r(D, 2, compute, previous)
    assert torch.equal(Q[1], previous[1])
    assert torch.equal(Q[[0, 2]], top_r(D[[0, 2]], 2, compute, previous[[0, 2]]))
    assert Q.isfinite().all()
    assert torch.equal(top_r(D, 2)[1], torch.eye(4, 2))


@pytest.mark.parametrize("compute", KINDS)
@pytest.mark.parametrize("scale", [1e-15, 1e15])
def test_small_and_large_matrices_have_directions(compute: Compute, scale: float) -> None:
    D = matrices(2, 5, 8, torch.float32)
    previous = random_orthonormal(2, 5, 2, 1, like=D)
    Q = top_r(D * scale, 2, compute, previous)
    assert overlap(Q, top_r(D, 2, compute, previous)) == pytest.approx([1, 1], abs=1e-5)


@pytest.mark.parametrize("compute", KINDS)
def test_a_multiple_of_the_identity_and_a_matrix_of_rank_one(compute: Compute) -> None:
    D = torch.stack([torch.eye(5), torch.ones(5, 5)]) * 3
    Q = top_r(D, 3, compute, random_orthonormal(2, 5, 3, 1, like=D))
    assert_orthonormal(Q, 1e-5)
    ones = torch.full((5,), 5**-0.5)
    assert (Q[1].T @ ones).norm().item() == pytest.approx(1, abs=1e-5)  # the one direction is in it


@pytest.mark.parametrize("compute", KINDS)
def test_the_same_bits_for_a_matrix_and_its_negative(compute: Compute) -> None:
    D = matrices(2, 6, 9, torch.float32)
    Q = top_r(D, 3, compute)
    assert torch.equal(Q, top_r(-D, 3, compute))
    assert (Q.gather(1, Q.abs().argmax(dim=1, keepdim=True)) > 0).all()


def test_projections_of_bfloat16() -> None:
    D = matrices(2, 6, 9, torch.bfloat16)
    for compute in KINDS:
        assert top_r(D, 2, compute).dtype == torch.bfloat16


def test_random_projections_depend_on_the_seed_only() -> None:
    like = torch.zeros(1, dtype=torch.float64)
    Q = random_orthonormal(3, 6, 2, 2**64 - 1, like=like)
    assert_orthonormal(Q)
    torch.manual_seed(17)
    assert torch.equal(Q, random_orthonormal(3, 6, 2, 2**64 - 1, like=like))
    assert not torch.equal(Q, random_orthonormal(3, 6, 2, 4, like=like))
    assert not torch.equal(Q[0], Q[1])


def test_overlap_is_one_for_the_same_space_and_zero_for_orthogonal_ones() -> None:
    Q = random_orthonormal(1, 6, 6, 0, like=torch.zeros(1, dtype=torch.float64))
    turn = random_orthonormal(1, 3, 3, 1, like=Q)
    assert overlap(Q[..., :3], Q[..., :3] @ turn).item() == pytest.approx(1)
    assert overlap(Q[..., :3], Q[..., 3:]).item() == pytest.approx(0)
    assert overlap(Q[..., :3], Q[..., [0, 1, 4]]).item() == pytest.approx(2 / 3)


# Rotation


def test_rotated_moments_are_those_of_rotated_gradients() -> None:
    """Directions that are uncorrelated in the old basis: the estimate is exact in the limit."""
    generator = torch.Generator().manual_seed(0)
    mean = torch.tensor([1.0, -2.0, 0.5, 0.0], dtype=torch.float64)
    spread = torch.tensor([0.5, 1.0, 2.0, 0.1], dtype=torch.float64)
    samples = mean + spread * torch.randn(20_000, 4, generator=generator, dtype=torch.float64)
    turn = random_orthonormal(1, 4, 4, 3, like=samples)
    first, second = samples.mean(0), samples.square().mean(0)
    u, v = rotate(first[None, :, None], second[None, :, None], turn, 1.0, 1.0)
    turned = samples @ turn[0].T
    torch.testing.assert_close(u[0, :, 0], turned.mean(0))
    torch.testing.assert_close(v[0, :, 0], turned.square().mean(0), rtol=0.02, atol=0)


def test_bias_corrections_are_those_of_the_step() -> None:
    """Moments at step t, rotated, and corrected afterwards: as if they had been corrected first."""
    generator = torch.Generator().manual_seed(1)
    mean, spread = torch.rand(2, 2, 3, 5, generator=generator, dtype=torch.float64)
    turn = random_orthonormal(2, 3, 3, 3, like=mean)
    c1, c2 = 0.19, 0.03
    exact = rotate(mean, mean.square() + spread, turn, 1.0, 1.0)
    u, v = rotate(c1 * mean, c2 * (mean.square() + spread), turn, c1, c2)
    torch.testing.assert_close(u / c1, exact[0])
    torch.testing.assert_close(v / c2, exact[1])


def test_negative_estimates_become_positive() -> None:
    """v̂ below û², as after averages at different periods."""
    first = torch.tensor([[[1.0], [1.0]]])
    second = torch.tensor([[[0.1], [0.1]]])
    turn = torch.tensor([[[1.0, -1.0], [1.0, 1.0]]]) / 2**0.5
    u, v = rotate(first, second, turn, 1.0, 1.0)
    torch.testing.assert_close(u, torch.tensor([[[0.0], [2**0.5]]]))
    torch.testing.assert_close(v, torch.tensor([[[0.9], [1.1]]]))  # the first was -0.9


def test_a_turn_by_nothing_changes_nothing() -> None:
    first, second = torch.rand(2, 1, 3, 4, dtype=torch.float64)
    u, v = rotate(first, second + 1, torch.eye(3).double()[None], 0.5, 0.25)
    torch.testing.assert_close(u, first)
    torch.testing.assert_close(v, second + 1)
