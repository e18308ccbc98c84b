"""Methods `ddp` and `lowrank_ddp`: gradients, or their low-rank parts, averaged at every step.

What the local arms are measured against; each is a `Method` of `algorithms.common.loop`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from algorithms.common.adamw import set_rate
from algorithms.common.comm import Comm
from algorithms.common.model import logits
from algorithms.lordo import inner
from algorithms.lordo.lowrank_ddp import LowRankDdp


class DataParallel:
    """Arm `ddp`, by DistributedDataParallel. On one rank it is plain training: no wrapper, no
    exchange."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, comm: Comm, *, clip_norm: float
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.clip_norm = clip_norm
        self.wrapper: DistributedDataParallel | None = None
        if comm.world_size > 1:
            self.wrapper = DistributedDataParallel(
                model,
                process_group=comm.group,
                init_sync=False,  # built from one seed, or loaded: equal already
                forward_sync_buffers=False,
                gradient_as_bucket_view=True,
            )
            self.wrapper.register_comm_hook(None, comm.ddp_hook("gradients"))
        self.module: nn.Module = self.wrapper or model

    def prepare(self, tokens: Tensor) -> None:
        """One backward pass that counts for nothing, so that DDP settles its buckets.

        DDP lays its buckets out anew after the first backward pass, and the order of gloo's sums
        depends on the layout. Settled before step 1 and after every resume, the layout of a step
        does not depend on where the run was interrupted.
        """
        if self.wrapper is not None:
            logits(self.wrapper, tokens[:, :-1]).sum().backward()  # type: ignore[no-untyped-call]
            self.optimizer.zero_grad(set_to_none=True)

    @contextmanager
    def microbatch(self, last: bool) -> Iterator[None]:
        if self.wrapper is None or last:
            yield
        else:
            with self.wrapper.no_sync():
                yield

    def gradient_norm(self) -> Tensor:
        return inner.clip(self.model, self.clip_norm)

    def meets(self, step: int) -> bool:
        return True

    def update(self, step: int, lr: float) -> None:
        inner.descend(self.optimizer, lr)

    def flush(self, step: int) -> None:
        """Nothing to do: the ranks never differ."""

    def synced(self) -> AbstractContextManager[None]:
        return nullcontext()


class LowRankDataParallel:
    """Arm `lowrank_ddp`: gradients' low-rank parts averaged at every step, in one flat all-reduce.

    The optimizer says what a rank sends and what the mean does. Weights are the same on all ranks;
    what error feedback keeps is not.
    """

    def __init__(
        self, model: nn.Module, optimizer: LowRankDdp, comm: Comm, *, clip_norm: float
    ) -> None:
        self.module = model
        self.optimizer = optimizer
        self.comm = comm
        self.clip_norm = clip_norm

    def prepare(self, tokens: Tensor) -> None:
        """Nothing to do."""

    def microbatch(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def gradient_norm(self) -> Tensor:
        """Of this rank's gradient, which is clipped by itself."""
        return inner.clip(self.module, self.clip_norm)

    def meets(self, step: int) -> bool:
        return True

    def update(self, step: int, lr: float) -> None:
        set_rate(self.optimizer, lr)
        flat = self.optimizer.contribution()
        self.comm.all_reduce(flat, tag="gradients", op="mean")
        self.optimizer.apply(flat)
        self.optimizer.zero_grad(set_to_none=True)

    def flush(self, step: int) -> None:
        """Nothing to do: the ranks hold the same weights."""

    def synced(self) -> AbstractContextManager[None]:
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
