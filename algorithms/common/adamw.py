"""torch's AdamW (Loshchilov and Hutter, 1711.05101) from a config; decay goes to matrices only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn import Parameter
from torch.optim import AdamW, Optimizer

from algorithms.common.config import AdamWConfig


def adamw(model: nn.Module, config: AdamWConfig) -> AdamW:
    """Over the parameters that are trained; no weight decay on norms and biases."""
    return AdamW(
        by_decay([p for p in model.parameters() if p.requires_grad], config),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


def by_decay(parameters: Sequence[Parameter], config: AdamWConfig) -> list[dict[str, Any]]:
    """Groups of `parameters`: those that decay and the others."""
    if config.weight_decay == 0:  # a group is a call of the fused kernel
        return [{"params": list(parameters), "weight_decay": 0.0}]
    matrices = [p for p in parameters if p.dim() >= 2]
    others = [p for p in parameters if p.dim() < 2]
    return [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]


def set_rate(optimizer: Optimizer, lr: float) -> None:
    """The learning rate of all groups."""
    for group in optimizer.param_groups:
        group["lr"] = lr
