"""How bases are made and followed: against plain linear algebra in float64."""

import pytest
import torch
from torch import Tensor

from algorithms.async_pipeline import bases


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def orthonormal(*shape: int, seed: int = 1) -> Tensor:
    return torch.linalg.qr(drawn(*shape, seed=seed)).Q


def close(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=0, atol=1e-10)


def test_rotation_and_back_with_any_sides():
    X, U, V = drawn(3, 4, 6), orthonormal(3, 4, 4), orthonormal(3, 6, 6)
    close(bases.rotate(X, U, V), U.mT @ X @ V)
    close(bases.rotate(X, U, None), U.mT @ X)
    close(bases.rotate(X, None, V), X @ V)
    close(bases.rotate(X, None, None), X)
    for left, right in ((U, V), (U, None), (None, V), (None, None)):
        out = torch.empty_like(X)
        bases.rotate(X, left, right, out=out)
        close(bases.unrotate(out, left, right), X)


def test_eigenbasis_and_singular_bases_are_sorted():
    X = drawn(3, 4, 6)
    C, Q = X @ X.mT, bases.eigenbasis(X @ X.mT)
    values = (Q.mT @ C @ Q).diagonal(dim1=1, dim2=2)
    close(Q @ torch.diag_embed(values) @ Q.mT, C)
    assert (values.diff() < 0).all()
    U, V = bases.singular_bases(X)
    sizes = (U.mT @ X @ V).diagonal(dim1=1, dim2=2)
    close(U @ torch.diag_embed(sizes) @ V[:, :, :4].mT, X)
    assert (sizes.diff() < 0).all()
    close(V.mT @ V, torch.eye(6, dtype=torch.float64).expand(3, 6, 6))
    for rows, cols in ((4, 6), (6, 4), (5, 5)):
        X = drawn(3, rows, cols)
        pairs = min(rows, cols)
        thin = bases.singular_bases(X, whole=False)
        for some, every in zip(thin, bases.singular_bases(X), strict=True):
            assert some.shape == (3, every.shape[1], pairs)
            close(some.abs(), every[:, :, :pairs].abs())


def test_following_converges_to_the_eigenvectors():
    C = torch.diag(torch.tensor([1.0, 4.0, 16.0, 64.0], dtype=torch.float64)).expand(2, 4, 4)
    basis = orthonormal(2, 4, 4)
    for _ in range(40):
        basis, _ = bases.follow(C, basis)
    close(basis.abs(), torch.eye(4, dtype=torch.float64).flip(0).expand(2, 4, 4))


def test_one_block_of_all_columns_is_the_whole_refresh():
    X, Q = drawn(3, 6, 6), orthonormal(3, 6, 6)
    C = X @ X.mT
    columns = bases.block_columns(6, 1, turn=5, device=Q.device)
    assert columns.tolist() == list(range(6))
    whole, order = bases.follow(C, Q)
    block, same = bases.follow_block(C, Q, columns)
    close(block.abs(), whole.abs())
    assert torch.equal(order, same)


def test_a_block_turns_its_columns_among_themselves():
    X, Q = drawn(3, 6, 6), orthonormal(3, 6, 6)
    columns = torch.tensor([0, 2, 5])
    block, order = bases.follow_block(X @ X.mT, Q, columns)
    assert torch.equal(block[:, :, [1, 3, 4]], Q[:, :, [1, 3, 4]])
    assert order[:, [1, 3, 4]].tolist() == [[1, 3, 4]] * 3
    assert order[:, columns].sort().values.tolist() == [[0, 2, 5]] * 3
    old, new = Q[:, :, columns], block[:, :, columns]
    close(old @ old.mT, new @ new.mT)
    assert not torch.allclose(old.abs(), new.abs())


