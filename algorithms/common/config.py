"""Plain dataclasses that describe a run. No torch and no pydantic, so every floor can read them.

`tasks/config.py` fills them from params.yaml with pydantic; a job fills them from its config.json
with `from_dict`. Both run `__post_init__`, so a value is checked wherever it comes from.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

from algorithms.common.errors import FieldError, InputError

C = TypeVar("C", bound="Config")


def require(condition: bool, name: str, message: str) -> None:
    """Raise `FieldError` for field `name` unless `condition` holds."""
    if not condition:
        raise FieldError(name, message)


def require_positive(config: Config, *names: str) -> None:
    """Raise `FieldError` for the first of these fields that is not above zero."""
    for name in names:
        require(getattr(config, name) > 0, name, "must be positive")


class Config:
    """Base of all configs: pydantic refuses unknown keys and wrong types, `from_dict` keys."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "strict": True}

    def to_dict(self) -> dict[str, Any]:
        """Plain values, nested configs included; what `from_dict` reads."""
        return dataclasses.asdict(self)  # type: ignore[call-overload, no-any-return]


def from_dict(cls: type[C], values: dict[str, Any]) -> C:
    """Build `cls` from what `to_dict` gave, nested configs included; for jobs, without pydantic.

    Raises `InputError` naming the class and key for an unknown or missing key or a bad value.
    """
    hints = {name: typing.get_type_hints(cls)[name] for name in _field_names(cls)}
    if unknown := sorted(set(values) - set(hints)):
        raise InputError(f"{cls.__name__}: unknown key {unknown[0]!r}")
    built = {}
    for name, value in values.items():
        nested = config_class(hints[name])
        built[name] = value if nested is None or value is None else from_dict(nested, value)
    try:
        return cls(**built)
    except FieldError:
        raise
    except TypeError as error:  # a missing key, or a value that cannot be compared
        raise InputError(f"{cls.__name__}: {error}") from None


def config_class(hint: Any) -> type[Config] | None:
    """The config that a field of type `hint` holds, itself or as `X | None`; None for others."""
    for each in (hint, *typing.get_args(hint)):
        if isinstance(each, type) and issubclass(each, Config):
            return each
    return None


