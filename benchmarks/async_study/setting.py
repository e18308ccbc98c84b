"""What all arms share, and what one run is: a llama of width 32 with 8 layers on P = 8 stages."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from typing import Any, Literal

from algorithms.async_pipeline.config import StageOptimizerConfig
from algorithms.common.config import Config, ModelConfig, TrainingConfig

LLAMA = ModelConfig(
    family="llama",
    hidden_size=32,
    intermediate_size=88,  # gated: as many weights as the usual two matrices of width 4 d
    num_hidden_layers=8,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=64,
    tie_word_embeddings=False,
)


@dataclass(frozen=True, kw_only=True)
class Setting(Config):
    """What all arms share."""

    model: ModelConfig = LLAMA
    sequences: int = 8
    """Of a microbatch, which is an update."""
    length: int = 64
    """Tokens of a sequence."""
    updates: int = 4000
    """Of the learning rate's schedule."""
    evaluate_every: int = 25
    """Updates between two points of the held-out curve."""
    held_out: int = 64
    """Sequences of each of the two held-out sets."""

    def training(self, seed: int) -> TrainingConfig:
        """As the training loop has it: 2 % warm-up, cosine to 10 % of the peak."""
        return TrainingConfig(
            ranks=1,
            seed=seed,
            steps=self.updates,
            sequence_length=self.length,
            global_batch=self.sequences,
            warmup_steps=self.updates // 50,
            final_lr_fraction=0.1,
            log_every=self.updates,
            eval_every=self.updates,
            eval_sequences=self.held_out,
            checkpoint_every=self.updates,
        )


@dataclass(frozen=True, kw_only=True)
class Arm(Config):
    """An optimizer and the pipeline whose delays it has to live with."""

    optimizer: StageOptimizerConfig
    stages: int = 8
    """P; 1 is synchronous training."""
    stretch: int = 1
    """The delay of stage k is so many times P-1-k updates."""
    stash: bool = True

    @property
    def delays(self) -> list[int]:
        """Of all stages, in updates."""
        return [self.stretch * k for k in range(self.stages - 1, -1, -1)]


@dataclass(frozen=True, kw_only=True)
class Job(Config):
    """One run: it and the code decide the result."""

    name: str
    """Of the arm, for people; no part of the key."""
    arm: Arm
    seed: int
    setting: Setting
    until: int
    """Updates made of those of the schedule."""
    split: Literal["validation", "test"] = "test"
    """What the held-out curve is of."""

    def key(self, code: str) -> str:
        """Names the file of the result; `code` is a hash of what computes it."""
        told = {k: v for k, v in self.to_dict().items() if k != "name"}
        text = json.dumps([told, code], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:20]

    def line(self, result: dict[str, Any]) -> str:
        """Itself and its last loss."""
        final = result["final"]
        shown = f"{final:.4f}" if math.isfinite(final or math.inf) else "diverged"
        return (
            f"{self.name}  lr {self.arm.optimizer.optimizer.lr:g}  seed {self.seed}"
            f"  {self.split} {shown} at {self.until}  {result['seconds']:.0f} s"
        )
