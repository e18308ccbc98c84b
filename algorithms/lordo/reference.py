"""LoRDO once more, slowly: all workers in one process, one matrix after the other.

The twin that `optimizer.py` and `sync.py` are tested against, written from the equations there and
in LoRDO (2602.04396), LDAdam (2410.16103) and DiLoCo (2311.08105), in the order of a worker's life.
It shares no code with them but `random_orthonormal` (a definition, not an algorithm) and the wire's
`reduce_stacked`. Meant for float64; not for training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from algorithms.common.codec import Codec
from algorithms.common.config import OptimizerConfig
from algorithms.common.seeding import mix
from algorithms.lordo.config import LowRankConfig, SyncConfig
from algorithms.lordo.projection import random_orthonormal
from algorithms.lordo.wire import reduce_stacked

RHO = 0.908
"""Share of the momentum in what local projections follow; LDAdam's default."""


@dataclass
class Moments:
    """Of one matrix `[m, n]` (Q given), or of one dense weight."""

    u: Tensor
    v: Tensor
    Q: Tensor | None = None
    E: Tensor | None = None


@dataclass
class Flight:
    """A round on its way: what every worker contributed at `step`."""

    step: int
    weights: list[dict[str, Tensor]] | None
    deltas: list[Tensor]
    u: list[list[Tensor]] | None
    v: list[list[Tensor]] | None


@dataclass
class Worker:
    """Weights `x` and moments by name; those of `[..., rows, cols]` as a list of matrices."""

    x: dict[str, Tensor]
    moments: dict[str, list[Moments]] = field(default_factory=dict)
    residual: Tensor | None = None


