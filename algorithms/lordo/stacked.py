"""All M workers of an arm in lockstep in one process, for experiments on few cores.

The workers of a local arm are what ranks have: a model, an inner optimizer and a `Sync` each. Only
the exchange is another: `reduce_stacked` in the place of `Reducer`, which gives the same bits, and
bytes counted by the same formulas instead of sent. So a run here is that of M ranks, bit for bit.
Workers that average whole gradients at every step never differ: they are one model that sees all
batches at once. That, and the order of gloo's sums over more than two ranks, is where the
synchronous arms differ from M ranks by rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from algorithms.common.adamw import set_rate
from algorithms.common.codec import CODECS, Codec
from algorithms.common.errors import NonFiniteError
from algorithms.common.loop import token_loss
from algorithms.common.meter import (
    Meter,
    all_gather_wire_bytes,
    all_reduce_wire_bytes,
    reduce_scatter_wire_bytes,
)
from algorithms.common.model import logits
from algorithms.lordo import inner
from algorithms.lordo.agreement import DIGEST_BYTES
from algorithms.lordo.config import ArmConfig
from algorithms.lordo.lowrank_ddp import LowRankDdp
from algorithms.lordo.sync import Sync
from algorithms.lordo.wire import Reduced, reduce_stacked


class StackedMeter(Meter):
    """The counters of one of M ranks; all count alike."""

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self.world_size = world_size

    def all_reduce(self, tag: str, size: int) -> None:
        """Count `Comm.all_reduce` of `size` bytes."""
        self._count(tag, size, all_reduce_wire_bytes(size, self.world_size))

    def all_gather(self, tag: str, size: int) -> None:
        """Count `Comm.all_gather` of `size` bytes a rank."""
        self._count(tag, size, all_gather_wire_bytes(size, self.world_size))

    def agree(self, flat: Tensor) -> Tensor:
        """Count what `same_on_all_ranks` exchanges where all have found the same."""
        self.all_gather("projection", DIGEST_BYTES)
        return flat

    def reducer(self, tag: str, flat: Tensor, codec: Codec | None) -> None:
        """Count one round of a `Reducer`: an all-to-all of M encoded parts, a gather of one."""
        world_size = self.world_size
        block = flat.new_zeros(1 if codec is None else codec.block)
        blocks = -(-flat.numel() // (world_size * block.numel()))  # of a part
        size = blocks * (block if codec is None else codec.encode(block)).nbytes
        scattered = reduce_scatter_wire_bytes(world_size * size, world_size)
        self._count(tag, (world_size - 1) * size, scattered)
        self.all_gather(tag, size)


class Stacked(Protocol):
    """M workers. A step is `backward`, then `update`; steps count from 1."""

    meter: StackedMeter

    @property
    def optimizer(self) -> Optimizer:
        """Worker 0's."""

    def outer_bytes(self) -> tuple[int, int]:
        """What worker 0 holds for exchanges: its copy of the shared weights; outer momentum and
        what codes lost."""

    def backward(self, batches: Sequence[Tensor]) -> float:
        """Clipped gradients from each worker's batch, int64 `[batch, tokens + 1]`; returns the mean
        loss. Raises `NonFiniteError`."""

    def update(self, step: int, lr: float) -> None:
        """Apply them, and exchange what is due."""

    def flush(self, step: int) -> None:
        """Exchange what `step` has left open."""

    def synced(self) -> AbstractContextManager[nn.Module]:
        """A model with the weights that all workers share; entered after `flush`."""


class StackedDdp:
    """M workers that average whole gradients, as one model."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, clip_norm: float, meter: StackedMeter
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.clip_norm = clip_norm
        self.meter = meter
        self.gradient_bytes = sum(parameter.nbytes for parameter in model.parameters())

    def backward(self, batches: Sequence[Tensor]) -> float:
        return _backward_all([self.model], [torch.cat(list(batches))], self.clip_norm)

    def update(self, step: int, lr: float) -> None:
        self.meter.all_reduce("gradients", self.gradient_bytes)
        inner.descend(self.optimizer, lr)

    def flush(self, step: int) -> None:
        """Nothing to do: the workers never differ."""

    def outer_bytes(self) -> tuple[int, int]:
        return 0, 0

    def synced(self) -> AbstractContextManager[nn.Module]:
        return nullcontext(self.model)


class StackedLowRankDdp:
    """M workers that average thin factors of their gradients; each has a model and optimizer."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[LowRankDdp],
        clip_norm: float,
        meter: StackedMeter,
    ) -> None:
        self.models = list(models)
        self.optimizers = list(optimizers)
        self.clip_norm = clip_norm
        self.meter = meter

    @property
    def optimizer(self) -> Optimizer:
        return self.optimizers[0]

    def backward(self, batches: Sequence[Tensor]) -> float:
        return _backward_all(self.models, batches, self.clip_norm)

    def update(self, step: int, lr: float) -> None:
        given = [optimizer.contribution() for optimizer in self.optimizers]
        mean, _ = reduce_stacked(given, None)
        self.meter.all_reduce("gradients", mean.nbytes)
        for optimizer in self.optimizers:
            set_rate(optimizer, lr)
            optimizer.apply(mean)
            optimizer.zero_grad(set_to_none=True)

    def flush(self, step: int) -> None:
        """Nothing to do: the workers never differ."""

    def outer_bytes(self) -> tuple[int, int]:
        return 0, 0

    def synced(self) -> AbstractContextManager[nn.Module]:
        return nullcontext(self.models[0])


