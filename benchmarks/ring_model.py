"""How long the exchanges of an arm take on a network, by formula.

In an all-reduce of `size` bytes over M ranks in a ring each rank sends 2 (M - 1) / M `size` bytes
in 2 (M - 1) messages, one after the other. A reduce-scatter and an all-gather of its parts are one
all-reduce.

Symbols of LoRDO (arXiv 2602.04396): matrices m x n with m <= n, and N parameters, D of them outside
the low-rank set; for rank r the moments have W = sum r n values and the projections P = sum r m.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from algorithms.common.codec import CODECS
from algorithms.common.meter import all_reduce_wire_bytes
from algorithms.lordo.config import ArmConfig

MESSAGE_BYTES = 385
"""What a message of gloo sends beside its data, both directions together: three headers of 48 bytes
in frames of 66, and two acknowledgements of 66 for every three messages."""


@dataclass(frozen=True)
class Shape:
    """A decoder with tied embeddings, fused QKV and a plain MLP four times its width; norms and
    biases are left out, positions are rotary."""

    vocabulary: int
    width: int
    layers: int

    @property
    def dense(self) -> int:
        """D."""
        return self.vocabulary * self.width

    @property
    def parameters(self) -> int:
        """N; a layer has matrices of 3, 1, 4 and 4 squares of the width."""
        return self.dense + self.layers * 12 * self.width**2

    def moments(self, rank: int) -> int:
        """W."""
        return self.layers * 12 * rank * self.width

    def projections(self, rank: int) -> int:
        """P."""
        return self.layers * 4 * rank * self.width


SHAPES = {"125M": Shape(50_368, 768, 12), "720M": Shape(50_368, 2048, 12)}


def exchange_seconds(
    wire_bytes: float, ranks: int, bits_per_second: float, *, calls: float = 0, latency_s: float = 0
) -> float:
    """Time of `calls` ring all-reduces in which each rank sends `wire_bytes` in all; `latency_s` is
    that of one message."""
    return 8 * wire_bytes / bits_per_second + calls * 2 * (ranks - 1) * latency_s


def payload_bytes_per_step(arm: ArmConfig, shape: Shape, rank: int) -> float:
    """What `arm` exchanges in a step on average, with low-rank moments of `rank`."""
    if arm.method == "ddp":
        return 4 * shape.parameters
    if arm.method == "lowrank_ddp":
        return 4 * (shape.dense + shape.moments(rank) + shape.projections(rank))
    sync = arm.sync
    assert sync is not None  # ArmConfig has checked
    moments = shape.parameters
    if arm.inner == "lordo":
        moments = shape.dense + shape.moments(rank)
    share = sum(1 / every for every in (sync.momentum_every, sync.variance_every) if every)
    return bytes_per_value(arm) * shape.parameters / sync.every + 4 * moments * share


def bytes_per_value(arm: ArmConfig) -> float:
    """Of a weight, pseudo-gradient or gradient on the wire."""
    codec = CODECS.get(arm.sync.wire) if arm.sync else None
    values = 1 << 16
    return codec.encode(torch.zeros(values)).numel() / values if codec else 4.0


def seconds_per_step(arm: ArmConfig, shape: Shape, ranks: int, bits_per_second: float) -> float:
    """Exchange time of a step on average, at rank m / 8; latency is left out."""
    payload = payload_bytes_per_step(arm, shape, shape.width // 8)
    return exchange_seconds(all_reduce_wire_bytes(round(payload), ranks), ranks, bits_per_second)
