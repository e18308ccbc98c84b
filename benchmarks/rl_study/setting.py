"""What arms share, and what one run is: a llama of width 64 with 2 layers that reads records."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, Literal

from algorithms.branch_replay.config import ObjectiveConfig
from algorithms.branch_replay.lookup import LookupConfig
from algorithms.common.config import Config, ModelConfig

READER = ModelConfig(
    family="llama",
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=512,
    tie_word_embeddings=False,
    extra={"initializer_range": 0.1},
)


@dataclass(frozen=True, kw_only=True)
class Start(Config):
    """The supervised warm start that all arms of a setting begin from."""

    model: ModelConfig = READER
    stages: tuple[tuple[int, int], ...] = ((3, 0), (4, 0))
    """(records, filler) of the prompts that are learned in turn,"""
    accuracy: float = 0.85
    """until this share of answers is right."""
    further: tuple[int, int] = (6, 4)
    """And then these,"""
    steps: int = 10
    """for so many steps."""


@dataclass(frozen=True, kw_only=True)
class Setting(Config):
    """What all arms share."""

    start: Start = field(default_factory=Start)
    task: LookupConfig = field(default_factory=LookupConfig)
    """6 records in 64 tokens."""
    mixed: tuple[LookupConfig, ...] = ()
    """Tasks that share the prompts of an update equally; none: `task` alone."""
    prompts: int = 32
    """Of an update, never seen before."""
    group: int = 8
    updates: int = 300
    """Of the learning rate's schedule."""
    until: int | None = None
    """Updates made of those, if not all."""
    evaluate_every: int = 20
    held_out: int = 512
    """Prompts of each of the two held-out sets,"""
    samples: int = 4
    """and responses to each."""
    gradients: int = 64
    """Prompts whose gradients are compared, three times."""


@dataclass(frozen=True, kw_only=True)
class Arm(Config):
    """How an update is made."""

    lr: float
    """Peak: 10 updates of warm-up, linear to a tenth."""
    mode: Literal["exact", "response_only", "truncated", "naive"] = "exact"
    """naive: rollouts as the others', gradients by plain full sequences."""
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    inner_epochs: int = 1
    reward: float | None = None
    """Mean reward that the temperature of training rollouts holds on to: it rises, from 1, while
    answers are right more often, so that some are still wrong. None: it stays at 1."""
    reuse: int = 1
    """Updates on the same prompts,"""
    recapture: bool = True
    """whose state is made anew for each update, or only for the first."""
    shuffled: bool = False
    """Rewards are dealt anew over all responses of an update."""
    compared: bool = False
    """Gradients of both modes are compared at start, middle and end."""


@dataclass(frozen=True, kw_only=True)
class Job(Config):
    """One run: it and the code decide the result."""

    name: str
    """Of the row, for people; no part of the key."""
    arm: Arm
    setting: Setting
    seed: int

    def key(self, code: str) -> str:
        """Names the file of the result; `code` is a hash of what computes it."""
        told = {k: v for k, v in self.to_dict().items() if k != "name"}
        text = json.dumps([told, code], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:20]

    def line(self, result: dict[str, Any]) -> str:
        """Itself and where it ended."""
        first, last = result["curve"][0][2], result["curve"][-1][2]
        return (
            f"{self.name}  lr {self.arm.lr:g}  seed {self.seed}  sampled {first:.3f} -> {last:.3f}"
            f"  {1000 * result['update_s']:.0f} ms an update, {result['seconds']:.0f} s"
        )
