"""The arms that are compared, and where the search for each one's learning rate begins.

Arms of the paper's family (LoRDO, arXiv 2602.04396) exchange weights every 40 steps: with rank 8 it
is the first multiple of 8 at which they send 25 times less than DDP and 10 times less than low-rank
DDP. Ours and Muon on the same wire do so every 16 steps in two bits, all others every 32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from algorithms.common.config import OptimizerConfig
from algorithms.lordo.config import ArmConfig, LowRankConfig, SyncConfig

ADAM = OptimizerConfig(lr=1.0, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0, clip_norm=1.0)
"""`lr` is set by the search."""

EVERY = 32
PAPER_EVERY = 40
OUR_EVERY = 16


def _local(every: int = EVERY, **settings: Any) -> SyncConfig:
    return SyncConfig(every=every, **settings)


_PAPER_SYNC = _local(PAPER_EVERY, momentum_every=3 * PAPER_EVERY, variance_every=6 * PAPER_EVERY)
_GLOBAL = LowRankConfig(rank=8, projection="global", qhm="full_rank", omega=0.7)
_THIN = _local(
    OUR_EVERY, outer="nesterov", outer_lr=1.0, outer_momentum=0.6, outer_state="int8", wire="int2",
    residual="weights",
)  # fmt: skip
_LORDO_NS = ArmConfig(
    method="local",
    inner="lordo_ns",
    optimizer=replace(ADAM, beta1=0.8),
    momentum="bf16",
    low_rank=LowRankConfig(rank=8, projection="frozen", carry=0.6),
    sync=_THIN,
)
_MULOCO = replace(_LORDO_NS, inner="muon", momentum="int4", low_rank=None)
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
    "lordo_ns_fp32": replace(_LORDO_NS, sync=replace(_THIN, wire="fp32", residual="none")),
    "lordo_ns_no_carry": replace(
        _LORDO_NS,
        low_rank=LowRankConfig(rank=16, projection="frozen"),
        sync=replace(_THIN, every=EVERY, outer_momentum=0.7, wire="int4"),
    ),
    "muloco": _MULOCO,
    "muloco_in_grad": replace(_MULOCO, momentum="grad"),
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
    "ddp": 6,
    "lowrank_ddp": 8,
    "lowrank_ddp_ef": 5,
    "local_adam": 6,
    "des_loc": 6,
    "diloco": 4,
    "lordo_local": 6,
    "lordo_global": 9,
    "lordo_global_no_qhm": 8,
    "lordo_global_low_rank_qhm": 8,
    "lordo_global_frozen": 8,
    "lordo_ns": 8,
    "lordo_ns_no_carry": 7,
    "muloco": 8,
    "muloco_in_grad": 7,
    "muon_ddp": 9,
}
"""Arm -> index into `GRID` where its search begins, and which `--quick` takes."""


def at_rate(arm: ArmConfig, index: int) -> ArmConfig:
    """The arm with the learning rate `GRID[index]`."""
    return replace(arm, optimizer=replace(arm.optimizer, lr=GRID[index]))
