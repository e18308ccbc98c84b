"""Small inputs for tests: a folder of token shards, configs of models that train in a second."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from algorithms.common.config import (
    ModelConfig,
    OptimizerConfig,
    SharedTrainingConfig,
    TrainingConfig,
)
from algorithms.lordo.config import ArmConfig, LowRankConfig, SyncConfig

VOCAB = 97

MODEL = ModelConfig(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=64,
)

OPTIMIZER = OptimizerConfig(lr=1e-2)

DDP = ArmConfig(optimizer=OPTIMIZER)


UNTIED = replace(MODEL, num_hidden_layers=4, tie_word_embeddings=False)
"""What a pipeline can cut."""

RUN = {
    "steps": 10,
    "sequence_length": 16,
    "global_batch": 8,
    "warmup_steps": 2,
    "log_every": 1,
    "eval_every": 4,
    "eval_sequences": 5,
    "checkpoint_every": 3,
}
"""Ten steps, of which each is logged, every fourth evaluated, every third written."""


def training(**changes) -> TrainingConfig:
    """`RUN` by ranks that each have the whole model."""
    return TrainingConfig(**({"ranks": 1} | RUN | changes))


def shared_training(**changes) -> SharedTrainingConfig:
    """`RUN` through a pipeline."""
    return SharedTrainingConfig(**(RUN | changes))


def write_tokens(folder: Path, train: int = 4000, val: int = 600) -> Path:
    """Token shards with structure to learn: each token is the last one plus 0, 1 or 2."""
    generator = np.random.default_rng(0)
    splits = {}
    for split, count in (("train", train), ("val", val)):
        tokens = (np.cumsum(generator.integers(0, 3, count)) % VOCAB).astype("<u2")
        file = folder / split / "00000.bin"
        file.parent.mkdir(parents=True)
        tokens.tofile(file)
        digest = hashlib.sha256(tokens.tobytes()).hexdigest()
        shard = {"file": f"{split}/00000.bin", "tokens": count, "sha256": digest}
        splits[split] = {"tokens": count, "bytes": 3 * count, "documents": 1, "shards": [shard]}
    np.save(folder / "token_bytes.npy", np.full(VOCAB, 3, dtype=np.int32))
    manifest = {
        "vocab_size": VOCAB,
        "dtype": "uint16",
        "end_of_text_id": 0,
        "bytes_per_token_bytes": 1.0,
        "splits": splits,
    }
    (folder / "MANIFEST.json").write_text(json.dumps(manifest))
    return folder


def local(inner: str = "adamw", low_rank: dict | None = None, momentum="fp32", **sync) -> ArmConfig:
    """An arm of method `local` that meets every fourth step."""
    return ArmConfig(
        method="local",
        inner=inner,
        optimizer=OPTIMIZER,
        momentum=momentum,
        low_rank=None if low_rank is None else LowRankConfig(**({"rank": 4} | low_rank)),
        sync=SyncConfig(**({"every": 4} | sync)),
    )


THIN = {
    "outer": "nesterov",
    "outer_momentum": 0.7,
    "outer_state": "int8",
    "wire": "int4",
    "residual": "weights",
}

RANKS_DIFFER = {
    "lowrank_ddp": ArmConfig(
        method="lowrank_ddp",
        optimizer=OPTIMIZER,
        low_rank=LowRankConfig(rank=4, error_feedback=True),
    ),
    "local_adam": local(momentum_every=4, variance_every=4),
    "des_loc": local(every=2, momentum_every=4, variance_every=6),
    "diloco": local(outer="nesterov", outer_lr=0.7, outer_momentum=0.9),
    "buffered": local(wire="int4", residual="buffer"),
    "delayed": local(delay=2, momentum_every=4, **THIN),
    "lordo_global": local("lordo", {}, momentum_every=4, variance_every=8),
    "lordo_local": local("lordo", {"projection": "local", "qhm": "none"}),
    "lordo_ns": local("lordo_ns", {"projection": "frozen"}, "bf16", **THIN),
    "lordo_ns_carry": local("lordo_ns", {"projection": "frozen", "carry": 0.6}, "bf16", **THIN),
    "muloco": local("muon", None, "int8", **THIN),
    "muloco_in_grad": local("muon", None, "grad", **THIN),
}
"""One small arm of each kind whose ranks differ."""
