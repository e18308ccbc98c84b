"""AdamW (1711.05101) for what an optimizer of matrices leaves: embeddings, norms, head."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

KEPT = ("exp_avg", "exp_avg_sq")
"""State of a weight beside its step."""


class DenseWeights:
    """Weights of one group, dtype and device, and their state as in torch.optim.AdamW."""

    def __init__(self, parameters: Sequence[Parameter], group: int) -> None:
        self.parameters: list[Tensor] = list(parameters)
        self.group = group
        self._steps = torch.zeros(len(self.parameters), device=self.parameters[0].device)
        self._counts = list(self._steps.unbind())
        self._first = [torch.zeros_like(each) for each in self.parameters]
        self._second = [torch.zeros_like(each) for each in self.parameters]

    def states(self) -> Iterable[tuple[Tensor, dict[str, Tensor]]]:
        """Every weight with its state, zero at first; what is written into that is used."""
        for parameter, *values in zip(
            self.parameters, self._counts, self._first, self._second, strict=True
        ):
            yield parameter, dict(zip(("step", *KEPT), values, strict=True))

    def update(self, options: Mapping[str, Any]) -> None:
        """One step of those that have a gradient, with `lr`, `betas`, `eps` and `weight_decay`."""
        lists = [self.parameters, self._first, self._second, self._counts]
        gradients = [each.grad for each in self.parameters if each.grad is not None]
        if not gradients:
            return
        if len(gradients) == len(self.parameters):
            self._steps += 1
        else:
            chosen = [i for i, each in enumerate(self.parameters) if each.grad is not None]
            lists = [[each[i] for i in chosen] for each in lists]
            torch._foreach_add_(lists[3], 1)
        parameters, first, second, steps = lists
        beta1, beta2 = options["betas"]
        # What torch.optim.AdamW(fused=True) calls, without its grouping at every step.
        torch._fused_adamw_(
            parameters,
            gradients,
            first,
            second,
            [],
            steps,
            lr=options["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=options["weight_decay"],
            eps=options["eps"],
            amsgrad=False,
            maximize=False,
        )


def by_kind(parameters: Iterable[Parameter]) -> list[list[Parameter]]:
    """Parameters of one dtype and device each."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    return list(kinds.values())
