"""Captured prompts, and how far they may fall behind the weights.

With `refresh_every` K a captured prompt serves K optimizer steps (mode `response_only`; LongStraw
reports one or two as usable). Its age is bounded by K and, in between, by a canary: the state of
the prompt's first chunk, which depends on nothing before it, is computed under the new weights and
compared. When a prompt is recaptured, the step is taken with both states and the difference is
reported: the cosine of the gradients and the mean |change| of a log-probability. A difference of
losses would say little.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from algorithms.branch_replay.attention import Outputs, Run, running
from algorithms.branch_replay.config import ReplayConfig
from algorithms.branch_replay.moe import Decision
from algorithms.branch_replay.path import Path
from algorithms.branch_replay.state import State
from algorithms.branch_replay.tree import Segment
from algorithms.branch_replay.trunk import Trunk
from algorithms.branch_replay.versions import Fingerprint


@dataclass
class Captured:
    """A prompt's state. Made by `BranchReplay.capture`, good for the weights it was made with."""

    tokens: Tensor
    """int64 [n], or [prompts, n]."""
    path: Path
    states: dict[int, State]
    """Recurrent states by the position at which a piece of the prompt ends."""
    version: Fingerprint
    seen: Fingerprint
    """Weights of its last use."""
    config: ReplayConfig
    """Settings it was made with."""
    outputs: dict[int, Outputs] = field(default_factory=dict)
    """What attention gave, by the same position; with `keep_attention`."""
    decisions: dict[int, Decision] = field(default_factory=dict)
    """Of routers, by the same position."""
    age: int = 0
    """How often the weights have changed since."""

    @property
    def length(self) -> int:
        """Tokens of a prompt whose state is kept: all but the last."""
        return self.tokens.shape[-1] - 1

    @property
    def prompts(self) -> int:
        """How many were captured together."""
        return len(self.tokens) if self.tokens.ndim == 2 else 1


@dataclass
class Drift:
    """How far a reused prompt was behind."""

    age: int
    state_change: float
    """Relative L2 of the first chunk's keys, values and recurrent states; the bound is on this."""
    recaptured: bool
    gradient_cosine: float | None = None
    """Of the gradients with the old and the fresh prompt, over all parameters; only measured when
    recaptured, as it takes both."""
    log_prob_change: float | None = None
    """Mean |difference| of a log-probability between the two; likewise."""


def state_change(trunk: Trunk, captured: Captured, first: Segment) -> float:
    """Relative L2 change of the state of the prompt's `first` piece under the present weights."""
    run = Run(None, 0, trunk.top)
    with torch.no_grad(), running(run):
        _, fresh = trunk.forward(first.rows, run, {})
    pairs = [(kept, captured.states[first.end][key]) for key, kept in fresh.items()]
    for new, buffers in ((run.keys, captured.path.keys), (run.values, captured.path.values)):
        pairs += [
            (kept.flatten(0, 1), buffers[layer][:, : first.end]) for layer, kept in new.items()
        ]
    moved = sum(
        float((new.double().cpu() - old.double().cpu()).square().sum()) for new, old in pairs
    )
    size = sum(float(old.double().square().sum()) for _, old in pairs)
    return math.sqrt(moved / size) if size else 0.0


def mean_change(a: list[Tensor], b: list[Tensor]) -> float:
    """Mean |difference| of two lists of log-probabilities."""
    x, y = torch.cat(a), torch.cat(b)
    return float((x - y).abs().mean()) if len(x) else 0.0


def cosine(a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> float:
    """Between two gradients over all parameters; 1 for two zeros."""
    product = norm_a = norm_b = 0.0
    for x, y in zip(a, b, strict=True):
        norm_a += 0.0 if x is None else float(x.double().square().sum())
        norm_b += 0.0 if y is None else float(y.double().square().sum())
        if x is not None and y is not None:
            product += float((x.double() * y.double()).sum())
    if norm_a == norm_b == 0.0:
        return 1.0
    return product / max(math.sqrt(norm_a * norm_b), 1e-300)
