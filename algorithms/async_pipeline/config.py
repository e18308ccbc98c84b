"""Configs of stage `pretrain_async`; see `algorithms/common/config.py` for the shared parts.

A pipeline's stage is called k of P, counted from 0; tau_k is the number of updates by which the
weights of its gradients are older than those the gradients are applied to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from algorithms.common.config import (
    Config,
    OptimizerConfig,
    PretrainJobConfig,
    SharedTrainingConfig,
    require,
    require_positive,
)

Schedule = Literal["async", "gpipe", "one_f_one_b", "zero_bubble"]
Name = Literal["adamw", "pipedream_lr", "nesterov", "basis_rotation"]
Source = Literal["first", "second"]
Geometry = Literal["unilateral", "bilateral"]
Budget = Literal["uniform", "stage_aware", "reversed"]


@dataclass(frozen=True, kw_only=True)
class RotationConfig(Config):
    """The bases in which matrices are updated, and the momentum in them."""

    source: Source = "second"
    """Where a basis comes from. first: singular vectors of the momentum. second: eigenvectors of
    averaged G G^T and G^T G."""
    geometry: Geometry = "bilateral"
    """unilateral: only the shorter side is rotated, of squares the right one. bilateral: both."""
    refresh_every: int = 10
    """f: updates between refreshes of the bases; with a budget that is not uniform their mean."""
    refresh_budget: Budget = "uniform"
    """How stages share the refreshes. stage_aware: more of them where tau is larger. reversed:
    fewer there, a control."""
    refresh_blocks: int = 1
    """A refresh turns one of so many overlapping blocks of each basis among themselves; 1: all."""
    nu: float = 1.0
    """Share of the momentum in the step, that of the gradient is 1 - nu; 1 is Adam's."""
    vocabulary: Literal["adamw", "short_side"] = "adamw"
    """Embedding and head: under AdamW, or rotated on their shorter side."""
    max_side: int = 8192
    """Longer sides are not rotated: a basis has the square of its side."""

    def __post_init__(self) -> None:
        for name in ("refresh_every", "refresh_blocks", "max_side"):
            require(getattr(self, name) > 0, name, "must be positive")
        require(0 <= self.nu <= 1, "nu", "must be in [0, 1]")
        whole = self.source == "second" or self.refresh_blocks == 1
        require(whole, "refresh_blocks", "must be 1 with source first")


@dataclass(frozen=True, kw_only=True)
class StageOptimizerConfig(Config):
    """The optimizer of every stage; what differs between them follows from k, P and tau."""

    name: Name = "basis_rotation"
    """adamw: PipeDream. pipedream_lr: with rates that start at lr / tau. nesterov: NAdam."""
    optimizer: OptimizerConfig
    """`clip_norm` limits the norm over all parameters of a stage at once."""
    rate_power: float = 0.0
    """p: stage k has the rate lr / (1 + tau_k)^p in all updates; 0: lr."""
    correction_steps: int = 0
    """K of pipedream_lr: updates until the rate of a stage is lr."""
    momentum_decay: float = 0.004
    """psi of nesterov: how fast its momentum grows from beta1 / 2 to beta1."""
    rotation: RotationConfig | None = None
    """For basis_rotation."""

    def __post_init__(self) -> None:
        require(0 <= self.rate_power < math.inf, "rate_power", "must be finite, not negative")
        rotates = self.name == "basis_rotation"
        only = "goes with basis_rotation, and only with it"
        require(rotates == (self.rotation is not None), "rotation", only)
        corrects = self.name == "pipedream_lr"
        positive = self.correction_steps > 0 if corrects else self.correction_steps == 0
        message = "must be positive with pipedream_lr, and 0 with others"
        require(positive, "correction_steps", message)
        require(0 <= self.momentum_decay < math.inf, "momentum_decay", "must not be negative")
        unread = self.name == "nesterov" or self.momentum_decay == type(self).momentum_decay
        require(unread, "momentum_decay", f"has no effect with {self.name}")


def _settings(lr: float, beta1: float, beta2: float) -> OptimizerConfig:
    return OptimizerConfig(lr=lr, beta1=beta1, beta2=beta2, weight_decay=0.01)


PRESETS = {
    "adamw": StageOptimizerConfig(name="adamw", optimizer=_settings(1e-3, 0.9, 0.999)),
    "pipedream_lr": StageOptimizerConfig(
        name="pipedream_lr", optimizer=_settings(1e-3, 0.9, 0.999), correction_steps=480
    ),
    "nesterov": StageOptimizerConfig(name="nesterov", optimizer=_settings(1e-3, 0.99, 0.999)),
    "paper": StageOptimizerConfig(optimizer=_settings(1e-3, 0.9, 0.999), rotation=RotationConfig()),
    "ours": StageOptimizerConfig(
        optimizer=_settings(4e-3, 0.99, 0.99),
        rate_power=0.75,
        rotation=RotationConfig(nu=0.7, vocabulary="short_side"),
    ),
}
"""Starting points by name; `paper` is basis rotation as published, `ours` the recipe of
docs/async_pipeline.md. Rates and correction_steps belong to a model and a horizon: tune them."""


