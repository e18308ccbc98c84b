"""How workers that train on their own come together: the outer half of every local method.

Source: LoRDO (2602.04396) with DES-LOC's three periods (2505.22549) and DiLoCo's outer step
(2311.08105). Every K_x steps, with D_k = x_k - x_sync and D its mean over the workers,

    average:   x_sync <- x_sync + D
    nesterov:  m <- b m + D,  x_sync <- x_sync + lr (D + b m)

and x_k = x_sync. Every K_u and K_v steps u and v become their means. For low-rank moments the new
projection Q comes from D, after the moments were averaged in the old basis; then they turn.

A `Sync` sends nothing itself. `contributions` gives at most one flat buffer per kind, however many
parameters there are; the caller averages them over the workers (`algorithms/lordo/wire.py`) and
hands the results to `apply`, at once or up to `delay` steps later. So real ranks and workers
stacked in one process run the same code.

What the source leaves open: the first Q is that of the averaged first gradient (`first_gradient`).
A Q that spans the same space as the old one (overlap above 1 - 1e-6) is not taken, as turning
inside a space only blurs v. Moments of `local` projections live in bases of their own and are not
averaged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from algorithms.common.codec import Int8Codec
from algorithms.common.errors import InputError, NonFiniteError
from algorithms.lordo.bases import Agree, Bases, group_of_each
from algorithms.lordo.config import LowRankConfig, SyncConfig
from algorithms.lordo.wire import Reduced

MOMENTS = {"exp_avg": 0, "exp_avg_sq": 1}
"""Key of an averaged moment in an optimizer's state -> place of its decay in `betas`."""

INT8 = Int8Codec()


@dataclass
class Round:
    """What was contributed and waits for its averages."""

    step: int
    partial: bool
    """Made by `flush`: only the weights meet."""
    taken: Tensor | None = None
    """The worker's weights when it contributed, flat."""
    delta: Tensor | None = None
    """What it contributed."""
    moments: Tensor | None = None
    """Moments that it contributed, flat, kept where others may change meanwhile."""
    keys: tuple[str, ...] = ()
    """Which moments."""


