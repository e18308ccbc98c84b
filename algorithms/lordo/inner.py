"""Config of an arm -> the optimizer of a rank's own steps; what a step asks of any of them.

Weight decay goes to matrices only, as in `adamw`; which matrices have low-rank or orthogonalised
momentum is decided by `selection`.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from algorithms.common.adamw import adamw, by_decay, set_rate
from algorithms.lordo.config import ArmConfig
from algorithms.lordo.lowrank_ddp import LowRankDdp
from algorithms.lordo.muon import LowRankMuon, Muon
from algorithms.lordo.optimizer import LoRDO
from algorithms.lordo.selection import describe, low_rank_names

log = logging.getLogger(__name__)


def build(model: nn.Module, arm: ArmConfig) -> Optimizer:
    """The inner optimizer of `arm` over all parameters of `model`. Raises `InputError`."""
    config = arm.optimizer
    if arm.inner == "adamw" and arm.low_rank is None:
        return adamw(model, config)
    patterns = arm.low_rank.parameters if arm.low_rank is not None else []
    names = low_rank_names(model, patterns)
    what = "orthogonalised momentum" if arm.inner == "muon" else "low-rank moments"
    log.info("%s", describe(model, names, what))
    chosen = [p for name, p in model.named_parameters() if name in names]
    shared: dict[str, Any] = {
        "lr": config.lr,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }
    rest = by_decay([p for name, p in model.named_parameters() if name not in names], config)
    if arm.inner == "muon":
        return Muon([{"params": chosen, "matrices": True}, *rest], momentum=arm.momentum, **shared)
    low_rank = arm.low_rank
    assert low_rank is not None  # ArmConfig has checked
    groups = [{"params": chosen, "rank": low_rank.rank}, *rest]
    if arm.method == "lowrank_ddp":
        return LowRankDdp(groups, error_feedback=low_rank.error_feedback, **shared)
    if arm.inner == "lordo_ns":
        return LowRankMuon(groups, momentum=arm.momentum, carry=low_rank.carry, **shared)
    return LoRDO(
        groups,
        qhm=low_rank.qhm,
        omega=low_rank.omega,
        mu=low_rank.mu,
        scaling=low_rank.scaling,
        error_feedback=low_rank.error_feedback,
        local=low_rank.projection == "local",
        **shared,
    )


def clip(model: nn.Module, clip_norm: float) -> Tensor:
    """Global L2 norm of the gradient before clipping, a scalar; clips it (0: only measures it)."""
    return nn.utils.clip_grad_norm_(model.parameters(), clip_norm or torch.inf)


def descend(optimizer: Optimizer, lr: float) -> None:
    """A step at that rate; clears the gradients."""
    set_rate(optimizer, lr)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
