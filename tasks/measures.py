"""What the arms of a stage are judged by: held-out loss, or held-out reward."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One figure, by its names in files and on pages."""

    key: str
    """Of quality.json."""
    held_out: str
    """Column of curve.json."""
    train: str
    """The same of what was trained on."""
    word: str
    best: str
    """Which end of the scale is better."""
    axis: str
    """Name of the axis of held-out values and training values together."""
    unit: str = ""

    def rank(self, value: float) -> float:
        """Ascends from the best; what is no number is last."""
        if math.isnan(value):
            return math.inf
        return value if self.best == "lowest" else -value


LOSS = Measure(
    key="val_loss",
    held_out="val/loss",
    train="train/loss",
    word="loss",
    best="lowest",
    axis="cross-entropy loss",
    unit=" (nats per token)",
)
REWARD = Measure(
    key="reward_heldout",
    held_out="reward/heldout",
    train="reward/mean",
    word="reward",
    best="highest",
    axis="mean reward",
)


def of(quality: Mapping[str, Any]) -> Measure:
    """That of an arm with this quality.json."""
    return REWARD if REWARD.key in quality else LOSS