def _field_names(cls: type[Config]) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Config):
    """Which decoder to train: one of a `transformers` family by its sizes, or a local one."""

    path: str | None = None
    """A local Hugging Face directory or GGUF file. When given, sizes below are ignored."""
    family: str = "llama"
    """`model_type` of transformers: llama, mistral, qwen2, qwen3, qwen3_moe, ..."""
    hidden_size: int = 128
    """Width of the residual stream."""
    intermediate_size: int = 344
    """Width inside the MLP."""
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    """Query heads; each has hidden_size / num_attention_heads dimensions."""
    num_key_value_heads: int = 4
    """Fewer than query heads: grouped-query attention."""
    max_position_embeddings: int = 1024
    """Longest sequence in tokens."""
    tie_word_embeddings: bool = True
    """The head shares its weight with the embedding."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the family's config class, by their transformers names."""

    def __post_init__(self) -> None:
        require_positive(
            self,
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "max_position_embeddings",
        )
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
class AdamWConfig(Config):
    """AdamW (Loshchilov and Hutter, 1711.05101) with the schedule of `RunConfig`."""

    lr: float
    """Peak learning rate, reached after warm-up."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled; applied to matrices only."""

    def __post_init__(self) -> None:
        require(0 < self.lr < math.inf, "lr", "must be positive and finite")
        require(0 <= self.beta1 < 1, "beta1", "must be in [0, 1)")
        require(0 <= self.beta2 < 1, "beta2", "must be in [0, 1)")
        require(0 < self.eps < math.inf, "eps", "must be positive and finite")
        require(0 <= self.weight_decay < math.inf, "weight_decay", "must be finite, not negative")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(AdamWConfig):
    """AdamW with clipped gradients."""

    clip_norm: float = 1.0
    """Largest global L2 norm of the gradient; 0 turns clipping off."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.clip_norm < math.inf, "clip_norm", "must be finite, not negative")


@dataclass(frozen=True, kw_only=True)
class RunConfig(Config):
    """What every training run has: horizon, schedule, when it says, evaluates and writes what."""

    seed: int = 0
    """Of the initial weights, the order of the data, dropout and sampling."""
    steps: int
    """Updates of the whole run."""
    warmup_steps: int
    """Linear from 0; then cosine down to `final_lr_fraction` at the last step."""
    final_lr_fraction: float = 0.1
    log_every: int
    """Steps between rows of metrics.jsonl; evaluations and the last step have one too."""
    eval_every: int
    """Steps between held-out evaluations; the last step is always evaluated."""
    checkpoint_every: int
    """Steps between checkpoints; the last step always has one."""
    keep_checkpoints: int = 2
    """How many of the newest are kept."""

    def __post_init__(self) -> None:
        require_positive(
            self, "steps", "log_every", "eval_every", "checkpoint_every", "keep_checkpoints"
        )
        require(
            0 <= self.warmup_steps <= self.steps,
            "warmup_steps",
            f"must be in [0, steps], is {self.warmup_steps} with {self.steps} steps",
        )
        require(0 <= self.final_lr_fraction <= 1, "final_lr_fraction", "must be in [0, 1]")


@dataclass(frozen=True, kw_only=True)
class SharedTrainingConfig(RunConfig):
    """What arms of one pretraining stage share, however they are spread over ranks."""

    sequence_length: int
    """Tokens whose successors are predicted, per sequence."""
    global_batch: int
    """Sequences per step over all ranks; the same sequences on any number of ranks."""
    eval_sequences: int
    """Size of the fixed held-out set, in sequences."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "sequence_length", "global_batch", "eval_sequences")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(SharedTrainingConfig):
    """The same for ranks that each have the whole model."""

    ranks: int
    """Processes, over all machines; more than one machine is README, "Several nodes"."""
    backend: Literal["gloo", "nccl"] = "gloo"
    """Chosen here, recorded in env.json, never swapped silently. gloo: CPU, nccl: CUDA."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: autocast of the forward pass; weights, gradients and optimizer stay fp32."""
    accumulation: int = 1
    """Microbatches per step and rank; `global_batch` must be a multiple of ranks times this."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "ranks", "accumulation")
        require(
            self.global_batch % (self.ranks * self.accumulation) == 0,
            "global_batch",
            f"must be a multiple of ranks x accumulation ({self.ranks} x {self.accumulation})",
        )


@dataclass(frozen=True, kw_only=True)
class SharedJobConfig(Config):
    """What the config.json of every job says; each stage has its own, with more."""

    INPUTS: ClassVar[tuple[str, ...]] = ()
    """Fields that name folders the job reads; what is in them is told by their MANIFEST.json."""

    stage: str
    """Name of the stage, such as `pretrain_lordo`; that of its job as well."""
    arm_name: str
    job_id: str
    """Hash of everything that decides the result; names the run directory."""
    model: ModelConfig

    @property
    def steps(self) -> int:
        """Rows of metrics.jsonl count up to it."""
        raise NotImplementedError

    @property
    def ranks(self) -> int:
        """Processes that torchrun starts, over all machines."""
        raise NotImplementedError

    @property
    def gpus(self) -> int:
        """GPUs that they take; 0: they run on CPUs."""
        return 0


@dataclass(frozen=True, kw_only=True)
class PretrainJobConfig(SharedJobConfig):
    """Of a pretraining job; each stage has its own, with an `arm` more."""

    INPUTS: ClassVar[tuple[str, ...]] = ("tokens_dir",)

    tokens_dir: str
    """Folder that `tasks/tokens.py` wrote, absolute."""
    training: SharedTrainingConfig

    @property
    def steps(self) -> int:
        return self.training.steps