class Sync:
    """One worker's part in the rounds; all workers make the same calls with the same steps.

    `named_parameters` are those of the model, `optimizer` the inner one over them. `low_rank` is
    for an optimizer whose state holds projections, which the `Sync` then sets. `world_size` is the
    number of workers, `seed` equal on all. `agree` makes a flat tensor equal on all workers
    (`algorithms/lordo/agreement.py`); None trusts that they compute the same.

    In a loop, after clipping, with `exchange` for the caller's averaging of each buffer:

        sync.apply(step, exchange(sync.first_gradient()))
        optimizer.step()
        sync.apply(step, exchange(sync.contributions(step)))

    Steps count from 1. Whoever receives buffers must not write into them.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Parameter]],
        optimizer: Optimizer,
        config: SyncConfig,
        low_rank: LowRankConfig | None = None,
        *,
        world_size: int,
        seed: int = 0,
        agree: Agree | None = None,
    ) -> None:
        named = [(name, each) for name, each in named_parameters if each.requires_grad]
        self.names = [name for name, _ in named]
        self.parameters: list[Tensor] = [parameter for _, parameter in named]
        self.optimizer = optimizer
        groups = group_of_each(optimizer)
        self._groups = [groups[parameter] for parameter in self.parameters]
        self.config = config
        self.world_size = world_size
        self.x_sync = self._weights()
        self.outer_momentum: Tensor | None = None
        """Flat, or its int8 code as bytes."""
        self.residual: Tensor | None = None
        """What the wire has dropped so far, flat, with `residual: buffer`."""
        self.last_step = 0
        """Step of the last exchange of weights."""
        self.projected = False
        """Whether the first gradient has been used."""
        self.round: Round | None = None
        self.bases: Bases | None = None
        if low_rank is not None:
            projected = [each for each in named if "projection" in optimizer.state[each[1]]]
            if not projected:
                raise InputError("low_rank: the optimizer's state holds no projection")
            self.bases = Bases(projected, optimizer, low_rank, seed, agree)

    @property
    def awaits_first_gradient(self) -> bool:
        """Whether `first_gradient` will ask for an exchange."""
        bases = self.bases
        return bases is not None and bases.from_first_gradient and not self.projected

    @torch.no_grad()
    def first_gradient(self) -> dict[str, Tensor]:
        """Before the first update: `projection`, the flat gradients of low-rank weights, if the
        first projections come from their average; otherwise and later nothing."""
        if not self.awaits_first_gradient:
            return {}
        assert self.bases is not None
        gradients = [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for _, parameter in self.bases.named
        ]
        return {"projection": _flat(gradients)}

    @torch.no_grad()
    def contributions(self, step: int) -> dict[str, Tensor]:
        """What is due after the update of `step`: `delta`, the pseudo-gradient (plus the residual),
        and `moments`, first and second ones as they are due; one flat buffer each, or nothing."""
        periods = (self.config.momentum_every, self.config.variance_every)
        keys = tuple(
            key for key, every in zip(MOMENTS, periods, strict=True) if every and step % every == 0
        )
        return self._contribute(step, step % self.config.every == 0, keys, partial=False)

    def flush(self, step: int) -> dict[str, Tensor]:
        """`delta` of the round that `step` has left open, nothing if it left none.

        Applied like any other, but projections stay as they are, and the next round ends where it
        would have: at the next multiple of `every`.
        """
        return self._contribute(step, step != self.last_step, (), partial=True)

    @torch.no_grad()
    def find(self, step: int, reduced: Mapping[str, Reduced]) -> list[Tensor] | None:
        """The projections that `apply` would take, if any. `agree` is asked here and nowhere else,
        so `apply` with them exchanges nothing. Changes nothing. Raises what `apply` raises."""
        for tag, each in reduced.items():
            if not isinstance(each, Reduced):
                kind = type(each).__name__
                raise InputError(f"{tag}: must be Reduced(mean, sent), not {kind}")
        bases, done = self.bases, self.round
        if "projection" in reduced:
            assert bases is not None
            parts = _like(reduced["projection"].mean, [each for _, each in bases.named])
            names = [name for name, _ in bases.named]
            return bases.find(dict(zip(names, parts, strict=True)), step)
        if done is None or not reduced.keys() & {"delta", "moments"}:
            return None
        if done.delta is not None:
            mean = reduced["delta"].mean
            self._require_finite("pseudo-gradient", self.names, self.parameters, mean, done.step)
        if done.moments is not None:
            names, values = _names_and_values(self._moments(done.keys))
            mean = reduced["moments"].mean
            self._require_finite("average moment", names, values, mean, done.step)
        if done.delta is None or done.partial or bases is None or not bases.refreshes:
            return None
        parts = _like(reduced["delta"].mean, self.parameters)
        return bases.find(dict(zip(self.names, parts, strict=True)), done.step)

    @torch.no_grad()
    def apply(
        self, step: int, reduced: Mapping[str, Reduced], found: list[Tensor] | None = None
    ) -> None:
        """Take what the workers' contributions averaged to; with nothing, do nothing. `found` is
        what `find` gave for it, unless it is to be found now.

        `step` is the last one whose update was made. It may be d steps after the contributions:
        progress made meanwhile stays on top of the new weights, and a moment's correction has
        decayed as the moment has. So x_k <- x_k + (x_sync - x_k as it was contributed), and
        u_k <- u_k + b1^d (mean - u_k as it was contributed). Raises `NonFiniteError`, before it
        changes anything, for a mean that is not finite, and `InputError` for what is not `Reduced`.
        """
        if found is None:
            found = self.find(step, reduced)
        if self.round is not None and reduced.keys() & {"delta", "moments"}:
            done, lag = self.round, step - self.round.step
            if done.moments is not None:
                self._apply_moments(done, reduced["moments"].mean, lag)
            if done.delta is not None:
                self._apply_delta(done, reduced["delta"], lag)
                self.last_step = done.step
            self.round = None
        if found is not None:
            assert self.bases is not None
            self.bases.turn(found)
            self.projected |= "projection" in reduced

    def return_to_sync(self) -> None:
        """Give the model `x_sync` as weights, as after a round that dropped nothing."""
        self._assign(self.x_sync)

    @contextmanager
    def synced(self) -> Iterator[None]:
        """Inside, the model has `x_sync` as weights: what all workers share after a `flush`.

        It matters with `residual: weights`, and while a delayed round is in flight.
        """
        own = self._weights()
        self._assign(self.x_sync)
        try:
            yield
        finally:
            self._assign(own)

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values. A round in flight is part of it; who averages it keeps what
        came of it (`Pending.state_dict`). Weights between two rounds are the model's."""
        return {
            "x_sync": self.x_sync,
            "outer_momentum": self.outer_momentum,
            "residual": self.residual,
            "last_step": self.last_step,
            "projected": self.projected,
            "round": None if self.round is None else vars(self.round).copy(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises `InputError` for the state of another model."""
        if state["x_sync"].shape != self.x_sync.shape:
            raise InputError(
                f"x_sync: holds {state['x_sync'].numel()} values, the model {self.x_sync.numel()}"
            )
        self.x_sync.copy_(state["x_sync"])
        self.outer_momentum = self._own(state["outer_momentum"])
        self.residual = self._own(state["residual"])
        self.last_step = state["last_step"]
        self.projected = state["projected"]
        self.round = None
        if state["round"] is not None:
            values = {key: self._own(value) for key, value in state["round"].items()}
            self.round = Round(**values)

    @torch.no_grad()
    def _contribute(
        self, step: int, weights: bool, keys: tuple[str, ...], partial: bool
    ) -> dict[str, Tensor]:
        if not weights and not keys:
            return {}
        if self.round is not None:
            raise RuntimeError(f"the round of step {self.round.step} has not been applied")
        self.round = Round(step, partial, keys=keys)
        buffers = {}
        if weights:
            self.round.taken = self._weights()
            delta = self.round.delta = self.round.taken - self.x_sync
            if self.residual is not None:
                delta += self.residual
            buffers["delta"] = delta
        if keys:
            moments = self.round.moments = _flat(_names_and_values(self._moments(keys))[1])
            buffers["moments"] = moments
        return buffers

    def _apply_moments(self, done: Round, mean: Tensor, lag: int) -> None:
        members = self._moments(done.keys)
        _, values = _names_and_values(members)
        if lag == 0:
            torch._foreach_copy_(values, _like(mean, values))
            return
        assert done.moments is not None
        for value, decay, change in zip(
            values,
            [decay for _, decay, _ in members],
            _like(mean - done.moments, values),
            strict=True,
        ):
            value.add_(change, alpha=decay**lag)

    def _apply_delta(self, done: Round, reduced: Reduced, lag: int) -> None:
        mean, sent = reduced
        assert done.taken is not None and done.delta is not None
        alone = self.world_size == 1 and self.config.outer == "average" and self.residual is None
        if alone and torch.equal(mean, done.delta):
            self.x_sync.copy_(done.taken)  # (x_k - x_sync) + x_sync may differ in the last bit
        else:
            self.x_sync += self._outer_step(mean)
        target = self.x_sync
        if self.config.residual == "weights":
            target = target + (done.delta - sent)
        elif self.config.residual == "buffer":
            self.residual = done.delta - sent
        self._assign(target if lag == 0 else self._weights() + (target - done.taken))

    def _outer_step(self, mean: Tensor) -> Tensor:
        config = self.config
        if config.outer == "average":
            return mean
        if config.outer_momentum == 0:
            return config.outer_lr * mean
        kept = self.outer_momentum
        coded = config.outer_state == "int8"
        if kept is None:
            momentum = torch.zeros_like(mean)
        else:
            momentum = INT8.decode(kept, mean.numel(), mean.dtype) if coded else kept
        momentum.mul_(config.outer_momentum).add_(mean)
        self.outer_momentum = INT8.encode(momentum) if coded else momentum
        return config.outer_lr * (mean + config.outer_momentum * momentum)

    def _moments(self, keys: tuple[str, ...]) -> list[tuple[str, float, Tensor]]:
        """Name, decay and tensor of every moment to be averaged, in an order all workers share."""
        own_bases = set()
        if self.bases is not None and self.bases.config.projection == "local":
            own_bases = {name for name, _ in self.bases.named}
        found = []
        for key in keys:
            for name, parameter, group in zip(
                self.names, self.parameters, self._groups, strict=True
            ):
                state = self.optimizer.state.get(parameter)
                # Without any state this worker has seen no gradient yet; others may have.
                value = state.get(key) if state else torch.zeros_like(parameter)
                if value is not None and name not in own_bases:
                    decay = self.optimizer.param_groups[group]["betas"][MOMENTS[key]]
                    found.append((name, decay, value))
        return found

    def _require_finite(
        self, what: str, names: list[str], like: Sequence[Tensor], mean: Tensor, step: int
    ) -> None:
        if bool(mean.sum().isfinite()):  # much cheaper; finite values may overflow in it, too
            return
        for name, part in zip(names, _like(mean, like), strict=True):
            if not bool(part.isfinite().all()):
                raise NonFiniteError(f"step {step}: {what} of {name} is not finite")

    def _weights(self) -> Tensor:
        return _flat(self.parameters)

    def _assign(self, flat: Tensor) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, _like(flat, self.parameters))

    def _own(self, value: Any) -> Any:
        return value.to(self.x_sync.device, copy=True) if isinstance(value, Tensor) else value


def _names_and_values(
    moments: list[tuple[str, float, Tensor]],
) -> tuple[list[str], list[Tensor]]:
    return [name for name, _, _ in moments], [value for _, _, value in moments]


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """A copy of all, one after the other, in the widest of their dtypes."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _like(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """`flat` cut into views of the shapes of `tensors`."""
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
