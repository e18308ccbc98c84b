"""Plain dataclasses that describe a run. No torch and no pydantic, so every floor can read them.

`tasks/config.py` fills them from params.yaml with pydantic; a job fills them from its config.json
with `from_dict`. Both run `__post_init__`, so a value is checked wherever it comes from.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

from algorithms.common.errors import FieldError, InputError

C = TypeVar("C", bound="Config")


def require(condition: bool, name: str, message: str) -> None:
    """Raise `FieldError` for field `name` unless `condition` holds."""
    if not condition:
        raise FieldError(name, message)


class Config:
    """Base of all configs: unknown keys and wrong types are errors."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "strict": True}

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)  # type: ignore[call-overload, no-any-return]


def from_dict(cls: type[C], values: dict[str, Any]) -> C:
    """Build `cls` from what `to_dict` gave, nested configs included; for jobs, without pydantic."""
    hints = typing.get_type_hints(cls)
    unknown = sorted(set(values) - set(hints))
    if unknown:
        raise InputError(f"{cls.__name__}: unknown key {unknown[0]!r}")
    return cls(**{name: _convert(hints[name], value) for name, value in values.items()})


def _convert(hint: Any, value: Any) -> Any:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for option in options:
        if isinstance(option, type) and issubclass(option, Config) and isinstance(value, dict):
            return from_dict(option, value)
        if typing.get_origin(option) is dict and isinstance(value, dict):
            element = typing.get_args(option)[1]
            return {key: _convert(element, item) for key, item in value.items()}
        if typing.get_origin(option) is list and isinstance(value, list):
            element = typing.get_args(option)[0]
            return [_convert(element, item) for item in value]
    return value


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Config):
    """Which decoder to train: one of a `transformers` family by its sizes, or a local directory."""

    path: str | None = None
    """A local Hugging Face directory. When given, sizes below are ignored."""
    family: str = "llama"
    """`model_type` of transformers: llama, mistral, qwen2, qwen3, qwen3_moe, ..."""
    hidden_size: int = 128
    intermediate_size: int = 344
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    max_position_embeddings: int = 1024
    tie_word_embeddings: bool = True
    extra: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the family's config class, by their transformers names."""

    def __post_init__(self) -> None:
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "max_position_embeddings",
        ):
            require(getattr(self, name) > 0, name, "must be positive")
        require(
            self.hidden_size % self.num_attention_heads == 0,
            "hidden_size",
            f"must be a multiple of num_attention_heads ({self.num_attention_heads})",
        )
        require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            "num_key_value_heads",
            f"must divide num_attention_heads ({self.num_attention_heads})",
        )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Config):
    """AdamW (Loshchilov and Hutter, 1711.05101) with the schedule of `TrainingConfig`."""

    lr: float = 1e-3
    """Peak learning rate, reached after warm-up."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    """Decoupled; applied to matrices only."""
    clip_norm: float = 1.0
    """Largest global L2 norm of the gradient; 0 turns clipping off."""

    def __post_init__(self) -> None:
        require(self.lr > 0, "lr", "must be positive")
        require(0 <= self.beta1 < 1, "beta1", "must be in [0, 1)")
        require(0 <= self.beta2 < 1, "beta2", "must be in [0, 1)")
        require(self.eps > 0, "eps", "must be positive")
        require(self.weight_decay >= 0, "weight_decay", "must not be negative")
        require(self.clip_norm >= 0, "clip_norm", "must not be negative")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Config):
    """What every pretraining arm shares: ranks, batch, horizon, evaluation, checkpoints."""

    ranks: int = 2
    """Processes on one machine. For several machines see README, "Several nodes"."""
    backend: Literal["gloo", "nccl"] = "gloo"
    """Chosen here, recorded in env.json, never swapped silently. gloo: CPU, nccl: CUDA."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: autocast of the forward pass; weights, gradients and optimizer stay fp32."""
    seed: int = 0
    steps: int = 100
    sequence_length: int = 256
    global_batch: int = 16
    """Sequences per step over all ranks; the same sequences on any number of ranks."""
    accumulation: int = 1
    """Microbatches per step and rank; `global_batch` must be a multiple of ranks times this."""
    warmup_steps: int = 10
    """Linear from 0; then cosine down to `final_lr_fraction` at the last step."""
    final_lr_fraction: float = 0.1
    log_every: int = 10
    eval_every: int = 50
    """Steps between held-out evaluations; the last step is always evaluated."""
    eval_sequences: int = 64
    """Size of the fixed held-out set, in sequences."""
    checkpoint_every: int = 50
    keep_checkpoints: int = 2

    def __post_init__(self) -> None:
        for name in (
            "ranks",
            "steps",
            "sequence_length",
            "global_batch",
            "accumulation",
            "log_every",
            "eval_every",
            "eval_sequences",
            "checkpoint_every",
            "keep_checkpoints",
        ):
            require(getattr(self, name) > 0, name, "must be positive")
        require(0 <= self.warmup_steps <= self.steps, "warmup_steps", "must be in [0, steps]")
        require(0 <= self.final_lr_fraction <= 1, "final_lr_fraction", "must be in [0, 1]")
        require(
            self.global_batch % (self.ranks * self.accumulation) == 0,
            "global_batch",
            f"must be a multiple of ranks x accumulation ({self.ranks} x {self.accumulation})",
        )
