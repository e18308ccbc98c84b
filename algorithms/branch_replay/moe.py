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
from dataclasses import dataclass, field
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


@dataclass
class Tally:
    """What the auxiliary loss counts, over all layers, in float64 on the CPU."""

    rows: int = 0
    """Tokens."""
    hits: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    """[experts], how many tokens an expert was chosen for."""
    probabilities: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    """[experts], sums over tokens."""

    def add(self, other: Tally, times: int) -> None:
        """Add `other`, which `times` branches share."""
        self.rows += times * other.rows
        self.hits = self.hits + times * other.hits
        self.probabilities = self.probabilities + times * other.probabilities

    def loss(self) -> float:
        """The auxiliary loss over all tokens counted."""
        if self.rows == 0:
            return 0.0
        product = (self.hits * self.probabilities).sum() / self.rows**2
        return float(product) * self.hits.numel()

    def linear_loss(
        self, logits: list[Tensor], rows: Tensor | slice, branches: int
    ) -> Tensor | None:
        """Pass 2: a term [] whose gradient is that of `loss` through one segment."""
        if not logits or self.rows == 0:
            return None
        scale = branches * self.hits.numel() / self.rows**2
        dtype = accumulator(logits[0].dtype)
        weight = (scale * self.hits).to(device=logits[0].device, dtype=dtype)
        terms = [(layer[rows].softmax(-1).to(dtype).sum(0) * weight).sum() for layer in logits]
        return torch.stack(terms).sum()


@dataclass
class Decision:
    """What the routers did with a segment when it was first run."""

    experts: list[Tensor]
    """By layer [rows, top_k], sorted."""
    tally: Tally | None = None
    """Of one branch; with an auxiliary loss."""

    def check(self, later: list[Tensor]) -> None:
        """Raise `SelfCheckError` if `later`, the experts of another pass, are not the same."""
        for layer, (a, b) in enumerate(zip(self.experts, later, strict=False)):
            if not torch.equal(a, b):
                moved = int((a != b).any(-1).sum())
                raise SelfCheckError(
                    f"router {layer} sent {moved} of {len(a)} tokens to other experts than in the "
                    "pass before"
                )
        if len(later) > len(self.experts):  # the first run stopped below the last router
            self.experts = later


@dataclass
class Decisions:
    """Of one step, so that a step or a scoring inside a loss has its own."""

    by_segment: dict[int, Decision] = field(default_factory=dict)
    """Keys are ids: the step's plans keep its segments alive."""
    tally: Tally = field(default_factory=Tally)


Calls = list[tuple[Tensor, Tensor]]
"""Of each router in one forward: logits [rows, experts], chosen experts [rows, top_k]."""


class Routing:
    """The routers of `model`."""

    def __init__(self, model: Any) -> None:
        self.routers = find_routers(model)
        self.top_k: int = getattr(model.config.get_text_config(), "num_experts_per_tok", 0)

    @contextmanager
    def recording(self) -> Iterator[Calls]:
        """Around one forward: what the routers do in it, and in no other."""
        calls: Calls = []

        def record(module: nn.Module, inputs: Any, output: Any) -> None:
            logits, _, chosen = output
            calls.append((logits, chosen))

        hooks = [router.register_forward_hook(record) for router in self.routers]
        try:
            yield calls
        finally:
            for hook in hooks:
                hook.remove()

    def experts(self, calls: Calls) -> list[Tensor]:
        """The chosen experts, to be kept."""
        return [_small(indices, logits.shape[-1]) for logits, indices in calls]

    def tally(self, calls: Calls, rows: Tensor | slice) -> Tally:
        """Count the tokens `rows` (bool [rows])."""
        tally = Tally()
        for logits, _ in calls:
            weights = logits[rows].softmax(-1)
            chosen = weights.topk(self.top_k, dim=-1).indices
            hits = torch.bincount(chosen.flatten(), minlength=logits.shape[-1])
            layer = Tally(len(weights), hits.cpu().double(), weights.sum(0).cpu().double())
            tally.add(layer, 1)
        return tally


def _small(indices: Tensor, experts: int) -> Tensor:
    kept = indices.sort(-1).values  # some routers leave the order open
    return kept.to(torch.uint8 if experts <= 256 else torch.int16)