class Reference:
    """`workers` workers that start from `weights`; those named `low_rank` have low-rank moments.

    Call `step` with every worker's gradients (clipped); read `workers[k].x` and `x_sync`.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        low_rank: Sequence[str],
        workers: int,
        optimizer: OptimizerConfig,
        method: LowRankConfig,
        sync: SyncConfig,
        *,
        seed: int = 0,
        codec: Codec | None = None,
    ) -> None:
        self.low_rank = set(low_rank)
        self.config, self.method, self.sync = optimizer, method, sync
        self.seed, self.codec = seed, codec
        self.t = 0
        self.x_sync = {name: weight.clone() for name, weight in weights.items()}
        self.outer = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        self.owners: list[Tensor] = []
        self.flight: Flight | None = None
        self.overlaps: list[float] = []
        self.workers = [Worker({n: w.clone() for n, w in weights.items()}) for _ in range(workers)]
        for worker in self.workers:
            for name, weight in weights.items():
                worker.moments[name] = self._fresh(name, weight)

    def _fresh(self, name: str, weight: Tensor) -> list[Moments]:
        if name not in self.low_rank:
            return [Moments(torch.zeros_like(weight), torch.zeros_like(weight))]
        made = []
        for Q in self._drawn(name, weight, "first"):
            u = weight.new_zeros(Q.shape[1], max(weight.shape[-2:]))
            made.append(Moments(u, u.clone(), Q, weight.new_zeros(Q.shape[0], u.shape[1])))
        return made

    def _drawn(self, name: str, weight: Tensor, when: int | str) -> Tensor:
        m = min(weight.shape[-2:])
        count = weight.numel() // (weight.shape[-1] * weight.shape[-2])
        seed = mix("projection", self.seed, when, name)
        return random_orthonormal(count, m, min(self.method.rank, m), seed, like=weight)

    def step(self, gradients: Sequence[Mapping[str, Tensor]], lr: float) -> None:
        """One step of every worker, and what is due after it."""
        self.t += 1
        if self.t == 1 and self.method.projection in ("global", "frozen"):
            firsts = [_join(each[name] for name in self._low()) for each in gradients]
            mean = reduce_stacked(firsts, self.codec)[0]
            weights = [self.x_sync[name] for name in self._low()]
            self._refresh(dict(zip(self._low(), _cut(mean, weights), strict=True)))
        for worker, given in zip(self.workers, gradients, strict=True):
            for name, weight in worker.x.items():
                if name in self.low_rank:
                    for W, G, state in zip(
                        _matrices(weight), _matrices(given[name]), worker.moments[name], strict=True
                    ):
                        W -= lr * (self._direction(G, state) + self.config.weight_decay * W)
                else:
                    direction = self._adam(given[name], worker.moments[name][0])
                    weight -= lr * (direction + self.config.weight_decay * weight)
        if self.flight is not None and self.t == self.flight.step + self.sync.delay:
            self._arrive()
        self._depart()
        if self.sync.delay == 0:
            self._arrive()

    def flush(self) -> None:
        """Exchange what the current round has so far; refreshes nothing."""
        if self.flight is not None:
            self._arrive()
        self.flight = self._contribution(weights=True, u=False, v=False)
        self._arrive(partial=True)

    # A worker's step

    def _adam(self, G: Tensor, state: Moments) -> Tensor:
        b1, b2 = self.config.beta1, self.config.beta2
        state.u = b1 * state.u + (1 - b1) * G
        state.v = b2 * state.v + (1 - b2) * G * G
        uh, vh = state.u / (1 - b1**self.t), state.v / (1 - b2**self.t)
        return uh / (vh.sqrt() + self.config.eps)

    def _direction(self, G: Tensor, state: Moments) -> Tensor:
        config, method = self.config, self.method
        b1, b2, eps = config.beta1, config.beta2, config.eps
        assert state.Q is not None and state.E is not None
        A = G + state.E if method.error_feedback else G
        lost = torch.zeros_like(G)
        if method.projection == "local":
            lost = self._follow(A, state)
        Q = state.Q
        g = Q.T @ A
        if method.error_feedback:
            state.E = A - Q @ g + lost
        state.u = b1 * state.u + (1 - b1) * g
        state.v = b2 * state.v + (1 - b2) * g * g
        uh, vh = state.u / (1 - b1**self.t), state.v / (1 - b2**self.t)
        den = vh.sqrt() + eps
        w = method.omega
        if method.qhm == "none":
            return Q @ (uh / den)
        if method.qhm == "low_rank":
            return Q @ (((1 - w) * g + w * uh) / den)
        S = {
            "column": vh.mean(dim=0, keepdim=True).sqrt(),
            "scalar": vh.mean().sqrt(),
            "energy": (vh.sum(dim=0, keepdim=True) / len(Q)).sqrt(),
            "lift": ((Q * Q) @ vh).sqrt(),
        }[method.scaling]
        return (1 - w) * G / (method.mu * (S + eps)) + w * (Q @ (uh / den))

    def _follow(self, A: Tensor, state: Moments) -> Tensor:
        """LDAdam's power step; returns what error feedback takes of the momentum."""
        b1, b2 = self.config.beta1, self.config.beta2
        old, u = state.Q, state.u
        assert old is not None
        if self.t == 1:
            state.Q = _leading(A, old.shape[1])
            return torch.zeros_like(A)
        b = RHO * (old @ u) / (1 - b1 ** (self.t - 1)) + (1 - RHO) * A
        state.Q = torch.linalg.qr(b @ b.T @ old).Q
        _turn(state, old, 1 - b1 ** (self.t - 1), 1 - b2 ** (self.t - 1))
        return b1 / (1 - b1) * (old @ u - state.Q @ state.u)

    # Rounds

    def _depart(self) -> None:
        sync = self.sync
        due = [
            every and self.t % every == 0 for every in (sync.momentum_every, sync.variance_every)
        ]
        if self.t % sync.every == 0 or any(due):
            self.flight = self._contribution(self.t % sync.every == 0, bool(due[0]), bool(due[1]))

    def _contribution(self, weights: bool, u: bool, v: bool) -> Flight:
        flight = Flight(self.t, None, [], None, None)
        if weights:
            flight.weights = [{n: x.clone() for n, x in w.x.items()} for w in self.workers]
            for worker in self.workers:
                delta = _join(x - self.x_sync[name] for name, x in worker.x.items())
                flight.deltas.append(delta if worker.residual is None else delta + worker.residual)
        if u:
            flight.u = [[state.u.clone() for state in self._shared(w)] for w in self.workers]
        if v:
            flight.v = [[state.v.clone() for state in self._shared(w)] for w in self.workers]
        return flight

    def _arrive(self, partial: bool = False) -> None:
        flight, self.flight = self.flight, None
        if flight is None:
            return
        lag = self.t - flight.step
        if flight.u is not None:
            means = [_average(each) for each in zip(*flight.u, strict=True)]
            for worker, own in zip(self.workers, flight.u, strict=True):
                for state, mine, mean in zip(self._shared(worker), own, means, strict=True):
                    state.u = state.u + self.config.beta1**lag * (mean - mine) if lag else mean
        if flight.v is not None:
            means = [_average(each) for each in zip(*flight.v, strict=True)]
            for worker, own in zip(self.workers, flight.v, strict=True):
                for state, mine, mean in zip(self._shared(worker), own, means, strict=True):
                    state.v = state.v + self.config.beta2**lag * (mean - mine) if lag else mean
        if flight.weights is not None:
            self._arrive_weights(flight, partial)

    def _arrive_weights(self, flight: Flight, partial: bool) -> None:
        sync = self.sync
        like = list(self.x_sync.values())
        flat, sents = reduce_stacked(flight.deltas, self.codec, self.owners)
        mean = dict(zip(self.x_sync, _cut(flat, like), strict=True))
        for name, D in mean.items():
            if sync.outer == "average":
                self.x_sync[name] = self.x_sync[name] + D
            else:
                self.outer[name] = sync.outer_momentum * self.outer[name] + D
                step = D + sync.outer_momentum * self.outer[name]
                self.x_sync[name] = self.x_sync[name] + sync.outer_lr * step
        assert flight.weights is not None
        for worker, taken, delta, sent in zip(
            self.workers, flight.weights, flight.deltas, sents, strict=True
        ):
            dropped = dict(zip(self.x_sync, _cut(delta - sent, like), strict=True))
            for name in worker.x:
                since = worker.x[name] - taken[name]
                worker.x[name] = self.x_sync[name] + since
                if sync.residual == "weights":
                    worker.x[name] = worker.x[name] + dropped[name]
            if sync.residual == "buffer":
                worker.residual = delta - sent
        if not partial and self.method.projection in ("global", "random"):
            self._refresh({name: mean[name] for name in self._low()})

    def _refresh(self, directions: Mapping[str, Tensor]) -> None:
        method, self.overlaps = self.method, []
        c1, c2 = 1 - self.config.beta1**self.t, 1 - self.config.beta2**self.t
        for name, direction in directions.items():
            drawn = self._drawn(name, direction, self.t - self.sync.delay)
            for index, D in enumerate(_matrices(direction)):
                states = [worker.moments[name][index] for worker in self.workers]
                old = states[0].Q
                assert old is not None
                r = old.shape[1]
                if method.projection == "random":
                    Q = drawn[index]
                elif not D.isfinite().all() or D.abs().max() == 0:
                    Q = old
                elif method.compute == "svd":
                    Q = _leading(D, r)
                elif method.compute == "power":
                    Q = _signed(torch.linalg.qr(D @ D.T @ old).Q)
                else:
                    Q = _frequencies(D, r)
                overlap = ((Q.T @ old) ** 2).sum().item() / r
                self.overlaps.append(overlap)
                if overlap <= 1 - 1e-6:
                    for state in states:
                        state.Q = Q
                        _turn(state, old, c1, c2)

    def _shared(self, worker: Worker) -> list[Moments]:
        """The moments that are averaged: not those in a worker's own bases."""
        local = self.method.projection == "local"
        return [
            state
            for name in worker.x
            if not (local and name in self.low_rank)
            for state in worker.moments[name]
        ]

    def _low(self) -> list[str]:
        return [name for name in self.x_sync if name in self.low_rank]


