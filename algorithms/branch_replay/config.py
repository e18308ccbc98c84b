"""Knobs of the replay engine. No torch here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from algorithms.common.config import Config, require


@dataclass(frozen=True, kw_only=True)
class ReplayConfig(Config):
    """How a tree of branches is replayed; the gradient of `exact` depends on none of the others."""

    mode: Literal["exact", "response_only", "truncated"] = "exact"
    """exact: the whole gradient. response_only: the prompt's state is a constant (what LongStraw
    computes). truncated: the gradient passes through the last `truncated_chunks` of the prompt."""
    truncated_chunks: int = 0
    """Of mode `truncated` only."""
    chunk: int = 1024
    """Most tokens of a node that are in the autograd graph at once; bounds memory."""
    branches_per_pass: int = 8
    """Branches that are run as one batch: more is faster, memory grows with it."""
    head_chunk: int = 1024
    """Tokens whose logits exist at once."""
    keep_attention: bool = False
    """Keep what attention gave for the prompt, so that the sweep does not compute it again: up to
    a fifth less time, for as many values per token and layer as the heads of queries have."""
    offload: bool = False
    """Keep the prompt's keys, values and their cotangents in host memory. Attention forward runs
    twice then."""
    window: int | None = None
    """Positions that attention sees, its own included, in every layer; None: as the model says."""
    kv_dtype: Literal["model", "bf16"] = "model"
    """How the prompt's keys and values are kept. bf16 halves them and rounds what branches see."""
    tolerance: float | None = None
    """Largest |difference| of a log-probability between pass 1 and pass 2, past which the step
    fails; None chooses by dtype."""
    aux_loss: float = 0.0
    """Coefficient of the load-balancing loss of mixture-of-experts models; 0 leaves it out."""
    refresh_every: int = 1
    """Steps for which a captured prompt is used. Above 1 (`response_only`) it is older than the
    weights in between; the drift is measured and reported."""
    refresh_bound: float = 0.05
    """Relative L2 change of the first chunk's state past which the prompt is recaptured early."""

    def __post_init__(self) -> None:
        self._check_types()
        for name in ("chunk", "branches_per_pass", "head_chunk", "refresh_every"):
            require(getattr(self, name) > 0, name, "must be positive")
        require(self.window is None or self.window > 0, "window", "must be positive")
        require(self.truncated_chunks >= 0, "truncated_chunks", "must not be negative")
        require(
            self.mode != "truncated" or self.truncated_chunks > 0,
            "truncated_chunks",
            "must be positive in mode truncated; with none, take mode response_only",
        )
        require(
            self.mode == "truncated" or self.truncated_chunks == 0,
            "truncated_chunks",
            f"has no effect in mode {self.mode}",
        )
        require(
            self.mode == "response_only" or self.refresh_every == 1,
            "refresh_every",
            f"must be 1 in mode {self.mode}: a gradient through an older prompt is undefined",
        )
        require(
            self.refresh_every == 1 or self.aux_loss == 0,
            "aux_loss",
            "must be 0 with refresh_every above 1: the prompt's routing is not counted anew",
        )
        require(
            not self.keep_attention or self.mode != "response_only",
            "keep_attention",
            "has no effect in mode response_only, which has no sweep",
        )
        require(
            not self.keep_attention or not (self.offload or self.kv_dtype == "bf16"),
            "keep_attention",
            "has no effect with offload or a kv_dtype of bf16: it is for where memory is plenty",
        )
        require(self.tolerance is None or self.tolerance >= 0, "tolerance", "must not be negative")
        require(0 <= self.aux_loss < math.inf, "aux_loss", "must be finite, not negative")
        require(self.refresh_bound >= 0, "refresh_bound", "must not be negative")

    def _check_types(self) -> None:
        """Outside pydantic nobody does, and most wrong values would be a setting in silence."""
        for name, allowed in (
            ("mode", ("exact", "response_only", "truncated")),
            ("kv_dtype", ("model", "bf16")),
        ):
            value = getattr(self, name)
            known = isinstance(value, str) and value in allowed
            require(known, name, f"must be one of {', '.join(allowed)}, not {value!r}")
        integers = ("truncated_chunks", "chunk", "branches_per_pass", "head_chunk", "refresh_every")
        for name in (*integers, "window"):
            value = getattr(self, name)
            empty = name == "window" and value is None
            require(empty or type(value) is int, name, f"must be an integer, not {value!r}")
        for name in ("keep_attention", "offload"):
            value = getattr(self, name)
            require(isinstance(value, bool), name, f"must be True or False, not {value!r}")
        for name in ("tolerance", "aux_loss", "refresh_bound"):
            value = getattr(self, name)
            empty = name == "tolerance" and value is None
            require(empty or is_number(value), name, f"must be a number, not {value!r}")


def is_number(value: Any) -> bool:
    """Whether it is an int or a float; True, False and NaN are none."""
    return type(value) in (int, float) and not math.isnan(value)
