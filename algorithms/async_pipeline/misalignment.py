"""How far the coordinates of a stage are from the directions in which its loss curves.

Source: arXiv 2602.03515. With H the Hessian of the loss in the n weights of one stage, at the
newest weights of all stages,

    misalignment = ||H||_11 / ||H||_F,    ||H||_11 = sum_ij |H_ij|

It lies between 1 and n; that of a diagonal is at most sqrt(n). In the bases of `BasisRotation` H
becomes Q^T H Q, with Q block-diagonal: U kron V for each matrix, the identity for what is not
rotated. ||H||_F stays what it was.

Both norms are estimated from products with H. If z is standard Cauchy, entry i of H z is Cauchy
with the scale sum_j |H_ij|, which is the median of its absolute value; if z is normal, the mean of
||H z||^2 is ||H||_F^2. With d draws the standard deviations are at most pi / (2 sqrt(d)) and
1 / sqrt(2 d) of the norms, and the medians are pi^2 / (8 d) of them too large. `original` and
`rotated` share their draws, so most of this leaves their ratio.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from math import frexp, nan

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer

from algorithms.async_pipeline import bases
from algorithms.async_pipeline.update import Loss
from algorithms.common.errors import InputError
from algorithms.common.seeding import mix

Batches = Sequence[tuple[Tensor, Tensor]]
"""Inputs of the first stage and targets of the last."""


@dataclass(frozen=True)
class StageMisalignment:
    """Of one stage; nan where its Hessian is zero, or has no rows."""

    original: float
    rotated: float
    """In the bases of its optimizer; `original` where that has none."""

    @property
    def ratio(self) -> float:
        """What rotation leaves of it."""
        return self.rotated / self.original


def misalignment(
    stages: Sequence[nn.Module],
    loss: Loss,
    batches: Batches,
    optimizers: Sequence[Optimizer] | None = None,
    *,
    draws: int,
    seed: int,
) -> list[StageMisalignment]:
    """The misalignment of each stage, for the mean of `loss` over `batches`.

    Bases are read from the state of `optimizers`, one for each stage; one that keeps none, or has
    made no step yet, has the identity. Costs 2 `draws` products with H for a stage, 3 where it is
    rotated, and keeps two times `draws` vectors of the stage's size, in float32, or in float64 if a
    weight is. Products are as exact as the weights' dtype makes them. Weights and their `grad` stay
    as they are. Raises `InputError` for an even number of draws, which has no middle one, for no
    batch, and for optimizers that are not one for each stage.
    """
    if draws < 1 or draws % 2 == 0:
        raise InputError(f"draws: must be odd, not {draws}")
    if not batches:
        raise InputError("batches: must be at least one")
    if optimizers is not None and len(optimizers) != len(stages):
        raise InputError(f"optimizers: {len(optimizers)} for {len(stages)} stages")
    found = []
    for k, stage in enumerate(stages):
        weights = trained(stage)
        if not weights:
            found.append(StageMisalignment(nan, nan))
            continue
        turns = [] if optimizers is None else bases_of(weights, optimizers[k])
        generator = torch.Generator().manual_seed(mix("misalignment", seed, k))
        wide = reduce(torch.promote_types, (each.dtype for each in weights), torch.float32)
        draw = torch.empty(draws, sum(each.numel() for each in weights), dtype=wide)

        def product(vectors: Tensor, stage: int = k) -> Tensor:
            return hessian_products(stages, stage, loss, batches, vectors)

        z = draw.normal_(generator=generator).to(weights[0].device)
        frobenius = product(z).double().square().sum(dim=1).mean().sqrt().item() or nan
        z = draw.cauchy_(generator=generator).to(weights[0].device)
        original = rotated = _one_norm(product(z))
        if any(left is not None or right is not None for left, right in turns):
            rotated = _one_norm(turn(product(turn(z, weights, turns, back=True)), weights, turns))
        found.append(StageMisalignment(original / frobenius, rotated / frobenius))
    return found


def trained(stage: nn.Module) -> list[nn.Parameter]:
    """The weights in which a stage's Hessian is taken, in the order of its rows."""
    return [weight for weight in stage.parameters() if weight.requires_grad]


