"""The default corpus as bytes: a stream of tokens for each worker, and two held-out streams.

A token is a byte of UTF-8, or the end of a document. The held-out documents are dealt in turn to
validation, by which rates are chosen, and to test, which is reported.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
import torch
from torch import Tensor

from algorithms.common.data import epoch_order
from tasks import corpus
from tasks.data_config import CorpusConfig

END = 256
"""Follows every document."""
VOCABULARY = 257

Stream = npt.NDArray[np.uint16]
Dealing = Literal["in_turn", "sorted"]
"""How workers share the training documents. in_turn: document i goes to worker i mod M. sorted:
contiguous parts of equal size in the order of paths, so that some workers read code, others prose.
"""

_order = lru_cache(maxsize=16)(epoch_order)


@dataclass(frozen=True)
class Streams:
    """Token ids, each `[tokens]`."""

    train: list[Stream]
    """One for each worker."""
    validation: Stream
    test: Stream


def prepare(config: CorpusConfig, folder: Path) -> Path:
    """The file of all tokens of a corpus in `folder`; made if it is not there.

    The archives come from the project's cache, or over the network once. Raises `InputError`.
    """
    named = json.dumps([config.to_dict(), corpus.VERSION], sort_keys=True)
    path = folder / f"bytes-{hashlib.sha256(named.encode()).hexdigest()[:12]}.npz"
    if not path.is_file():
        splits = corpus.build(config, folder / "corpus")["splits"]
        train, held_out = (
            np.concatenate(list(_documents(folder / "corpus", splits[name])))
            for name in ("train", "val")
        )
        write(path, train, held_out)
    return path


def write(path: Path, train: Stream, held_out: Stream) -> None:
    """Write both splits, whole documents with their ends, in one rename."""
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.npz")
    np.savez(temporary, train=train, held_out=held_out)
    temporary.replace(path)


def load(path: Path, workers: int, dealing: Dealing) -> Streams:
    """What `prepare` made, shared out."""
    with np.load(path) as file:
        train, held_out = file["train"], file["held_out"]
    parts = np.array_split(train, workers) if dealing == "sorted" else deal(train, workers)
    validation, test = deal(held_out, 2)
    return Streams(parts, validation, test)


def deal(stream: Stream, parts: int) -> list[Stream]:
    """Whole documents in turn: document i goes to part i mod `parts`."""
    ends = np.flatnonzero(stream == END) + 1
    documents = np.split(stream, ends[:-1])
    return [np.concatenate(documents[part::parts]) for part in range(parts)]


def batch(stream: Stream, *, seed: int, step: int, sequences: int, length: int) -> Tensor:
    """One worker's sequences of step 0, 1, ...: int64 `[sequences, length + 1]`.

    Windows as in `algorithms.common.data`: each once an epoch, in an order drawn from the seed.
    """
    windows = (len(stream) - 1) // length
    positions = range(step * sequences, (step + 1) * sequences)
    chosen = [_order(seed, p // windows, windows)[p % windows] for p in positions]
    return _read(stream, chosen, length)


def spread(stream: Stream, sequences: int, length: int) -> Tensor:
    """`sequences` windows spread evenly over the stream, all where it has fewer: int64
    `[sequences, length + 1]`."""
    windows = (len(stream) - 1) // length
    count = min(sequences, windows)
    return _read(stream, np.arange(count) * windows // count, length)


def _read(stream: Stream, windows: Any, length: int) -> Tensor:
    rows = [stream[int(w) * length : int(w) * length + length + 1] for w in windows]
    return torch.from_numpy(np.stack(rows).astype(np.int64))


def _documents(folder: Path, split: dict[str, Any]) -> Iterator[Stream]:
    for shard in split["shards"]:
        for group in pq.ParquetFile(folder / shard["file"]).iter_batches(columns=["text"]):
            for text in group.column(0).to_pylist():
                encoded = np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16)
                yield np.append(encoded, np.uint16(END))
