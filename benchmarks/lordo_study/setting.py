"""What all arms share, and what one run is: a GPT-2 of width 64 on M = 4 workers."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from algorithms.common.config import Config, ModelConfig, TrainingConfig
from algorithms.lordo.config import ArmConfig
from benchmarks.study.streams import Dealing

GPT2 = ModelConfig(
    family="gpt2",
    hidden_size=64,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=64,
    tie_word_embeddings=True,
    extra={
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "activation_function": "gelu_pytorch_tanh",  # GPT-2's own, in one kernel
    },
)


@dataclass(frozen=True, kw_only=True)
class Setting(Config):
    """What all arms share."""

    model: ModelConfig = GPT2
    workers: int = 4
    sequences: int = 8
    """Per worker and step."""
    length: int = 64
    """Tokens of a sequence."""
    steps: int = 1280
    dealing: Dealing = "in_turn"
    """How workers share the corpus."""
    held_out: int = 1024
    """Sequences of each of the two held-out sets."""

    def training(self, seed: int) -> TrainingConfig:
        """As the training loop of the ranks has it: 10 % warm-up, cosine to 5 % of the peak."""
        return TrainingConfig(
            ranks=self.workers,
            seed=seed,
            steps=self.steps,
            sequence_length=self.length,
            global_batch=self.workers * self.sequences,
            warmup_steps=self.steps // 10,
            final_lr_fraction=0.05,
            log_every=self.steps,
            eval_every=self.steps,
            eval_sequences=self.held_out,
            checkpoint_every=self.steps,
        )


@dataclass(frozen=True, kw_only=True)
class Job(Config):
    """One run: it and the code decide the result."""

    name: str
    """Of the arm, for people; no part of the key."""
    arm: ArmConfig
    seed: int
    setting: Setting

    def key(self, code: str) -> str:
        """Names the file of the result; `code` is a hash of what computes it."""
        told = {k: v for k, v in self.to_dict().items() if k != "name"}
        text = json.dumps([told, code], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:20]

    def line(self, result: dict[str, Any]) -> str:
        """Itself and its perplexities."""
        shown = [result[f"{split}_perplexity"] for split in ("validation", "test")]
        validation, test = ("diverged" if x is None else f"{x:.3f}" for x in shown)
        return (
            f"{self.name}  lr {self.arm.optimizer.lr:g}  seed {self.seed}"
            f"  validation {validation}  test {test}  {result['seconds']:.0f} s"
        )
