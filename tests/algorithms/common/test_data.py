"""Windows, batches as a pure function, the held-out set, and every way a folder can be wrong."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from algorithms.common.data import (
    TokenShards,
    batch,
    epoch_order,
    evaluation_batches,
    token_bytes,
)
from algorithms.common.errors import InputError

SIZES = [41, 1, 0, 23, 8]
"""Tokens per shard. In windows of 4 inputs: 10, 0, 0, 5, 1."""
LENGTH = 4
WINDOWS = 16


@pytest.fixture(params=["uint16", "uint32"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Shards whose tokens count up through the split, so a token tells its place."""
    return write(tmp_path / "tokens", SIZES, request.param)


def write(folder: Path, sizes: list[int], dtype: str) -> Path:
    splits = {}
    for split in ("train", "val"):
        (folder / split).mkdir(parents=True)
        shards, start = [], 0
        for index, size in enumerate(sizes):
            content = np.arange(start, start + size, dtype=dtype).tobytes()
            file = f"{split}/{index:05d}.bin"
            (folder / file).write_bytes(content)
            digest = hashlib.sha256(content).hexdigest()
            shards.append({"file": file, "tokens": size, "sha256": digest})
            start += size
        splits[split] = {"tokens": start, "bytes": 3 * start, "documents": 2, "shards": shards}
    manifest = {
        "vocab_size": 300,
        "dtype": dtype,
        "end_of_text_id": 7,
        "bytes_per_token_bytes": 1.5,
        "splits": splits,
    }
    (folder / "MANIFEST.json").write_text(json.dumps(manifest))
    np.save(folder / "token_bytes.npy", np.arange(300, dtype=np.uint16))
    return folder


def train_batch(shards: TokenShards, **changed: int) -> Tensor:
    arguments = {"seed": 1, "step": 0, "rank": 0, "world_size": 1, "global_batch": 6}
    return batch(shards, **(arguments | {"length": LENGTH} | changed))


# Windows


def test_windows_do_not_overlap_and_never_cross_a_shard(folder: Path) -> None:
    shards = TokenShards(folder, "train")
    assert (shards.tokens, shards.vocab_size, shards.windows(LENGTH)) == (73, 300, WINDOWS)
    assert (shards.end_of_text, shards.bytes_factor) == (7, 1.5)
    rows = shards.read(np.arange(WINDOWS), LENGTH)
    assert rows.dtype == torch.int64 and rows.shape == (WINDOWS, LENGTH + 1)
    assert (rows.diff(dim=1) == 1).all()  # consecutive tokens
    first = [*range(0, 40, 4), *range(42, 62, 4), 65]
    assert rows[:, 0].tolist() == first
    assert rows[:, -1].tolist() == [start + LENGTH for start in first]


def test_a_window_needs_one_token_more_than_its_length(tmp_path: Path) -> None:
    shards = TokenShards(write(tmp_path / "tokens", [8, 9], "uint16"), "val")
    assert [shards.windows(length) for length in (1, 7, 8, 9)] == [15, 2, 1, 0]


# Batches


