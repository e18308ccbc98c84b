"""Method `local`: every rank takes steps of its own, a `Sync` brings the ranks together.

The rank's half of what LoRDO (2602.04396), DES-LOC (2505.22549) and DiLoCo (2311.08105) share; what
differs between them is the inner optimizer and the `SyncConfig`. Each kind of buffer has a
`Reducer`, so a sync costs as many exchanges as there are kinds. With `delay` d, what is sent after
step t is taken in after step t + d.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from algorithms.common.codec import CODECS
from algorithms.common.comm import Comm
from algorithms.common.loop import Guard, unguarded
from algorithms.lordo import inner
from algorithms.lordo.agreement import same_on_all_ranks
from algorithms.lordo.config import LowRankConfig, SyncConfig
from algorithms.lordo.sync import Sync
from algorithms.lordo.wire import Background, Pending, Reducer


class Local:
    """One rank of a local arm; a `Method` of `algorithms.common.loop`.

    `guard` calls every exchange; with a delay, only the wait for it. `world_size`: that of the run,
    where `comm` does not know it yet.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        config: SyncConfig,
        low_rank: LowRankConfig | None,
        comm: Comm,
        *,
        clip_norm: float,
        seed: int,
        guard: Guard = unguarded,
        world_size: int | None = None,
    ) -> None:
        world_size = comm.world_size if world_size is None else world_size
        self.module = model
        self.comm = comm
        self.optimizer = optimizer
        self.config = config
        self.clip_norm = clip_norm
        self.guard = guard
        self.sync = Sync(
            model.named_parameters(),
            optimizer,
            config,
            low_rank,
            world_size=world_size,
            seed=seed,
            agree=same_on_all_ranks(comm, "projection") if world_size > 1 else None,
        )
        background = None
        if config.delay > 0:
            background = Background(_second_group(comm, config.timeout_s))
        self.reducers = {tag: self._reducer(tag, background) for tag in ("delta", "moments")}
        self.pending: dict[str, Pending] = {}

    def prepare(self, tokens: Tensor) -> None:
        """Nothing to do."""

    def microbatch(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def gradient_norm(self) -> Tensor:
        """Of this rank's gradient, which is clipped by itself."""
        return inner.clip(self.module, self.clip_norm)

    def meets(self, step: int) -> bool:
        return self.sync.awaits_first_gradient or self._arrives(step)

    def _arrives(self, step: int) -> bool:
        """Whether what was sent `delay` steps ago is taken in now."""
        config = self.config
        periods = (config.every, config.momentum_every, config.variance_every)
        sent = step - config.delay
        return sent > 0 and any(every and sent % every == 0 for every in periods)

    def update(self, step: int, lr: float) -> None:
        first = self.sync.first_gradient()
        if first:
            self.guard(step, lambda: self._project(step, first))
        inner.descend(self.optimizer, lr)
        if self._arrives(step):
            self._exchange(step)
        due = self.sync.contributions(step)
        if self.config.delay > 0:
            self.pending |= self._start(due)
        else:
            self._exchange(step, due)

    def flush(self, step: int) -> None:
        """Take in the round in flight, then exchange weights if steps were made since."""
        self._exchange(step)
        self._exchange(step, self.sync.flush(step))

    def synced(self) -> AbstractContextManager[None]:
        return self.sync.synced()

    def state_dict(self) -> dict[str, Any]:
        return {
            "weights": dict(self.module.named_parameters()) | dict(self.module.named_buffers()),
            "optimizer": self.optimizer.state_dict(),
            "sync": self.sync.state_dict(),
            "reducers": {tag: each.state_dict() for tag, each in self.reducers.items()},
            "pending": {tag: each.state_dict() for tag, each in self.pending.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        own = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
        with torch.no_grad():
            for name, value in state["weights"].items():
                own[name].copy_(value)
        self.optimizer.load_state_dict(state["optimizer"])
        self.sync.load_state_dict(state["sync"])
        for tag, each in state["reducers"].items():
            self.reducers[tag].load_state_dict(each)
        self.pending = {
            tag: Pending.restored(self.comm, each) for tag, each in state["pending"].items()
        }

    def _project(self, step: int, first: Mapping[str, Tensor]) -> None:
        """Average the first gradient; for want of a second, its reducer has nothing to keep."""
        means = {tag: self._reducer(tag)(flat) for tag, flat in first.items()}
        self.sync.apply(step, means)

    def _reducer(self, tag: str, background: Background | None = None) -> Reducer:
        """Moments go without a code."""
        codec = None if tag == "moments" else CODECS.get(self.config.wire)
        return Reducer(self.comm, tag, codec, background)

    def _exchange(self, step: int, buffers: Mapping[str, Tensor] | None = None) -> None:
        """Average `buffers`, if there are any, and take in what is under way."""

        def work() -> None:
            self.pending |= self._start(buffers or {})
            self._finish(step)

        if buffers or self.pending:
            self.guard(step, work)

    def _start(self, buffers: Mapping[str, Tensor]) -> dict[str, Pending]:
        return {tag: self.reducers[tag].start(flat) for tag, flat in buffers.items()}

    def _finish(self, step: int) -> None:
        """Wait for the round in flight, if there is one, and take it in."""
        pending, self.pending = self.pending, {}
        self.sync.apply(step, {tag: each.wait() for tag, each in pending.items()})


def _second_group(comm: Comm, timeout_s: float) -> dist.ProcessGroup | None:
    """The world's ranks once more: what two threads send at a time needs a group for each."""
    if comm.group is None:
        return None
    assert comm.world_size == dist.get_world_size(), "a delayed exchange takes the whole world"
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    assert isinstance(group, dist.ProcessGroup)
    return group
