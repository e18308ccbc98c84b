"""The optimizer of a stage from a config: basis rotation, or what it is compared with.

Baselines are torch's: `adamw` (PipeDream, 1806.03377), `pipedream_lr` the same with rates that
start at lr / tau (PipeMare, 1910.05124), `nesterov` NAdam with beta1 .99 and decoupled decay
(2505.01099). All take the rate lr / (1 + tau)^p. Weight decay goes to matrices only. Two things are
the caller's: gradients are clipped before, once over all parameters of the stage, and each update
has the rate that `rate` says.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import AdamW, NAdam, Optimizer

from algorithms.async_pipeline.basis_rotation import BasisRotation
from algorithms.async_pipeline.config import RotationConfig, StageOptimizerConfig
from algorithms.common.cohort import is_matrix
from algorithms.common.matrix_optimizer import require

VOCABULARY = ("embed_tokens", "lm_head")
"""Modules whose weights have a row for each token; whole components of a dotted name."""


def build(
    named: Iterable[tuple[str, Parameter]],
    config: StageOptimizerConfig,
    *,
    stage: int,
    stages: int,
    delays: Sequence[int] | None = None,
) -> Optimizer:
    """The optimizer over the named parameters of stage `stage` of `stages`.

    `delays` are tau of all stages in updates, P-1-k where not given. The optimizer's rate is that
    of the first update; `rate` says the later ones. Raises `InputError` for a value out of range.
    """
    if delays is None:
        delays = range(stages - 1, -1, -1)
    require("stage", stage, 0 <= stage < stages)
    settings = config.optimizer
    lr = rate(config, settings.lr, delay=delays[stage], update=0)
    shared: dict[str, Any] = {
        "lr": lr,
        "betas": (settings.beta1, settings.beta2),
        "eps": settings.eps,
        "weight_decay": settings.weight_decay,
    }
    matrices, vocabulary, others = _kinds(named)
    rotation = config.rotation
    if rotation is None:
        groups: list[dict[str, Any]] = [
            {"params": [*matrices, *vocabulary]},
            {"params": others, "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        if config.name == "nesterov":
            decay = config.momentum_decay
            return NAdam(groups, momentum_decay=decay, decoupled_weight_decay=True, **shared)
        return AdamW(groups, fused=True, **shared)
    short = "unilateral" if rotation.vocabulary == "short_side" else "none"
    groups = [
        {"params": matrices},
        {"params": vocabulary, "geometry": short},
        {"params": others, "geometry": "none", "weight_decay": 0.0},
    ]
    return BasisRotation(
        [group for group in groups if group["params"]],
        source=rotation.source,
        geometry=rotation.geometry,
        refresh_every=refresh_interval(rotation, stage=stage, delays=delays),
        refresh_blocks=rotation.refresh_blocks,
        nu=rotation.nu,
        max_side=rotation.max_side,
        **shared,
    )


def rate(config: StageOptimizerConfig, lr: float, *, delay: int, update: int) -> float:
    """The rate of a stage with this `delay` in update `update`, counted from 0, where the schedule
    says `lr`."""
    lr /= (1 + delay) ** config.rate_power
    if config.name == "pipedream_lr" and delay > 0:
        lr /= delay ** (1 - min(update / config.correction_steps, 1.0))
    return lr


def refresh_interval(rotation: RotationConfig, *, stage: int, delays: Sequence[int]) -> int:
    """Updates between refreshes of stage `stage`, at least 1.

    With a budget that is not uniform a stage's share of all refreshes is proportional to tau + 1/2,
    or that of the stage as far from the other end: the half leaves a few to the last stage, whose
    gradients are not stale.
    """
    if rotation.refresh_budget == "uniform":
        return rotation.refresh_every
    shares = [delay + 0.5 for delay in delays]
    if rotation.refresh_budget == "reversed":
        shares.reverse()
    interval = rotation.refresh_every * sum(shares) / (len(shares) * shares[stage])
    return max(1, round(interval))


def _kinds(
    named: Iterable[tuple[str, Parameter]],
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Matrices of the layers, those of the vocabulary, and the rest."""
    kinds: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
    for name, parameter in named:
        of_vocabulary = not set(VOCABULARY).isdisjoint(name.split("."))
        kinds[2 if not is_matrix(parameter) else int(of_vocabulary)].append(parameter)
    return kinds
