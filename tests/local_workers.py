"""Workers of local methods on a toy problem whose gradients are a function of weights and step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from algorithms.common.codec import Codec
from algorithms.common.config import OptimizerConfig
from algorithms.common.seeding import mix
from algorithms.lordo.config import LowRankConfig, SyncConfig
from algorithms.lordo.optimizer import LoRDO
from algorithms.lordo.reference import Reference
from algorithms.lordo.sync import Sync
from algorithms.lordo.wire import Reduced, reduce_stacked

LOW_RANK = {
    "0.attn.in": (6, 10),
    "0.attn.out": (6, 10),
    "0.mlp.up": (12, 6),
    "0.mlp.down": (6, 12),
    "1.attn.square": (6, 6),
    "1.mlp.experts": (3, 4, 7),
    "1.mlp.gate": (2, 6),
}
DENSE: dict[str, tuple[int, ...]] = {"emb": (9, 6), "norm": (6,), "scale": (), "none": (0, 3)}
"""Tall, wide, square, 3-D and one shorter than the rank; 2-D, 1-D, 0-d and empty."""

OPTIMIZER = OptimizerConfig(lr=0.02, beta1=0.9, beta2=0.97, weight_decay=0.1)
RANK = 3

NESTEROV: dict[str, Any] = {"outer": "nesterov", "outer_momentum": 0.7, "outer_lr": 0.8}


def sync_config(**changes: Any) -> SyncConfig:
    """Every second round first moments meet, every fourth second ones."""
    return SyncConfig(**{"every": 3, "momentum_every": 6, "variance_every": 12, **changes})


def low_rank(**changes: Any) -> LowRankConfig:
    """With a full-rank term as strong as the momentum, so that projections move."""
    return LowRankConfig(**{"rank": RANK, "omega": 0.5, **changes})


def weights(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """The same on every worker."""
    generator = torch.Generator().manual_seed(0)
    shapes = {**LOW_RANK, **DENSE}
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for name, shape in shapes.items()
    }


def gradients(held: Mapping[str, Tensor], worker: int, step: int) -> dict[str, Tensor]:
    """A weak pull towards 0 plus noise of the worker and step. Rows take turns in being strong, so
    that a projection has something to follow."""
    found = {}
    for name, weight in held.items():
        generator = torch.Generator().manual_seed(mix(name, worker, step) % 2**63)
        noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        if weight.dim() > 1 and weight.numel():
            rows, cols = weight.shape[-2:]
            strength = (0.5 ** torch.arange(rows)).roll(step // 3)
            noise *= strength[:, None] * 0.8 ** torch.arange(cols)
        found[name] = 0.1 * weight.detach() + noise.to(weight.dtype)
    return found


@dataclass
class Worker:
    """What a rank holds."""

    index: int
    named: dict[str, Parameter]
    optimizer: torch.optim.Optimizer
    sync: Sync

    def train(self, step: int) -> None:
        """Gradients of a step into `.grad`."""
        for name, gradient in gradients(self.named, self.index, step).items():
            self.named[name].grad = gradient

    def state(self) -> dict[str, Any]:
        """All that a checkpoint needs."""
        return {
            "weights": {name: each.detach() for name, each in self.named.items()},
            "optimizer": self.optimizer.state_dict(),
            "sync": self.sync.state_dict(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        with torch.no_grad():
            for name, value in state["weights"].items():
                self.named[name].copy_(value)
        self.optimizer.load_state_dict(state["optimizer"])
        self.sync.load_state_dict(state["sync"])


def worker(
    index: int,
    sync: SyncConfig,
    method: LowRankConfig | None,
    *,
    world_size: int,
    dtype: torch.dtype = torch.float64,
    agree: Any = None,
) -> Worker:
    """One of `world_size`; without `method` AdamW is the inner optimizer."""
    named = {name: Parameter(weight) for name, weight in weights(dtype).items()}
    betas = (OPTIMIZER.beta1, OPTIMIZER.beta2)
    common: dict[str, Any] = {"lr": OPTIMIZER.lr, "betas": betas, "eps": OPTIMIZER.eps}
    common["weight_decay"] = OPTIMIZER.weight_decay
    optimizer: torch.optim.Optimizer
    if method is None:
        optimizer = torch.optim.AdamW(named.values(), **common)
    else:
        optimizer = LoRDO(
            [
                {"params": [named[name] for name in LOW_RANK], "rank": method.rank},
                {"params": [named[name] for name in DENSE]},
            ],
            **common,
            qhm=method.qhm,
            omega=method.omega,
            mu=method.mu,
            scaling=method.scaling,
            error_feedback=method.error_feedback,
            local=method.projection == "local",
        )
    synced = Sync(
        iter(named.items()), optimizer, sync, method, world_size=world_size, seed=5, agree=agree
    )
    return Worker(index, named, optimizer, synced)


class Stacked:
    """All workers in one process."""

    def __init__(
        self,
        count: int,
        sync: SyncConfig,
        method: LowRankConfig | None,
        *,
        dtype: torch.dtype = torch.float64,
        codec: Codec | None = None,
    ) -> None:
        self.workers = [
            worker(index, sync, method, world_size=count, dtype=dtype) for index in range(count)
        ]
        self.delay = sync.delay
        self.codec = codec
        self.owners: list[Tensor] = []
        self.flight: tuple[int, list[dict[str, Reduced]]] | None = None

    def step(self, step: int) -> None:
        for each in self.workers:
            each.train(step)
        self.apply(step, self.exchange([each.sync.first_gradient() for each in self.workers]))
        for each in self.workers:
            each.optimizer.step()
        if self.flight is not None and self.flight[0] + self.delay == step:
            self.land(step)
        reduced = self.exchange([each.sync.contributions(step) for each in self.workers])
        if reduced[0]:
            self.flight = (step, reduced)
        if self.delay == 0:
            self.land(step)

    def flush(self, step: int) -> None:
        self.land(step)
        self.apply(step, self.exchange([each.sync.flush(step) for each in self.workers]))

    def land(self, step: int) -> None:
        if self.flight is not None:
            self.apply(step, self.flight[1])
            self.flight = None

    def apply(self, step: int, reduced: Sequence[Mapping[str, Reduced]]) -> None:
        for each, mine in zip(self.workers, reduced, strict=True):
            each.sync.apply(step, mine)

    def exchange(self, contributed: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Reduced]]:
        reduced: list[dict[str, Reduced]] = [{} for _ in contributed]
        for tag in contributed[0]:
            mean, sents = reduce_stacked(
                [buffers[tag] for buffers in contributed],
                None if tag == "moments" else self.codec,
                self.owners if tag == "delta" else None,
            )
            for mine, sent in zip(reduced, sents, strict=True):
                mine[tag] = Reduced(mean, sent)
        return reduced


def reference(
    count: int, sync: SyncConfig, method: LowRankConfig, codec: Codec | None = None
) -> Reference:
    """The slow twin of `Stacked`, in float64."""
    return Reference(weights(), list(LOW_RANK), count, OPTIMIZER, method, sync, seed=5, codec=codec)


def step_reference(twin: Reference, step: int) -> None:
    """The same gradients as `Stacked.step`."""
    given = [gradients(each.x, index, step) for index, each in enumerate(twin.workers)]
    twin.step(given, OPTIMIZER.lr)


def assert_equal_weights(workers: Sequence[Worker]) -> None:
    """Bit for bit."""
    for each in workers[1:]:
        for name, parameter in each.named.items():
            assert torch.equal(parameter, workers[0].named[name]), name
