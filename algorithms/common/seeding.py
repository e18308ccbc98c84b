"""Randomness as a pure function of (seed, step, rank), so that no checkpoint has to hold any.

Data order is drawn elsewhere, by `algorithms/common/data.py`, from (seed, epoch) alone.
"""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch


def mix(*parts: int | str) -> int:
    """A 64-bit hash of `parts`: neighbouring steps, ranks and seeds give unrelated values."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed all generators for one step of one rank; call it before the step draws anything."""
    _seed_all(mix("step", seed, step, rank))


def seed_model(seed: int) -> None:
    """Seed all generators alike on every rank, before weights are initialised."""
    _seed_all(mix("model", seed))


def _seed_all(value: int) -> None:
    torch.manual_seed(value)  # CPU and every CUDA device
    # Nothing of ours draws from these two, but code of a model may.
    random.seed(value)
    np.random.seed(value % 2**32)
