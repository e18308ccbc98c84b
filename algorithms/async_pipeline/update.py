"""One update of one stage, the same in the pipeline and in its reference.

The one clipping rule of all methods is in here: per stage, over all of the stage's parameters at
once. A norm over all stages would have to wait for the slowest of them at every update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import isfinite

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from algorithms.common.errors import InputError, NonFiniteError

Loss = Callable[[Tensor, Tensor], Tensor]
"""Of the last stage's output and the targets: a scalar."""
Factory = Callable[[list[tuple[str, nn.Parameter]], int, int], Optimizer]
"""Of a stage's named parameters, its number k and the number P of stages."""
BeforeUpdate = Callable[[Optimizer, int], None]
"""Of a stage's optimizer and the update, from 0; it may set a learning rate."""
Weights = Mapping[str, Tensor]
"""Of a stage, by the names that they have in the model."""


def weights_of(stage: nn.Module) -> dict[str, nn.Parameter]:
    """All that is trained of a stage, by name. Raises `InputError` for a frozen parameter: copies
    of the weights are differentiated, so it would be trained."""
    weights = dict(stage.named_parameters())
    for name, weight in weights.items():
        if not weight.requires_grad:
            raise InputError(f"{name}: is frozen; a pipeline trains all parameters of its stages")
    return weights


def objective(loss: Tensor, accumulation: int) -> Tensor:
    """What a microbatch differentiates: its share of `loss`, or NaN where that is not finite, since
    an infinite loss can have a finite gradient."""
    guarded = loss * torch.where(torch.isfinite(loss), 1.0, torch.nan)
    return guarded / accumulation


def accumulate(
    weights: Weights, gradients: Sequence[Tensor | None], sent: Tensor | None = None
) -> None:
    """Add one microbatch's `gradients`, in the order of `weights`, to their `grad`. `sent` is the
    gradient of the stage's input, which others read."""
    for weight, gradient in zip(weights.values(), gradients, strict=True):
        if gradient is not None:
            weight.grad = gradient if weight.grad is None else weight.grad + gradient
    separate(weights.values(), [] if sent is None else [memory(sent)])


def separate(weights: Iterable[Tensor], taken: Iterable[int] = ()) -> None:
    """Give each `grad` memory of its own, since clipping writes into it: autograd may give one
    tensor to two weights, or as the gradient of an input too, and expand one number. `taken`: what
    `memory` says of others."""
    seen = set(taken)
    for weight in weights:
        if weight.grad is None:
            continue
        place = memory(weight.grad)
        if place in seen or 0 in weight.grad.stride():
            weight.grad = weight.grad.clone()
        seen.add(place)


def memory(tensor: Tensor) -> int:
    """Where the memory starts that a tensor may share with others."""
    return tensor.untyped_storage().data_ptr()


def apply(
    weights: Weights,
    optimizer: Optimizer,
    *,
    stage: int,
    update: int,
    clip_norm: float,
    before_update: BeforeUpdate | None,
) -> float:
    """Clip the gradients of `weights` to `clip_norm` (0: do not), step, and drop them. Returns
    their L2 norm before clipping.

    Raises `NonFiniteError` that names update, stage and parameter before a weight is touched.
    """
    gradients = [weight.grad for weight in weights.values() if weight.grad is not None]
    norm = get_total_norm(gradients)
    value: float = norm.item()
    if not isfinite(value):
        raise NonFiniteError(examine(weights, stage=stage, update=update).text)
    if clip_norm > 0:
        held = [weight for weight in weights.values() if weight.grad is not None]
        clip_grads_with_norm_(held, clip_norm, norm)
    if before_update is not None:
        before_update(optimizer, update)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return value


def bad_weight(weights: Weights) -> str:
    """The first weight that is not finite, in words; nothing if all are."""
    for name, weight in weights.items():
        if not weight.isfinite().all():
            return f"parameter {name} is not finite"
    return ""


def bad_gradient(weights: Weights) -> str:
    """The first gradient that is not finite, in words; nothing if all are."""
    for name, weight in weights.items():
        if weight.grad is not None and not weight.grad.isfinite().all():
            return f"gradient of {name} is not finite"
    return ""


class Kind(IntEnum):
    """What a stage has found, the surest cause first."""

    WEIGHT = 0
    GRADIENT = 1
    MESSAGE = 2
    """It learnt of it from another."""


@dataclass(frozen=True)
class Finding:
    """Why a stage cannot go on."""

    kind: Kind
    when: int
    """The update; of a message the microbatch."""
    stage: int
    text: str


def examine(weights: Weights, *, stage: int, update: int, losses: Iterable[Tensor] = ()) -> Finding:
    """What is not finite in a stage that cannot make `update`; `losses` are those of the update's
    microbatches, on the last stage."""
    bad = bad_weight(weights)
    kind = Kind.WEIGHT if bad else Kind.GRADIENT
    said = bad or bad_gradient(weights) or "the gradient's norm overflows"
    text = f"update {update}: stage {stage}: {said}"
    for loss in losses:
        if not loss.isfinite():
            return Finding(kind, update, stage, f"{text}, loss is {loss.item()}")
    return Finding(kind, update, stage, text)


def cause(findings: Iterable[Finding]) -> Finding | None:
    """Of all stages' findings that which explains the others: a bad weight, else the first gradient
    that was not finite. Of one update that of the last stage, since gradients go from the last
    stage to the first."""
    return min(findings, key=lambda each: (each.kind, each.when, -each.stage), default=None)
