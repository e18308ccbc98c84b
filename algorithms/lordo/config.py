"""Configs of stage `pretrain_lordo`; see `algorithms/common/config.py` for the shared parts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from algorithms.common.config import (
    Config,
    OptimizerConfig,
    PretrainJobConfig,
    TrainingConfig,
    require,
)

Wire = Literal["fp32", "bf16", "int8", "int4", "int2", "sign", "top_k"]
Compute = Literal["svd", "power", "dct"]
Qhm = Literal["none", "low_rank", "full_rank"]
Scaling = Literal["column", "scalar", "energy", "lift"]


@dataclass(frozen=True, kw_only=True)
class LowRankConfig(Config):
    """Which weights have low-rank moments, and how their projection and update are made.

    `lordo_ns` reads rank, projection, compute, carry and parameters, `lowrank_ddp` rank,
    error_feedback and parameters, `lordo` all but carry; what is not read must stay as it is here.
    """

    rank: int
    """Rows of the moments; where a matrix has fewer, all of them."""
    projection: Literal["global", "local", "frozen", "random"] = "global"
    """global: from the averaged pseudo-gradient at every sync. local: from each worker's own
    gradients at every step. frozen: from the averaged first gradient, never again. random: drawn
    anew at every sync, from a seed that the workers share."""
    compute: Compute = "svd"
    """How the leading directions are found: exactly, by one warm power iteration, or by choosing
    columns of a fixed cosine basis."""
    qhm: Qhm = "full_rank"
    """Which part of the gradient enters the step beside the momentum."""
    omega: float = 0.7
    """Share of the momentum in the step; 1 - omega is that of the gradient."""
    mu: float = 1.0
    """Divides the full-rank term."""
    scaling: Scaling = "column"
    """What stands for the second moment of a full-rank gradient."""
    error_feedback: bool = False
    """Keep what the projection drops and add it to the next gradient."""
    carry: float = 0.0
    """Share of what the projection drops that stays in `.grad`, where the next gradient is added
    to it."""
    parameters: list[str] = field(default_factory=list)
    """Glob patterns of weight names; empty: the matrices of attention and MLP."""

    def __post_init__(self) -> None:
        require(self.rank > 0, "rank", "must be positive")
        require(0 <= self.omega <= 1, "omega", "must be in [0, 1]")
        require(0 < self.mu < math.inf, "mu", "must be positive and finite")
        require(0 <= self.carry < 1, "carry", "must be in [0, 1)")


@dataclass(frozen=True, kw_only=True)
class SyncConfig(Config):
    """How often workers exchange what, and how the average enters the weights."""

    every: int
    """K_x: steps between exchanges of weights."""
    momentum_every: int = 0
    """K_u: steps between exchanges of first moments; 0: never."""
    variance_every: int = 0
    """K_v: steps between exchanges of second moments; 0: never."""
    outer: Literal["average", "nesterov"] = "average"
    """How the mean pseudo-gradient enters: as it is, or by SGD with Nesterov momentum."""
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    outer_state: Literal["fp32", "int8"] = "fp32"
    """How the outer momentum is kept."""
    wire: Wire = "fp32"
    """Code of the pseudo-gradient, in both directions."""
    residual: Literal["none", "weights", "buffer"] = "none"
    """Where a worker keeps what the code lost: nowhere, in its weights, or in a buffer."""
    delay: int = 0
    """A round's exchange may take this many steps of the next round; 0: wait for it."""
    timeout_s: float = 600.0
    """Longest wait for another worker."""
    elastic: bool = False
    """The others go on without a worker that dies or stalls; it joins again, with their weights.
    The timeout must then be above the time of a step."""

    def __post_init__(self) -> None:
        require(self.every > 0, "every", "must be positive")
        for name in ("momentum_every", "variance_every", "delay"):
            require(getattr(self, name) >= 0, name, "must not be negative")
        require(self.delay < self.every, "delay", f"must be below every ({self.every})")
        for name in ("momentum_every", "variance_every"):
            together = getattr(self, name) % self.every == 0
            alone = self.delay == 0 and not self.elastic
            what = "a delay" if self.delay else "elastic"
            told = f"with {what} it must be a multiple of every ({self.every})"
            require(together or alone, name, told)
        require(
            self.delay == 0 or not self.elastic,
            "elastic",
            "cannot go with a delay: a round in flight is lost with one of its workers",
        )
        require(0 < self.outer_lr < math.inf, "outer_lr", "must be positive and finite")
        require(0 <= self.outer_momentum < 1, "outer_momentum", "must be in [0, 1)")
        nesterov = self.outer == "nesterov"
        plain = self.outer_momentum == 0 and self.outer_lr == 1 and self.outer_state == "fp32"
        require(nesterov or plain, "outer", "average takes no outer_lr, _momentum or _state")
        lossy = self.wire != "fp32"
        require(lossy or self.residual == "none", "residual", "the fp32 wire loses nothing")
        require(0 < self.timeout_s < math.inf, "timeout_s", "must be positive and finite")