def _turn(state: Moments, old: Tensor, c1: float, c2: float) -> None:
    """LDAdam's rotation of u and v from `old` to the state's Q."""
    assert state.Q is not None
    R = state.Q.T @ old
    uh, vh = state.u / c1, state.v / c2
    state.v = c2 * ((R * R) @ (vh - uh * uh) + (R @ uh) ** 2).abs()
    state.u = R @ state.u


def _leading(D: Tensor, r: int) -> Tensor:
    return _signed(torch.linalg.svd(D, full_matrices=False).U[:, :r])


def _frequencies(D: Tensor, r: int) -> Tensor:
    m = len(D)
    columns = []
    for k in range(m):
        scale = math.sqrt((1 if k == 0 else 2) / m)
        column = [scale * math.cos(math.pi * k * (i + 0.5) / m) for i in range(m)]
        columns.append(torch.tensor(column, dtype=D.dtype))
    strongest = sorted(range(m), key=lambda k: -float((columns[k] @ D).square().sum()))[:r]
    return _signed(torch.stack([columns[k] for k in sorted(strongest)], dim=1))


def _signed(Q: Tensor) -> Tensor:
    """Columns with their largest entry positive."""
    return torch.stack([c if c[c.abs().argmax()] > 0 else -c for c in Q.unbind(1)], dim=1)


def _average(held: Sequence[Tensor]) -> Tensor:
    return reduce_stacked([each.flatten() for each in held], None)[0].view(held[0].shape)


def _matrices(weight: Tensor) -> list[Tensor]:
    """Views `[m, n]`, m <= n, of the matrices of `[..., rows, cols]`."""
    each = weight.reshape(-1, *weight.shape[-2:]).unbind()
    return [matrix.T if matrix.shape[0] > matrix.shape[1] else matrix for matrix in each]


def _join(tensors: object) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])  # type: ignore[attr-defined]


def _cut(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = torch.split(flat, [tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]
