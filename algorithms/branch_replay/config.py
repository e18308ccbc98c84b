"""Knobs of replay, rollouts, objectives, updates and adapters. No torch here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from algorithms.common.config import Config, require, require_positive

COUNTS = ("chunk", "branches_per_pass", "prompts_per_pass", "head_chunk", "refresh_every")
"""Of `ReplayConfig`, 1 or more."""


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
    """Branches of a prompt that are run as one batch: more is faster, memory grows with it."""
    prompts_per_pass: int = 1
    """Prompts of equal length that are run as one batch where a learner has many; as above."""
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
        require_positive(self, *COUNTS)
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
        require(
            self.prompts_per_pass == 1 or self.aux_loss == 0,
            "aux_loss",
            "must be 0 with prompts_per_pass above 1",
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
        _require_integers(self, "truncated_chunks", *COUNTS)
        if self.window is not None:
            _require_integers(self, "window")
        for name in ("keep_attention", "offload"):
            value = getattr(self, name)
            require(isinstance(value, bool), name, f"must be True or False, not {value!r}")
        _require_numbers(self, "aux_loss", "refresh_bound")
        if self.tolerance is not None:
            _require_numbers(self, "tolerance")


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(Config):
    """How responses are sampled. Their log-probabilities are the model's own whatever is set here:
    of the whole vocabulary at temperature 1, as vLLM reports them and as replay scores them."""

    max_tokens: int
    """Most tokens of a response; one without an end by then is truncated."""
    temperature: float = 1.0
    """0: the likeliest token each time."""
    top_p: float = 1.0
    """Sample among the fewest tokens that hold this probability."""
    batch: int = 8
    """Branches of a prompt that are sampled at a time."""

    def __post_init__(self) -> None:
        _require_integers(self, "max_tokens", "batch")
        require_positive(self, "max_tokens", "batch")
        _require_numbers(self, "temperature", "top_p")
        require(0 <= self.temperature < math.inf, "temperature", "must be finite, not negative")
        require(0 < self.top_p <= 1, "top_p", "must be in (0, 1]")


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig(Config):
    """What is minimised; the formulas are in `objectives.py`."""

    name: Literal["grpo", "dr_grpo", "dapo", "gspo", "rloo", "ppo", "dpo", "ipo"] = "grpo"
    clip_low: float | None = None
    """How far a ratio may fall below 1; None: as the objective's paper has it."""
    clip_high: float | None = None
    """How far above."""
    beta: float = 0.1
    """Of `dpo` and `ipo`: strength of the bond to the reference."""
    kl: float = 0.0
    """Coefficient of the KL to the reference."""
    kl_kind: Literal["k1", "k2", "k3"] = "k3"
    entropy: float = 0.0
    """Coefficient of the entropy, which is raised; its gradient is that of on-policy samples."""
    value: float = 0.0
    """Coefficient of the squared error of a value head, of `ppo`. Above 0 advantages are those of
    its values, by token; at 0 they are the group's."""
    gamma: float = 1.0
    """Discount per token of what comes later."""
    gae_lambda: float = 1.0
    """1: the reward less the value; 0: one step of temporal difference."""

    @property
    def pairwise(self) -> bool:
        """Whether responses are compared in pairs, which needs a reference and has no ratio."""
        return self.name in ("dpo", "ipo")

    @property
    def needs_reference(self) -> bool:
        return self.pairwise or self.kl > 0

    @property
    def clip(self) -> tuple[float, float]:
        """Below and above 1."""
        low, high = {"dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4)}.get(self.name, (0.2, 0.2))
        return (
            low if self.clip_low is None else self.clip_low,
            high if self.clip_high is None else self.clip_high,
        )

    def __post_init__(self) -> None:
        clips = [name for name in ("clip_low", "clip_high") if getattr(self, name) is not None]
        numbers = (*clips, "beta", "kl", "entropy", "value", "gamma", "gae_lambda")
        _require_numbers(self, *numbers)
        for name in numbers:
            require(0 <= getattr(self, name) < math.inf, name, "must be finite, not negative")
        require(self.beta > 0, "beta", "must be positive")
        require(self.clip_low is None or self.clip_low < 1, "clip_low", "must be below 1")
        unclipped = self.pairwise or self.name == "rloo"
        for name in clips:
            require(not unclipped, name, f"has no effect on {self.name}")
        for name in ("kl", "entropy"):
            zero = getattr(self, name) == 0
            require(zero or not self.pairwise, name, f"must be 0 with {self.name}")
        require(self.value == 0 or self.name == "ppo", "value", f"must be 0 with {self.name}")
        for name in ("gamma", "gae_lambda"):
            share = getattr(self, name)
            require(share <= 1, name, "must be at most 1")
            require(share == 1 or self.value > 0, name, "has no effect without a value")


@dataclass(frozen=True, kw_only=True)
class LearnerConfig(Config):
    """One update: rollouts of some prompts, then one or more optimizer steps on them."""

    group: int = 8
    """Responses to each question."""
    inner_epochs: int = 1
    """Optimizer steps on the same rollouts; from the second on prompts are captured anew."""
    clip_norm: float = 1.0
    """Largest global L2 norm of the gradient; 0 turns clipping off."""
    naive: bool = False
    """Gradients by full sequences instead of replay: slow, and the same."""

    def __post_init__(self) -> None:
        _require_integers(self, "group", "inner_epochs")
        require_positive(self, "group", "inner_epochs")
        _require_numbers(self, "clip_norm")
        require(0 <= self.clip_norm < math.inf, "clip_norm", "must be finite, not negative")


@dataclass(frozen=True, kw_only=True)
class LoRAConfig(Config):
    """Adapters that are trained in place of the weights (`lora.py`)."""

    rank: int = 8
    """Of each adapter's product."""
    alpha: float = 16.0
    """Its product is multiplied by alpha / rank."""
    targets: list[str] | None = None
    """Names of the modules that get one, such as q_proj; None: every linear one but the head."""

    def __post_init__(self) -> None:
        _require_integers(self, "rank")
        require_positive(self, "rank")
        _require_numbers(self, "alpha")
        require(0 < self.alpha < math.inf, "alpha", "must be positive and finite")
        require(self.targets is None or len(self.targets) > 0, "targets", "must name a module")


def is_number(value: Any) -> bool:
    """Whether it is an int or a float; True, False and NaN are none."""
    return type(value) in (int, float) and value == value  # math.isnan takes no 10**400


def _require_integers(config: Config, *names: str) -> None:
    """Raise `FieldError` for the first of these fields that is no integer."""
    for name in names:
        value = getattr(config, name)
        require(type(value) is int, name, f"must be an integer, not {value!r}")


def _require_numbers(config: Config, *names: str) -> None:
    """Raise `FieldError` for the first of these fields that is no number."""
    for name in names:
        value = getattr(config, name)
        require(is_number(value), name, f"must be a number, not {value!r}")