@pytest.mark.parametrize("step", [0, 1, 2, 3, 7, 1000])
def test_ranks_together_give_the_same_global_batch(folder: Path, step: int) -> None:
    """Steps 2, 7, ... wrap: one batch ends an epoch of 16 windows and begins the next."""
    whole = train_batch(TokenShards(folder, "train"), step=step)
    assert whole.shape == (6, LENGTH + 1)
    for world_size in (2, 3, 6):
        parts = [
            train_batch(TokenShards(folder, "train"), step=step, rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]
        assert torch.equal(torch.cat(parts), whole)


def test_each_epoch_visits_every_window_once_in_a_new_order(folder: Path) -> None:
    shards = TokenShards(folder, "train")
    visited = torch.cat([train_batch(shards, step=step)[:, 0] for step in range(8)])  # 3 epochs
    epochs = visited.view(3, WINDOWS).tolist()
    every = shards.read(np.arange(WINDOWS), LENGTH)[:, 0].tolist()
    assert [sorted(epoch) for epoch in epochs] == [every] * 3
    assert len({tuple(epoch) for epoch in [every, *epochs]}) == 4


def test_a_batch_does_not_depend_on_what_was_read_before(folder: Path) -> None:
    shards = TokenShards(folder, "train")
    forward = [train_batch(shards, step=step) for step in range(12)]
    backward = [train_batch(shards, step=step) for step in reversed(range(12))]
    fresh = [train_batch(TokenShards(folder, "train"), step=step) for step in range(12)]
    for one, two, three in zip(forward, reversed(backward), fresh, strict=True):
        assert torch.equal(one, two) and torch.equal(one, three)
    assert not torch.equal(train_batch(shards, seed=2), forward[0])
    assert torch.equal(train_batch(shards, seed=-3), train_batch(shards, seed=-3))


def test_epoch_order_is_a_fixed_uniform_permutation() -> None:
    assert epoch_order(0, 0, 8).tolist() == [0, 3, 7, 5, 1, 2, 6, 4]  # the same for ever
    counts = Counter(tuple(epoch_order(5, epoch, 3).tolist()) for epoch in range(6000))
    assert len(counts) == 6 and all(850 < count < 1150 for count in counts.values())
    assert sorted(epoch_order(3, 1, 100_000)) == list(range(100_000))


def test_less_data_than_one_batch(folder: Path) -> None:
    shards = TokenShards(folder, "train")
    message = f"{folder}: split 'train' has 16 sequences of 4 tokens, 17 are needed"
    with pytest.raises(InputError) as caught:
        train_batch(shards, global_batch=17)
    assert str(caught.value) == message
    assert train_batch(shards, global_batch=16).shape == (16, 5)
    with pytest.raises(InputError, match="^global_batch: 6 is not a multiple of 4 ranks"):
        train_batch(shards, world_size=4)


# Evaluation


def held_out(folder: Path, **changed: int) -> list[Tensor]:
    arguments = {"sequences": 7, "length": LENGTH, "batch_size": 2, "rank": 0, "world_size": 1}
    return list(evaluation_batches(TokenShards(folder, "val"), **(arguments | changed)))


def test_held_out_set_is_spread_evenly_and_fixed(folder: Path) -> None:
    batches = held_out(folder)
    assert [len(b) for b in batches] == [2, 2, 2, 1]
    every = TokenShards(folder, "val").read(np.arange(WINDOWS), LENGTH)
    assert torch.equal(torch.cat(batches), every[[0, 2, 4, 6, 9, 11, 13]])
    assert torch.equal(torch.cat(held_out(folder, sequences=WINDOWS)), every)


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_held_out_set_is_split_over_ranks(folder: Path, world_size: int) -> None:
    parts = [held_out(folder, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert torch.equal(torch.cat(sum(parts, [])), torch.cat(held_out(folder)))
    sizes = [sum(map(len, part)) for part in parts]
    assert max(sizes) - min(sizes) <= 1


def test_too_small_a_held_out_set_fails_before_the_first_batch(folder: Path) -> None:
    with pytest.raises(InputError, match="split 'val' has 16 sequences of 4 tokens, 99 are needed"):
        evaluation_batches(
            TokenShards(folder, "val"),
            sequences=99,
            length=LENGTH,
            batch_size=2,
            rank=0,
            world_size=1,
        )


def test_token_bytes(folder: Path) -> None:
    found = token_bytes(folder)
    assert found.dtype == torch.int32 and torch.equal(found, torch.arange(300, dtype=torch.int32))


# What can be wrong with a folder


def test_wrong_folders_are_named(folder: Path) -> None:
    shard, manifest = folder / "train" / "00003.bin", folder / "MANIFEST.json"
    content, text = shard.read_bytes(), manifest.read_text()

    def refused() -> str:
        with pytest.raises(InputError) as caught:
            TokenShards(folder, "train")
        assert "\n" not in str(caught.value)
        return str(caught.value)

    shard.write_bytes(content[:-3])
    expected = f"{shard}: has {len(content) - 3} bytes, the manifest says {len(content)}"
    assert refused() == expected
    shard.unlink()
    assert refused() == f"{shard}: no such file"
    shard.write_bytes(content)
    TokenShards(folder, "train")
    manifest.write_text(text.replace('"train": {', '"test": {'))
    assert refused() == f"{manifest}: has no key 'train'"
    for outside in ("../train/00000.bin", str(folder / "train" / "00000.bin")):
        manifest.write_text(text.replace("train/00000.bin", outside))
        assert refused() == f"{manifest}: {outside!r} does not lie in its folder"
    manifest.write_text(text[:50])
    assert refused().startswith(f"{manifest}: not JSON: ")
    manifest.write_text("[]")
    assert refused() == f"{manifest}: must hold an object, not list"
    manifest.unlink()
    assert refused() == f"{manifest}: no such file"


def test_wrong_token_bytes_are_named(folder: Path) -> None:
    path = folder / "token_bytes.npy"
    path.write_bytes(b"nonsense")
    with pytest.raises(InputError, match="token_bytes.npy: not a numpy array"):
        token_bytes(folder)
    path.unlink()
    with pytest.raises(InputError, match="token_bytes.npy: no such file"):
        token_bytes(folder)