def hessian_products(
    stages: Sequence[nn.Module], k: int, loss: Loss, batches: Batches, vectors: Tensor
) -> Tensor:
    """H v for each row of `vectors` `[draws, n]`, with H of stage k and the mean over `batches`.

    A gradient is differentiated once more for each row, each weight's part in the weight's dtype;
    rows too large for float16 are scaled meanwhile. Attention by torch's
    `scaled_dot_product_attention` is computed by its plain formula, since its fused kernels have no
    second derivative.
    """
    weights = trained(stages[k])
    sizes = [weight.numel() for weight in weights]
    products = torch.zeros_like(vectors)
    for inputs, targets in batches:
        with sdpa_kernel(SDPBackend.MATH):
            with torch.no_grad():
                for stage in stages[:k]:
                    inputs = stage(inputs)
            for stage in stages[k:]:
                inputs = stage(inputs)
            value = loss(inputs, targets) / len(batches)
        gradients = torch.autograd.grad(value, weights, create_graph=True, materialize_grads=True)
        curved = [place for place, each in enumerate(gradients) if each.requires_grad]
        if not curved:
            continue
        for v, product in zip(vectors, products, strict=True):
            scale = _scale(v, weights)
            pairs = zip((v / scale).split(sizes), weights, strict=True)
            parts = [p.view_as(w).to(w.dtype) for p, w in pairs]
            seconds = torch.autograd.grad(
                [gradients[place] for place in curved],
                weights,
                [parts[place] for place in curved],
                retain_graph=True,
                materialize_grads=True,
            )
            found = torch.cat([each.reshape(-1).to(product.dtype) for each in seconds])
            product.add_(found, alpha=scale)
    return products


def bases_of(
    weights: Sequence[Tensor], optimizer: Optimizer
) -> list[tuple[bases.Basis, bases.Basis]]:
    """Left and right basis of each weight, `[B, s, s]`; None: the identity."""
    found = []
    for weight in weights:
        state = optimizer.state.get(weight, {})
        kept = state if state.get("step", 0) > 0 else {}
        left, right = (kept.get(f"{side}_basis") for side in ("left", "right"))
        found.append((_batched(left), _batched(right)))
    return found


def turn(
    vectors: Tensor,
    weights: Sequence[Tensor],
    turns: Sequence[tuple[bases.Basis, bases.Basis]],
    *,
    back: bool = False,
) -> Tensor:
    """Q^T v for each row of `vectors` `[draws, n]`; with `back` Q v."""
    how = bases.unrotate if back else bases.rotate
    turned = torch.empty_like(vectors)
    sizes = [weight.numel() for weight in weights]
    for v, out in zip(vectors, turned, strict=True):
        parts = zip(v.split(sizes), out.split(sizes), weights, turns, strict=True)
        for given, taken, weight, (left, right) in parts:
            if left is None and right is None:
                taken.copy_(given)
                continue
            shape = -1, *weight.shape[-2:]
            left, right = (None if e is None else e.to(vectors.dtype) for e in (left, right))
            how(given.view(shape), left, right, out=taken.view(shape))
    return turned


def _scale(vector: Tensor, weights: Sequence[Tensor]) -> float:
    """A power of two: 1, unless parts of the vector in float16 would be large enough to overflow,
    as Cauchy draws are."""
    if all(weight.dtype != torch.float16 for weight in weights):
        return 1.0
    return 2.0 ** max(0, frexp(vector.abs().max().item())[1] - 8)


def _batched(basis: bases.Basis) -> bases.Basis:
    return None if basis is None else basis.reshape(-1, *basis.shape[-2:])


def _one_norm(products: Tensor) -> float:
    """||H||_11 from H z of Cauchy draws z, one in a row."""
    return products.abs().median(dim=0).values.sum(dtype=torch.float64).item()
