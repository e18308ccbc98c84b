"""Token shards and the batches that are drawn from them. Nothing here has a state to save.

Source: the folder that `tasks/tokens.py` writes, MANIFEST.json and flat files of uint16 or uint32.
A sequence is a window of `length` inputs with the targets shifted by one, so it spans `length + 1`
tokens; windows do not overlap in their inputs and never cross a shard. Each epoch visits every
window once, in an order that depends on (seed, epoch) only.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from algorithms.common.errors import InputError
from algorithms.common.files import read_json, require_inside

Indices = npt.NDArray[np.int64]
Shard = npt.NDArray[np.unsignedinteger[Any]]


class TokenShards:
    """The memory-mapped shards of one split (`train` or `val`) of a token folder.

    Raises `InputError` naming the file when the manifest or a shard is missing, unreadable or of
    another size than the manifest says.
    """

    def __init__(self, folder: Path, split: str) -> None:
        self.folder = folder
        self.split = split
        manifest = _read_manifest(folder)
        try:
            self.vocab_size: int = manifest["vocab_size"]
            self.end_of_text: int = manifest["end_of_text_id"]
            # Bytes of held-out text over the sum of its tokens' bytes; 1.0 for byte-level BPE.
            self.bytes_factor: float = manifest["bytes_per_token_bytes"]
            dtype = np.dtype(manifest["dtype"]).newbyteorder("<")
            self._listed: list[dict[str, Any]] = manifest["splits"][split]["shards"]
            require_inside(folder / "MANIFEST.json", [shard["file"] for shard in self._listed])
            self._shards = [
                _map_shard(folder / s["file"], s["tokens"], dtype) for s in self._listed
            ]
        except KeyError as error:
            raise InputError(f"{folder / 'MANIFEST.json'}: has no key {error}") from None
        # One object holds the orders of two epochs at most: a batch may end one and begin the next.
        self._order = functools.lru_cache(maxsize=2)(epoch_order)

    def verify(self) -> None:
        """Raise `InputError` naming the shard whose bytes are not those that were written."""
        for shard in self._listed:
            path = self.folder / shard["file"]
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != shard["sha256"]:
                raise InputError(f"{path}: is corrupted: its sha256 is {found}; make it again")

    @property
    def tokens(self) -> int:
        """Tokens of the split."""
        return sum(len(shard) for shard in self._shards)

    def windows(self, length: int) -> int:
        """How many sequences of `length` the split holds."""
        return sum(_windows_in(shard, length) for shard in self._shards)

    def require(self, sequences: int, length: int) -> None:
        """Raise `InputError` unless the split holds `sequences` windows of `length`."""
        found = self.windows(length)
        if found < sequences:
            raise InputError(
                f"{self.folder}: split {self.split!r} has {found} sequences of {length} tokens,"
                f" {sequences} are needed"
            )

    def read(self, windows: Indices, length: int) -> Tensor:
        """The windows of these numbers: int64 [len(windows), length + 1]."""
        ends = np.cumsum([_windows_in(shard, length) for shard in self._shards])
        rows = np.empty((len(windows), length + 1), dtype=np.int64)
        for row, window in zip(rows, windows, strict=True):
            shard = int(np.searchsorted(ends, window, side="right"))
            before = int(ends[shard - 1]) if shard else 0
            start = (int(window) - before) * length
            row[:] = self._shards[shard][start : start + length + 1]
        return torch.from_numpy(rows)

    def order(self, seed: int, epoch: int, length: int) -> Indices:
        """The window numbers in the order in which `epoch` visits them."""
        return self._order(seed, epoch, self.windows(length))


def epoch_order(seed: int, epoch: int, windows: int) -> Indices:
    """A permutation of `range(windows)` drawn from (seed, epoch).

    Sorts raw draws of Philox: numpy keeps those for ever, its `permutation` only per version.
    """
    bits = np.random.Philox(np.random.SeedSequence([seed % 2**64, epoch]))
    return np.argsort(bits.random_raw(windows), kind="stable")


def batch(
    shards: TokenShards,
    *,
    seed: int,
    step: int,
    rank: int,
    world_size: int,
    global_batch: int,
    length: int,
) -> Tensor:
    """This rank's part of the batch of `step`: int64 [global_batch / world_size, length + 1].

    A pure function of its arguments. Step s takes the global batch from position s * global_batch
    of the endless sequence of epochs, and the ranks' parts in rank order are that batch on any
    number of ranks. Raises `InputError` if the split holds less than one global batch.
    """
    if global_batch % world_size:
        raise InputError(f"global_batch: {global_batch} is not a multiple of {world_size} ranks")
    shards.require(global_batch, length)
    count = global_batch // world_size
    positions = step * global_batch + rank * count + np.arange(count)
    epochs, offsets = np.divmod(positions, shards.windows(length))
    windows = np.empty(count, dtype=np.int64)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        windows[here] = shards.order(seed, int(epoch), length)[offsets[here]]
    return shards.read(windows, length)


def evaluation_batches(
    shards: TokenShards,
    *,
    sequences: int,
    length: int,
    batch_size: int,
    rank: int,
    world_size: int,
) -> Iterator[Tensor]:
    """This rank's part of the fixed held-out set, as int64 [at most batch_size, length + 1].

    The set is `sequences` windows spread evenly over the split; ranks get consecutive parts whose
    sizes differ by one at most, so they may yield different numbers of batches: reduce after the
    loop, not in it. Raises `InputError` if the split holds fewer sequences.
    """
    shards.require(sequences, length)
    chosen = np.arange(sequences) * shards.windows(length) // sequences
    mine = np.array_split(chosen, world_size)[rank]
    starts = range(0, len(mine), batch_size)
    return (shards.read(mine[start : start + batch_size], length) for start in starts)


def token_bytes(folder: Path) -> Tensor:
    """Bytes of text that each token stands for, int32 [vocab]; turns loss into bits per byte."""
    path = folder / "token_bytes.npy"
    try:
        return torch.from_numpy(np.load(path).astype(np.int32))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except ValueError as error:
        raise InputError(f"{path}: not a numpy array: {error}") from None


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / "MANIFEST.json"
    manifest = read_json(path)
    if not isinstance(manifest, dict):
        raise InputError(f"{path}: must hold an object, not {type(manifest).__name__}")
    return manifest


def _map_shard(path: Path, tokens: int, dtype: np.dtype[Any]) -> Shard:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    expected = tokens * dtype.itemsize
    if size != expected:
        raise InputError(f"{path}: has {size} bytes, the manifest says {expected}")
    # An empty file cannot be mapped.
    return np.memmap(path, dtype=dtype, mode="r") if tokens else np.empty(0, dtype=dtype)


def _windows_in(shard: Shard, length: int) -> int:
    return max(0, len(shard) - 1) // length