@dataclass
class Worker:
    """What one rank of a local arm holds."""

    model: nn.Module
    optimizer: Optimizer
    sync: Sync


class StackedLocal:
    """M workers that take steps of their own between syncs.

    `codec` is that of pseudo-gradient and first gradient, both ways; moments go uncoded. With a
    delay the averages of step t are applied after the update of step t + delay.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        codec: Codec | None,
        clip_norm: float,
        meter: StackedMeter,
        delay: int = 0,
    ) -> None:
        self.workers = list(workers)
        self.codec = codec
        self.clip_norm = clip_norm
        self.meter = meter
        self.delay = delay
        self.owners: list[Tensor] = []
        """What each owner's code of the mean lost in the round before."""
        self.under_way: tuple[int, list[dict[str, Reduced]]] | None = None
        """A delayed round: the step at which it is applied, and what each worker gets."""

    def backward(self, batches: Sequence[Tensor]) -> float:
        return _backward_all([worker.model for worker in self.workers], batches, self.clip_norm)

    def update(self, step: int, lr: float) -> None:
        self._apply(step, self._exchange([w.sync.first_gradient() for w in self.workers]))
        for worker in self.workers:
            inner.descend(worker.optimizer, lr)
        if self.under_way is not None and self.under_way[0] == step:
            self._land(step)
        reduced = self._exchange([w.sync.contributions(step) for w in self.workers])
        self.under_way = (step + self.delay, reduced) if reduced[0] else self.under_way
        if self.delay == 0:
            self._land(step)

    def flush(self, step: int) -> None:
        self._land(step)
        self._apply(step, self._exchange([w.sync.flush(step) for w in self.workers]))

    @property
    def optimizer(self) -> Optimizer:
        return self.workers[0].optimizer

    def outer_bytes(self) -> tuple[int, int]:
        sync = self.workers[0].sync
        kept = [sync.outer_momentum, sync.residual, *self.owners[:1]]
        return sync.x_sync.nbytes, sum(each.nbytes for each in kept if each is not None)

    @contextmanager
    def synced(self) -> Iterator[nn.Module]:
        with self.workers[0].sync.synced():
            yield self.workers[0].model

    def _land(self, step: int) -> None:
        if self.under_way is not None:
            self._apply(step, self.under_way[1])
            self.under_way = None

    def _apply(self, step: int, reduced: Sequence[Mapping[str, Reduced]]) -> None:
        for worker, mine in zip(self.workers, reduced, strict=True):
            worker.sync.apply(step, mine)

    def _exchange(self, contributed: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Reduced]]:
        """What each worker gets for its buffers by tag; all workers have the same tags."""
        reduced: list[dict[str, Reduced]] = [{} for _ in contributed]
        for tag in contributed[0]:
            flats = [buffers[tag] for buffers in contributed]
            codec = None if tag == "moments" else self.codec
            mean, sents = reduce_stacked(flats, codec, self.owners if tag == "delta" else None)
            self.meter.reducer(tag, flats[0], codec)
            for mine, sent in zip(reduced, sents, strict=True):
                mine[tag] = Reduced(mean, sent)
        return reduced


def build(arm: ArmConfig, models: Sequence[nn.Module], seed: int) -> Stacked:
    """Workers of an arm, one for each of `models`, which are equal. Raises `InputError`."""
    meter = StackedMeter(len(models))
    clip = arm.optimizer.clip_norm
    optimizers = [inner.build(model, arm) for model in models]
    if arm.method == "ddp":
        return StackedDdp(models[0], optimizers[0], clip, meter)
    thin = [each for each in optimizers if isinstance(each, LowRankDdp)]
    if thin:
        return StackedLowRankDdp(models, thin, clip, meter)
    assert arm.sync is not None  # ArmConfig has checked
    workers = []
    for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        sync = Sync(
            model.named_parameters(),
            optimizer,
            arm.sync,
            arm.low_rank,
            world_size=len(models),
            seed=seed,
            agree=meter.agree if rank == 0 and len(models) > 1 else None,
        )
        workers.append(Worker(model, optimizer, sync))
    return StackedLocal(workers, CODECS.get(arm.sync.wire), clip, meter, arm.sync.delay)


def _backward_all(
    models: Sequence[nn.Module], batches: Sequence[Tensor], clip_norm: float
) -> float:
    """Gradients of each model, clipped to `clip_norm` (0: not); returns the mean loss."""
    total = 0.0
    for worker, (model, tokens) in enumerate(zip(models, batches, strict=True)):
        loss = token_loss(logits(model, tokens[:, :-1]), tokens[:, 1:])
        loss.backward()  # type: ignore[no-untyped-call]
        norm = inner.clip(model, clip_norm)
        if not (torch.isfinite(loss) and torch.isfinite(norm)):
            found = f"loss is {loss.item()}, the gradient's norm {norm.item()}"
            raise NonFiniteError(f"worker {worker}: {found}")
        total += loss.item() / len(models)
    return total
