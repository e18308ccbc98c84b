"""Config of an arm -> its `Method`."""

from __future__ import annotations

from torch import nn

from algorithms.common.comm import Comm
from algorithms.common.loop import Guard, Method, unguarded
from algorithms.lordo import inner
from algorithms.lordo.config import ArmConfig
from algorithms.lordo.data_parallel import DataParallel, LowRankDataParallel
from algorithms.lordo.elastic_local import ElasticLocal
from algorithms.lordo.local import Local
from algorithms.lordo.lowrank_ddp import LowRankDdp


def build(
    model: nn.Module, arm: ArmConfig, comm: Comm, *, seed: int, guard: Guard = unguarded
) -> Method:
    """What trains `model` by `arm` on this rank; `seed` is that of the run, `guard` calls what a
    local arm exchanges. Raises `InputError`."""
    clip_norm = arm.optimizer.clip_norm
    optimizer = inner.build(model, arm)
    if arm.method == "ddp":
        return DataParallel(model, optimizer, comm, clip_norm=clip_norm)
    if isinstance(optimizer, LowRankDdp):
        return LowRankDataParallel(model, optimizer, comm, clip_norm=clip_norm)
    assert arm.sync is not None  # ArmConfig has checked
    return Local(
        model,
        optimizer,
        arm.sync,
        arm.low_rank,
        comm,
        clip_norm=clip_norm,
        seed=seed,
        guard=guard,
    )


def build_elastic(
    model: nn.Module, arm: ArmConfig, comm: Comm, *, seed: int, world_size: int
) -> ElasticLocal:
    """The same for an arm whose `sync` is `elastic`; `world_size` is that of the launch."""
    assert arm.sync is not None  # ArmConfig has checked
    return ElasticLocal(
        model,
        inner.build(model, arm),
        arm.sync,
        arm.low_rank,
        comm,
        clip_norm=arm.optimizer.clip_norm,
        seed=seed,
        world_size=world_size,
    )
