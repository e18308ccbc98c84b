"""Routers of mixture-of-experts models: equal decisions in every pass, and their auxiliary loss.

Replay is exact only if a token goes to the same experts in capture and in recompute. That is
proven: the first pass' decisions are kept (one or two bytes each), every later pass is compared.

Auxiliary loss (Switch Transformer, 2101.03961, eq. 4-6, as transformers computes it over all layers
and tokens): E * sum_e f_e * p_e. The share of tokens f_e carries no gradient, so once pass 1 has
counted it the loss is linear in the router's probabilities and separates over segments. A token of
the prompt counts once per branch, as it would in full sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from algorithms.branch_replay.errors import SelfCheckError
from algorithms.branch_replay.path import accumulator


def find_routers(model: Any) -> list[nn.Module]:
    """Modules that choose experts: those whose logits transformers knows how to record."""
    recorders = getattr(model.base_model, "_can_record_outputs", None) or {}
    recorder = recorders.get("router_logits")
    if recorder is None:
        return []
    kind = getattr(recorder, "target_class", recorder)
    return [module for module in model.modules() if isinstance(module, kind)]


class Routing:
    """What the routers of `model` do in one step."""

    def __init__(self, model: Any) -> None:
        self.routers = find_routers(model)
        self.top_k: int = getattr(model.config.get_text_config(), "num_experts_per_tok", 0)
        self._calls: list[tuple[Tensor, Tensor]] = []
        self._chosen: dict[int, list[Tensor]] = {}
        self.reset()

    def reset(self) -> None:
        """Before pass 1: nothing is known yet."""
        self._chosen.clear()
        self.rows = 0
        """Tokens counted, over all layers and branches."""
        self.counts = torch.zeros((), dtype=torch.float64)
        self.probabilities = torch.zeros((), dtype=torch.float64)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Hooks are on."""
        self._calls.clear()
        hooks = [router.register_forward_hook(self._record) for router in self.routers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _record(self, module: nn.Module, inputs: Any, output: Any) -> None:
        logits, _, chosen = output
        self._calls.append((logits, chosen))

    def take(self, key: int) -> list[Tensor]:
        """Logits [rows, experts] of each router in the forward of segment `key`.

        Raises `SelfCheckError` if it chose other experts than in an earlier pass.
        """
        calls, self._calls = self._calls, []
        chosen = [self._small(indices, logits.shape[-1]) for logits, indices in calls]
        earlier = self._chosen.setdefault(key, chosen)
        for layer, (a, b) in enumerate(zip(earlier, chosen, strict=False)):
            if not torch.equal(a, b):
                moved = int((a != b).any(-1).sum())
                raise SelfCheckError(
                    f"router {layer} sent {moved} of {len(a)} tokens to other experts than in the "
                    "pass before"
                )
        if len(chosen) > len(earlier):
            self._chosen[key] = chosen
        return [logits for logits, _ in calls]

    def _small(self, indices: Tensor, experts: int) -> Tensor:
        kept = indices.sort(-1).values  # some routers leave the order open
        return kept.to(torch.uint8 if experts <= 256 else torch.int16)

    def count(self, logits: list[Tensor], rows: Tensor | slice, branches: int) -> None:
        """Pass 1: add the tokens `rows` (bool [rows]), each of which `branches` branches share."""
        for layer in logits:
            weights = layer[rows].softmax(-1)
            chosen = weights.topk(self.top_k, dim=-1).indices
            hits = torch.bincount(chosen.flatten(), minlength=layer.shape[-1])
            self.counts = self.counts + branches * hits.cpu().double()
            self.probabilities = self.probabilities + branches * weights.sum(0).cpu().double()
            self.rows += branches * len(weights)

    def aux_loss(self) -> float:
        """The loss over all tokens counted."""
        if self.rows == 0:
            return 0.0
        product = (self.counts * self.probabilities).sum() / self.rows**2
        return float(product) * self.counts.numel()

    def linear_loss(
        self, logits: list[Tensor], rows: Tensor | slice, branches: int
    ) -> Tensor | None:
        """Pass 2: a term [] whose gradient is that of `aux_loss` through this segment."""
        if not logits or self.rows == 0:
            return None
        scale = branches * self.counts.numel() / self.rows**2
        dtype = accumulator(logits[0].dtype)
        weight = (scale * self.counts).to(device=logits[0].device, dtype=dtype)
        terms = [(layer[rows].softmax(-1).to(dtype).sum(0) * weight).sum() for layer in logits]
        return torch.stack(terms).sum()
