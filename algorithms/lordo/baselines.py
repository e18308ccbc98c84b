"""The arms that LoRDO is measured against, as `Method`s of `algorithms.common.loop`.

`ddp`: AdamW on gradients averaged over all ranks at every step, through torch's
DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from algorithms.common.comm import Comm
from algorithms.common.config import OptimizerConfig
from algorithms.common.model import logits


def adamw(model: nn.Module, config: OptimizerConfig) -> AdamW:
    """torch's AdamW; weight decay on matrices only, not on norms and biases."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    return AdamW(
        [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
    )


class DataParallel:
    """Arm `ddp`. On one rank it is plain training: no wrapper, no exchange."""

    def __init__(self, model: nn.Module, config: OptimizerConfig, comm: Comm) -> None:
        self.model = model
        self.config = config
        self.optimizer = adamw(model, config)
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
        bound = self.config.clip_norm or torch.inf
        return nn.utils.clip_grad_norm_(self.model.parameters(), bound)

    def update(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def flush(self) -> None:
        """Nothing to do: the ranks never differ."""


METHODS: dict[str, type[DataParallel]] = {"ddp": DataParallel}
"""`ArmConfig.method` -> its class."""