@pytest.mark.parametrize("blocks", [*range(1, 8), 40])
@pytest.mark.parametrize("side", [*range(1, 10), 17])
def test_windows_overlap_and_meet_every_pair(side, blocks):
    """Of neighbours, the last and the first too, also with more blocks than there are columns."""
    pairs, seen = set(), set()
    for turn in range(2 * side):
        window = bases.block_columns(side, blocks, turn, torch.device("cpu")).tolist()
        assert window == sorted(set(window))
        assert len(window) == min(side, max(2, -(-side // blocks)))
        seen |= set(window)
        pairs |= {(a, (a + 1) % side) for a in window if (a + 1) % side in window}
    assert seen == set(range(side))
    assert pairs == {(a, (a + 1) % side) for a in range(side)}


def test_one_side_is_the_iteration_with_its_square():
    X, Q = drawn(3, 4, 6), orthonormal(3, 4, 4)
    one, order = bases.follow_one_side(X, Q)
    expected, same = bases.follow(X @ X.mT, Q)
    close(one.abs(), expected.abs())
    assert torch.equal(order, same)


def test_pairs_stay_pairs_whatever_the_shape():
    """Both sides take one order, and converge to pairs of singular vectors."""
    for rows, cols in ((4, 6), (6, 4), (5, 5)):
        U, V = orthonormal(2, rows, rows, seed=2), orthonormal(2, cols, cols, seed=3)
        pairs = min(rows, cols)
        sizes = 2.0 ** -torch.arange(pairs, dtype=torch.float64)
        X = U[:, :, :pairs] * sizes @ V[:, :, :pairs].mT
        shuffled = torch.randperm(pairs, generator=torch.Generator().manual_seed(4))
        left, right = U.clone(), V.clone()
        left[:, :, :pairs], right[:, :, :pairs] = U[:, :, shuffled], V[:, :, shuffled]
        new_left, new_right, order = bases.follow_pairs(X, left, right)
        assert shuffled[order].tolist() == [list(range(pairs))] * 2
        close(
            (new_left.mT @ X @ new_right).abs()[:, :pairs, :pairs], sizes.diag().expand(2, -1, -1)
        )
        # The longer side's other directions were orthogonal already: they are what they were.
        close(new_left[:, :, pairs:].abs(), left[:, :, pairs:].abs())
        close(new_right[:, :, pairs:].abs(), right[:, :, pairs:].abs())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows, cols", [(4, 9), (9, 4), (3, 40), (5, 5)])
def test_other_directions_stay_when_the_rank_is_low(rows, cols, dtype):
    """All but as many as M has itself; and matrices of full rank beside them notice nothing."""
    pairs = min(rows, cols)
    ranks = [pairs, 0, 1, 2, pairs]
    X = torch.stack([drawn(rows, r, seed=r) @ drawn(r, cols, seed=r + 9) for r in ranks]).to(dtype)
    generic = orthonormal(5, rows, rows, seed=2), orthonormal(5, cols, cols, seed=3)
    warm = bases.singular_bases(X)
    for settled, sides in ((False, generic), (True, warm)):
        left, right = (each.to(dtype) for each in sides)
        *new, order = bases.follow_pairs(X, left, right)
        for old, found, products in (
            (left, new[0], X @ right[..., :pairs]),
            (right, new[1], X.mT @ left[..., :pairs]),
        ):
            eye = torch.eye(old.shape[-1], dtype=dtype).expand_as(found)
            torch.testing.assert_close(found.mT @ found, eye, rtol=0, atol=1e-5)
            for at, rank in enumerate(ranks):
                if rank == pairs:
                    plain = torch.cat([products[at][:, order[at]], old[at][:, pairs:]], dim=-1)
                    assert torch.equal(found[at], torch.linalg.qr(plain).Q)
                kept = torch.linalg.svdvals(old[at][:, pairs:].mT @ found[at][:, pairs:])
                moved = (kept < 0.999).sum()
                assert moved <= (0 if settled else rank)


def test_a_sorted_basis_with_sorted_values_is_the_same_update():
    """U (N / sqrt(V)) Vr^T does not change when directions only change places."""
    N, V = drawn(2, 3, 4), drawn(2, 3, 4, seed=5).square()
    left, right = orthonormal(2, 3, 3), orthonormal(2, 4, 4)
    G = bases.unrotate(N, left, right)
    before = bases.unrotate(bases.rotate(G, left, right) / V.sqrt(), left, right)
    rows, cols = torch.tensor([[2, 0, 1], [1, 2, 0]]), torch.tensor([[1, 0], [1, 0]])
    bases.reorder(V, rows, -2)
    bases.reorder(V, cols, -1)
    left = torch.stack([each[:, order] for each, order in zip(left, rows, strict=True)])
    right[:, :, :2] = right[:, :, [1, 0]]
    close(bases.unrotate(bases.rotate(G, left, right) / V.sqrt(), left, right), before)
