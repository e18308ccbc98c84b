"""Small inputs for tests: a folder of token shards, configs of models that train in a second."""

import hashlib
import json
from pathlib import Path

import numpy as np

from algorithms.common.config import ModelConfig, OptimizerConfig, TrainingConfig

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


def training(**changes) -> TrainingConfig:
    """A run of ten steps that logs each, evaluates every four, writes a checkpoint every three."""
    settings = {
        "ranks": 1,
        "steps": 10,
        "sequence_length": 16,
        "global_batch": 8,
        "warmup_steps": 2,
        "log_every": 1,
        "eval_every": 4,
        "eval_sequences": 5,
        "checkpoint_every": 3,
    }
    return TrainingConfig(**(settings | changes))


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
