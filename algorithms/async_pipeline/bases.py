"""Orthonormal bases of a matrix' two sides: how they are made, followed, and applied.

All tensors are batches: X `[B, m, n]`, a left basis U `[B, m, m]`, a right one V `[B, n, n]`,
either of which may be missing (None: the identity). A refresh is one step of orthogonal iteration,
warm from the old basis, for all B at once; directions are sorted by what the product at hand says
of their eigenvalue. It returns the `order` `[B, k]` of old directions, so that what is kept by
direction can be sorted too.
"""

from __future__ import annotations

import torch
from torch import Tensor

Basis = Tensor | None


def rotate(matrices: Tensor, left: Basis, right: Basis, out: Tensor | None = None) -> Tensor:
    """U^T X V, into `out` if given, which must not be X."""
    if right is not None:
        half = matrices if left is None else torch.bmm(left.mT, matrices)
        return torch.bmm(half, right, out=out)
    if left is not None:
        return torch.bmm(left.mT, matrices, out=out)
    return matrices if out is None else out.copy_(matrices)


def unrotate(matrices: Tensor, left: Basis, right: Basis, out: Tensor | None = None) -> Tensor:
    """U X V^T, what `rotate` undoes."""
    return rotate(
        matrices, None if left is None else left.mT, None if right is None else right.mT, out
    )


def eigenbasis(covariance: Tensor) -> Tensor:
    """Eigenvectors of `[B, s, s]`, that of the largest eigenvalue first; found in float64."""
    vectors: Tensor = torch.linalg.eigh(covariance.double()).eigenvectors
    return vectors.flip(-1).to(covariance.dtype)


def singular_bases(mean: Tensor, *, whole: bool = True) -> tuple[Tensor, Tensor]:
    """Left and right singular vectors of `[B, m, n]`, in pairs, the largest first: `whole` all of
    both sides, else the first min(m, n), which are all of the shorter side."""
    left, _, right = torch.linalg.svd(mean.double(), full_matrices=whole)
    return left.to(mean.dtype), right.mT.to(mean.dtype)


def follow(covariance: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Q <- qr(C Q), with columns sorted by q^T C q."""
    product = covariance @ basis
    order = _descending((basis * product).sum(-2))
    return _orthonormal(_columns(product, order)), order


def follow_block(covariance: Tensor, basis: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Q_b <- Q_b qr(Q_b^T C Q_b) of the given columns `[k]`, ascending; the others stay. With all
    columns this is `follow`, at more cost."""
    block = basis[..., columns]
    inner = block.mT @ (covariance @ block)
    within = _descending(inner.diagonal(dim1=-2, dim2=-1))
    turned = basis.clone()
    turned[..., columns] = block @ _orthonormal(_columns(inner, within))
    order = _unchanged(basis)
    order[:, columns] = columns[within]
    return turned, order


def block_columns(side: int, blocks: int, turn: int, device: torch.device) -> Tensor:
    """Which columns the refresh number `turn` is about: a window of a `blocks`-th of all, at least
    of two, that moves by half its width, cyclically. So every direction meets its neighbours, and,
    as they change places, every other."""
    width = min(side, max(2, -(-side // blocks)))
    start = 0 if blocks == 1 else turn * -(-width // 2)
    return ((start + torch.arange(width, device=device)) % side).sort().values


def follow_one_side(mean: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Q <- qr(M M^T Q) for the left side; give M^T for the right one."""
    product = mean.mT @ basis
    order = _descending(product.square().sum(-2))
    return _orthonormal(mean @ _columns(product, order)), order


def follow_pairs(mean: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U <- qr(M V) and V <- qr(M^T U), both from the old bases.

    The first min(m, n) directions are pairs and keep one order on both sides, by ||M v||^2 +
    ||M^T u||^2. The longer side has more: they stay as they were, made orthogonal to the new ones.
    So do those in whose place M, of a lower rank, gives nothing new.
    """
    pairs = min(mean.shape[-2:])
    outputs, inputs = mean @ right[..., :pairs], mean.mT @ left[..., :pairs]
    order = _descending(outputs.square().sum(-2) + inputs.square().sum(-2))
    return _replaced(outputs, left, order), _replaced(inputs, right, order), order


def _replaced(products: Tensor, basis: Tensor, order: Tensor) -> Tensor:
    """`basis` with its first columns replaced by the products, in that order."""
    pairs = order.shape[-1]
    new, rest = _columns(products, order), basis[..., pairs:]
    found: Tensor
    found, upper = torch.linalg.qr(torch.cat([new, rest], dim=-1))
    added = upper.diagonal(dim1=-2, dim2=-1)[..., :pairs].abs()
    nothing = added <= 10 * torch.finfo(new.dtype).eps * added.amax(-1, keepdim=True)
    if nothing.any():  # what a QR puts there is anything, and `rest` would have to give way
        new = torch.where(nothing.unsqueeze(-2), _columns(basis[..., :pairs], order), new)
        found = _orthonormal(torch.cat([new, rest], dim=-1))
    return found


def reorder(values: Tensor, order: Tensor, side: int) -> None:
    """Sort `values` `[B, m, n]` in place along `side` (-2 or -1) by the order of its first k."""
    part = values.narrow(side, 0, order.shape[-1])
    index = order.unsqueeze(-1 if side == -2 else -2).expand_as(part)
    part.copy_(part.gather(side, index))


def _descending(values: Tensor) -> Tensor:
    return values.argsort(dim=-1, descending=True, stable=True)


def _unchanged(basis: Tensor) -> Tensor:
    return torch.arange(basis.shape[-1], device=basis.device).repeat(len(basis), 1)


def _columns(matrices: Tensor, order: Tensor) -> Tensor:
    return matrices.gather(-1, order.unsqueeze(-2).expand_as(matrices))


def _orthonormal(matrices: Tensor) -> Tensor:
    basis: Tensor = torch.linalg.qr(matrices).Q
    return basis