@dataclass(frozen=True, kw_only=True)
class ArmConfig(Config):
    """One way to train through a pipeline; arms share model, tokens, batches and evaluation.

    Every update takes one `global_batch`, whatever the schedule: it is cut into `microbatches`.
    """

    schedule: Schedule = "async"
    """async: 1F1B that never flushes; with 1 stage, plain training. gpipe, one_f_one_b,
    zero_bubble: torch's synchronous schedules, which flush before each update."""
    stages: int
    """P. Each has a rank of its own, but in the simulator."""
    executor: Literal["ranks", "simulator"] = "ranks"
    """simulator: all stages of an async schedule one after the other on one rank, with the delays
    of a real pipeline; what a pipeline's times would be is modelled."""
    microbatches: int = 1
    """Per update: `a` of async, which an update accumulates; M of the others."""
    layers: list[int] | None = None
    """Layers on each stage, by hand; none: by the cost model. zero_bubble has 2P stages, two on
    each rank."""
    delays: list[int] | None = None
    """D_k of async: microbatches that stage k forwards ahead; none: P-1-k."""
    stash: Literal["device", "host", "none"] = "device"
    """Where async keeps the weights of a microbatch's forward for its backward. none: nowhere, the
    backward is taken at the newest weights."""
    recompute: bool = False
    """Async with stash device keeps a stage's inputs alone, and forwards again in the backward."""
    optimizer: StageOptimizerConfig

    def __post_init__(self) -> None:
        require_positive(self, "stages", "microbatches")
        if self.schedule == "async":
            self._check_async()
        else:
            require(self.stages > 1, "stages", f"must be above 1 with {self.schedule}")
            require(self.executor == "ranks", "executor", "the simulator knows async alone")
            for name in ("delays", "stash", "recompute"):
                unset = getattr(self, name) == getattr(type(self), name)
                require(unset, name, f"has no effect with {self.schedule}")
            least = 1 if self.schedule == "gpipe" else self.stages
            enough = self.microbatches >= least
            require(enough, "microbatches", f"must be at least stages ({least})")
        if self.layers is not None:
            found, count = len(self.layers), self.parts
            require(found == count, "layers", f"has {found} numbers for {count} stages")
            require(min(self.layers) >= 0, "layers", "must not be negative")
            inner = "only the first and the last stage may have none: they have embedding and head"
            require(all(self.layers[1:-1]), "layers", inner)

    def _check_async(self) -> None:
        device = self.stash == "device"
        require(device or not self.recompute, "recompute", "goes with stash device alone")
        simulated = self.executor == "simulator"
        real = "has no effect in the simulator"
        require(not (simulated and self.stash == "host"), "stash", f"host {real}")
        require(not (simulated and self.recompute), "recompute", real)
        if self.delays is not None:
            found = self.delays
            require(len(found) == self.stages, "delays", f"must be {self.stages} numbers")
            falling = found == sorted(found, reverse=True) and found[-1] >= 0
            require(falling, "delays", "must not rise from stage to stage, nor be negative")

    def check_batch(self, global_batch: int, field: str) -> None:
        """Raise `FieldError` for `field` if no batch can be cut into `microbatches`."""
        divides = global_batch % self.microbatches == 0
        require(divides, field, f"must divide training.global_batch ({global_batch})")

    @property
    def parts(self) -> int:
        """How many stages the model is cut into."""
        return 2 * self.stages if self.schedule == "zero_bubble" else self.stages

    @property
    def microbatch_delays(self) -> list[int]:
        """D_k of all parts; 0 where every update is flushed."""
        if self.schedule != "async":
            return [0] * self.parts
        return list(range(self.stages - 1, -1, -1)) if self.delays is None else self.delays

    @property
    def update_delays(self) -> list[int]:
        """tau_k of all parts: that of the oldest microbatch of an update."""
        return [math.ceil(delay / self.microbatches) for delay in self.microbatch_delays]


@dataclass(frozen=True, kw_only=True)
class JobConfig(PretrainJobConfig):
    """The whole config.json of `tasks.jobs.pretrain_async`."""

    training: SharedTrainingConfig
    arm: ArmConfig

    def __post_init__(self) -> None:
        if self.model.path is None:  # else it is looked at once it is loaded
            self._check_cut()
        self.arm.check_batch(self.training.global_batch, "arm.microbatches")

    def _check_cut(self) -> None:
        layers, parts = self.model.num_hidden_layers, self.arm.parts
        # The first stage may be the embedding alone, the last the head.
        require(parts <= layers + 2, "arm.stages", f"{layers} layers cannot fill {parts} stages")
        total = layers if self.arm.layers is None else sum(self.arm.layers)
        wrong = f"sum is {total}, the model has {layers} layers"
        require(total == layers, "arm.layers", wrong)
        untied = parts == 1 or not self.model.tie_word_embeddings
        apart = "must be false: the embedding is the first stage's and the head the last one's"
        require(untied, "model.tie_word_embeddings", apart)

    @property
    def ranks(self) -> int:
        return 1 if self.arm.executor == "simulator" else self.arm.stages
