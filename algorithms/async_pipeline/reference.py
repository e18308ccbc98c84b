"""The delay of an asynchronous pipeline, simulated exactly in one process.

Stage k forwards microbatch m with weights that have max(0, m - D_k) // a updates, where D_k is its
delay in microbatches (P-1-k if not given by hand) and `a` microbatches make an update. With
x_0 the tokens, x_{k+1} = f_k(v_k, x_k) is computed at these old weights v_k. Then, from the last
stage to the first, with g_P = 1 (the loss over `a` belongs to the last stage's function):

    stash      (dW_k, g_k) = g_{k+1} d f_k(v, x_k) / d(v, x_k)   at v = v_k, the same old weights
    no stash   (dW_k, g_k) = g_{k+1} d f_k(w, x_k) / d(w, x_k)   at w = the newest weights of k

Both take the input x_k that arrived in the forward and the cotangent g_{k+1} that the next stage
gives. With stash this is the gradient of the loss at (v_0, ..., v_{P-1}). Without, it is the
gradient of no function: stage k differentiates a forward recomputed at weights D_k microbatches
newer than those whose output the next stage saw. dW_k, summed over `a` microbatches, is clipped per
stage and applied to the newest weights.

Knows nothing of schedules and messages: it is what they are tested against.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from algorithms.async_pipeline.update import (
    BeforeUpdate,
    Factory,
    Finding,
    Loss,
    accumulate,
    apply,
    cause,
    examine,
    objective,
    weights_of,
)
from algorithms.common.errors import InputError, NonFiniteError


class Delayed:
    """All stages of a pipeline in one process, fed one microbatch after the other."""

    def __init__(
        self,
        stages: Sequence[nn.Module],
        optimizer: Factory,
        loss: Loss,
        *,
        delays: Sequence[int] | None = None,
        stash: bool = True,
        accumulation: int = 1,
        clip_norm: float = 0.0,
        before_update: BeforeUpdate | None = None,
    ) -> None:
        """Trains the parameters of `stages` in place. Raises `InputError` for delays that are not
        one for each stage, and for frozen parameters."""
        count = len(stages)
        self.delays = list(range(count - 1, -1, -1)) if delays is None else list(delays)
        if len(self.delays) != count or min(self.delays) < 0:
            raise InputError(f"delays: {self.delays} is not one delay for each of {count} stages")
        self.stages = stages
        self.weights = [weights_of(stage) for stage in stages]
        self.optimizers = [
            optimizer(list(weights.items()), k, count) for k, weights in enumerate(self.weights)
        ]
        self.loss = loss
        self.stash = stash
        self.accumulation = accumulation
        self.clip_norm = clip_norm
        self.before_update = before_update
        self.microbatches = 0
        """How many have been made."""
        self.norms: list[float] = []
        """L2 norm of each stage's last gradient before clipping."""
        self.losses: list[Tensor] = []
        """Of the microbatches of the update under way."""
        self.history: list[deque[dict[str, Tensor]]] = [deque(maxlen=d + 1) for d in self.delays]
        """Of each stage the weights before this microbatch and the D_k before it, oldest first."""

    def drain(self) -> None:
        """Let the next microbatch see the newest weights everywhere, as at the start of a run."""
        for history in self.history:
            history.clear()

    def microbatch(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Train on one microbatch and return its loss, a scalar; every `accumulation`-th ends in an
        update. Raises `NonFiniteError` before a bad gradient reaches its stage's weights."""
        last = len(self.stages) - 1
        x = inputs
        xs, graphs = list[Tensor](), list[tuple[dict[str, Tensor], Tensor] | None]()
        for k, stage in enumerate(self.stages):
            x = x.detach().requires_grad_(k > 0)
            xs.append(x)
            old = self._old_weights(k)
            if self.stash or self.delays[k] == 0:
                x = functional_call(stage, old, (x,)) if self.delays[k] else stage(x)
                graphs.append((old, x))
            else:
                graphs.append(None)
                if k < last:
                    with torch.no_grad():
                        x = functional_call(stage, old, (x,))

        value, cotangent = inputs, None
        for k in range(last, -1, -1):
            weights, output = graphs[k] or (self.weights[k], self.stages[k](xs[k]))
            if k == last:
                value = self.loss(output, targets)
                output = objective(value, self.accumulation)
            wanted = [*weights.values(), *([xs[k]] if k else [])]
            gradients = torch.autograd.grad(output, wanted, cotangent, allow_unused=True)
            cotangent = gradients[-1] if k else None
            accumulate(self.weights[k], gradients[: len(weights)], cotangent)
        self.microbatches += 1
        self.losses.append(value.detach())
        if self.microbatches % self.accumulation == 0:
            self._update(self.microbatches // self.accumulation - 1)
        return value.detach()

    def _old_weights(self, k: int) -> dict[str, Tensor]:
        """Those that stage k forwards this microbatch with; its own if it has no delay."""
        if self.delays[k] == 0:
            return dict(self.weights[k])
        history = self.history[k]
        if history and self.microbatches % self.accumulation:
            history.append(history[-1])  # no update since the last microbatch
        else:
            copies = {name: w.detach().clone() for name, w in self.weights[k].items()}
            history.append({name: copy.requires_grad_() for name, copy in copies.items()})
        return history[0]

    def _update(self, update: int) -> None:
        last = len(self.stages) - 1
        self.norms, findings = [], list[Finding]()
        for k, (weights, optimizer) in enumerate(zip(self.weights, self.optimizers, strict=True)):
            try:
                norm = apply(
                    weights,
                    optimizer,
                    stage=k,
                    update=update,
                    clip_norm=self.clip_norm,
                    before_update=self.before_update,
                )
            except NonFiniteError:
                losses = self.losses if k == last else []
                findings.append(examine(weights, stage=k, update=update, losses=losses))
            else:
                self.norms.append(norm)
        self.losses = []
        if found := cause(findings):
            raise NonFiniteError(found.text)
