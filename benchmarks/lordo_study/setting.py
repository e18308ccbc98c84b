"""What is compared: the setting that all arms share, and the arms.

Every arm trains a GPT-2 of width 64 on M = 4 workers. Arms of the paper's family (LoRDO, arXiv
2602.04396) exchange weights every 40 steps: with rank 8 it is the first multiple of 8 at which they
send 25 times less than DDP and 10 times less than low-rank DDP. All others do so every 32 steps.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from typing import Any

from algorithms.common.config import Config, ModelConfig, OptimizerConfig, TrainingConfig
from algorithms.lordo.config import ArmConfig, LowRankConfig, SyncConfig
from benchmarks.lordo_study.streams import Dealing

GPT2 = ModelConfig(
    family="gpt2",
    hidden_size=64,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=64,
    tie_word_embeddings=True,
    extra={
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "activation_function": "gelu_pytorch_tanh",  # GPT-2's own, in one kernel
    },
)


@dataclass(frozen=True, kw_only=True)
class Setting(Config):
    """What all arms share."""

    model: ModelConfig = GPT2
    workers: int = 4
    sequences: int = 8
    """Per worker and step."""
    length: int = 64
    """Tokens of a sequence."""
    steps: int = 1280
    dealing: Dealing = "in_turn"
    """How workers share the corpus."""
    held_out: int = 1024
    """Sequences of each of the two held-out sets."""

    def training(self, seed: int) -> TrainingConfig:
        """As the training loop of the ranks has it: 10 % warm-up, cosine to 5 % of the peak."""
        return TrainingConfig(
            ranks=self.workers,
            seed=seed,
            steps=self.steps,
            sequence_length=self.length,
            global_batch=self.workers * self.sequences,
            warmup_steps=self.steps // 10,
            final_lr_fraction=0.05,
            log_every=self.steps,
            eval_every=self.steps,
            eval_sequences=self.held_out,
            checkpoint_every=self.steps,
        )


@dataclass(frozen=True, kw_only=True)
class Job(Config):
    """One run: it and the code decide the result."""

    name: str
    """Of the arm, for people; no part of the key."""
    arm: ArmConfig
    seed: int
    setting: Setting

    def key(self, code: str) -> str:
        """Names the file of the result; `code` is a hash of what computes it."""
        told = {k: v for k, v in self.to_dict().items() if k != "name"}
        text = json.dumps([told, code], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:20]


ADAM = OptimizerConfig(lr=1.0, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0, clip_norm=1.0)
"""`lr` is set by the search."""

EVERY = 32
PAPER_EVERY = 40


def _local(every: int = EVERY, **settings: Any) -> SyncConfig:
    return SyncConfig(every=every, **settings)


_PAPER_SYNC = _local(PAPER_EVERY, momentum_every=3 * PAPER_EVERY, variance_every=6 * PAPER_EVERY)
_GLOBAL = LowRankConfig(rank=8, projection="global", qhm="full_rank", omega=0.7)
_THIN = _local(
    outer="nesterov", outer_lr=1.0, outer_momentum=0.7, outer_state="int8", wire="int4",
    residual="weights",
)  # fmt: skip
_FULL_WIRE = replace(_THIN, wire="fp32", residual="none")
_LORDO_NS = ArmConfig(
    method="local",
    inner="lordo_ns",
    optimizer=replace(ADAM, beta1=0.8),
    momentum="bf16",
    low_rank=LowRankConfig(rank=16, projection="frozen"),
    sync=_THIN,
)
_LOW_RANK_DDP = LowRankConfig(rank=8)


def _adam(sync: SyncConfig) -> ArmConfig:
    return ArmConfig(method="local", optimizer=ADAM, sync=sync)


def _lordo(sync: SyncConfig, **changes: Any) -> ArmConfig:
    low_rank = replace(_GLOBAL, **changes)
    return ArmConfig(method="local", inner="lordo", optimizer=ADAM, low_rank=low_rank, sync=sync)


ARMS: dict[str, ArmConfig] = {
    "ddp": ArmConfig(optimizer=ADAM),
    "lowrank_ddp": ArmConfig(method="lowrank_ddp", optimizer=ADAM, low_rank=_LOW_RANK_DDP),
    "lowrank_ddp_ef": ArmConfig(
        method="lowrank_ddp", optimizer=ADAM, low_rank=replace(_LOW_RANK_DDP, error_feedback=True)
    ),
    "local_adam": _adam(_local(momentum_every=EVERY, variance_every=EVERY)),
    "des_loc": _adam(_local(momentum_every=3 * EVERY, variance_every=6 * EVERY)),
    "diloco": _adam(_local(outer="nesterov", outer_lr=1.0, outer_momentum=0.5)),
    "lordo_local": _lordo(_local(PAPER_EVERY), projection="local", qhm="none"),
    "lordo_global": _lordo(_PAPER_SYNC),
    "lordo_global_int4": _lordo(replace(_PAPER_SYNC, wire="int4", residual="weights")),
    "lordo_global_no_qhm": _lordo(_PAPER_SYNC, qhm="none"),
    "lordo_global_low_rank_qhm": _lordo(_PAPER_SYNC, qhm="low_rank"),
    "lordo_global_frozen": _lordo(_PAPER_SYNC, projection="frozen"),
    "lordo_ns": _LORDO_NS,
    "lordo_ns_fp32": replace(_LORDO_NS, sync=_FULL_WIRE),
    "muloco": replace(_LORDO_NS, inner="muon", momentum="int4", low_rank=None),
    "muon_ddp": ArmConfig(inner="muon", optimizer=replace(ADAM, beta1=0.9)),
}

FOLLOWS = {"lordo_ns_fp32": "lordo_ns", "lordo_global_int4": "lordo_global"}
"""Arm -> the arm whose rate it takes: pairs that differ in the wire alone."""

QUICK = (
    "ddp", "lowrank_ddp", "lowrank_ddp_ef", "des_loc", "lordo_local", "lordo_global",
    "lordo_global_no_qhm", "lordo_global_frozen", "lordo_ns", "lordo_ns_fp32", "muloco",
)  # fmt: skip

GRID = tuple(round(0.00125 * 2 ** (i / 2), 6) for i in range(15))
"""Learning rates, for every arm: steps of the square root of 2."""

RATES = {
    "ddp": 5,
    "lowrank_ddp": 6,
    "lowrank_ddp_ef": 6,
    "local_adam": 4,
    "des_loc": 4,
    "diloco": 4,
    "lordo_local": 4,
    "lordo_global": 7,
    "lordo_global_no_qhm": 8,
    "lordo_global_low_rank_qhm": 8,
    "lordo_global_frozen": 7,
    "lordo_ns": 9,
    "muloco": 8,
    "muon_ddp": 8,
}
"""Arm -> index into `GRID` where its search begins, and which `--quick` takes."""


def at_rate(arm: ArmConfig, index: int) -> ArmConfig:
    """The arm with the learning rate `GRID[index]`."""
    return replace(arm, optimizer=replace(arm.optimizer, lr=GRID[index]))