@dataclass(frozen=True, kw_only=True)
class ArmConfig(Config):
    """One way to train data-parallel; arms of a stage share tokens and evaluation."""

    method: Literal["ddp", "lowrank_ddp", "local"] = "ddp"
    """ddp: gradients averaged over all ranks at every step. lowrank_ddp: their low-rank parts.
    local: steps of each rank on its own, brought together by `sync`."""
    inner: Literal["adamw", "lordo", "lordo_ns", "muon"] = "adamw"
    """Optimizer of a rank's steps. lordo: Adam with low-rank moments. lordo_ns: orthogonalised
    low-rank momentum. muon: orthogonalised full momentum."""
    optimizer: OptimizerConfig
    momentum: Literal["fp32", "bf16", "int8", "int4", "grad"] = "fp32"
    """How lordo_ns (fp32, bf16) and muon (fp32, int8, int4, and with method local in `.grad`) keep
    the momentum of matrices."""
    low_rank: LowRankConfig | None = None
    """For lowrank_ddp, and for local with an inner lordo or lordo_ns."""
    sync: SyncConfig | None = None
    """For local."""

    def __post_init__(self) -> None:
        local = self.method == "local"
        require(
            local == (self.sync is not None), "sync", "goes with method local, and only with it"
        )
        inners = {"ddp": ("adamw", "muon"), "lowrank_ddp": ("adamw",)}.get(self.method)
        known = inners is None or self.inner in inners
        require(known, "inner", f"must be {' or '.join(inners or ())} with method {self.method}")
        thin = self.method == "lowrank_ddp" or self.inner in ("lordo", "lordo_ns")
        require(
            thin == (self.low_rank is not None),
            "low_rank",
            "goes with lowrank_ddp, lordo and lordo_ns, and only with them",
        )
        self._require_unread_defaults()
        # Under DDP `.grad` is a view of what is sent: it cannot carry anything.
        full = ("fp32", "int8", "int4", "grad") if local else ("fp32", "int8", "int4")
        kept = {"lordo_ns": ("fp32", "bf16"), "muon": full}.get(self.inner, ("fp32",))
        require(self.momentum in kept, "momentum", f"must be {', '.join(kept)} with {self.inner}")

    def _require_unread_defaults(self) -> None:
        """Settings of `low_rank` that the method does not read must not look as if they counted."""
        low_rank = self.low_rank
        if low_rank is None:
            return
        if self.method == "lowrank_ddp":
            who, read = "lowrank_ddp", {"rank", "error_feedback", "parameters"}
        elif self.inner == "lordo":
            who, read = "lordo", set(low_rank.to_dict()) - {"carry"}
        else:
            who, read = self.inner, {"rank", "projection", "compute", "carry", "parameters"}
            shared = low_rank.projection != "local"
            require(shared, "low_rank.projection", "must be global, frozen or random with lordo_ns")
        plain = LowRankConfig(rank=low_rank.rank)
        for name, value in low_rank.to_dict().items():
            unset = name in read or value == getattr(plain, name)
            require(unset, f"low_rank.{name}", f"has no effect with {who}")


@dataclass(frozen=True, kw_only=True)
class JobConfig(PretrainJobConfig):
    """The whole config.json of `tasks.jobs.pretrain_lordo`."""

    training: TrainingConfig
    arm: ArmConfig

    def __post_init__(self) -> None:
        elastic = self.arm.sync is not None and self.arm.sync.elastic
        known = not elastic or self.training.backend == "gloo"
        require(known, "training.backend", "must be gloo with an arm whose sync is elastic")

    @property
    def ranks(self) -> int:
        return self.training.ranks

    @property
    def gpus(self) -> int:
        return self.training.ranks if self.training.backend == "nccl" else 0
