"""Stage `corpus`: documents of all sources -> Parquet shards and MANIFEST.json.

Which split a document is in depends on the hash of its text alone, so it stays there whatever else
is added or reordered. Exact duplicates and blank documents are dropped and counted. Memory holds
one row group per split and the hashes of the documents, not the corpus. The bytes depend on the
sources and the config only: no times, no paths of this machine.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from algorithms.common.errors import InputError
from algorithms.common.files import write_json
from tasks.data_config import CorpusConfig
from tasks.downloads import file_sha256
from tasks.progress import progress
from tasks.sources import Document, Source, open_source
from tasks.staging import staged

VERSION = "1"

SCHEMA = pa.schema([(name, pa.string()) for name in ("text", "source", "path", "slot", "sha256")])
SHARD_BYTES = 64 * 2**20
"""A shard is closed when its texts reach this size."""
GROUP_BYTES = 4 * 2**20
"""A row group is written when its texts reach this size."""


def build(config: CorpusConfig, out: Path) -> dict[str, Any]:
    """Write `out`/{train,val}-NNNNN.parquet and MANIFEST.json in one move; return the manifest.

    Columns: text, source, path (inside the source, `:row` behind it for rows), slot, sha256 of the
    text in hex. Raises `InputError`, and `SourceUnavailable` for a source that cannot be had;
    `out` is then as it was.
    """
    with staged(out) as folder:
        sources = [open_source(source) for source in config.sources]
        splits = {name: _Split(folder, name) for name in ("train", "val")}
        seen: set[bytes] = set()
        dropped = {"blank": 0, "duplicates": 0}
        rows = []
        for source in sources:
            rows.append(_read(source, splits, config.val_fraction, seen, dropped))
        if not seen:
            raise InputError("corpus: no source has a document that is not blank")
        for name, split in splits.items():
            split.close()
            if not split.shards:
                raise InputError(
                    f"corpus.val_fraction: {config.val_fraction} leaves no document of "
                    f"{len(seen)} for {name}"
                )
        manifest = {
            "version": VERSION,
            "val_fraction": config.val_fraction,
            "sources": rows,
            "splits": {name: split.manifest() for name, split in splits.items()},
            **dropped,
        }
        write_json(folder / "MANIFEST.json", manifest)
    return manifest


def _read(
    source: Source,
    splits: dict[str, _Split],
    val_fraction: float,
    seen: set[bytes],
    dropped: dict[str, int],
) -> dict[str, Any]:
    """Sort the documents of one source into the splits; return its row of the manifest."""
    files: set[str] = set()
    documents = size = 0
    with progress(f"read {source.origin}") as advance:
        for document in source.documents:
            advance(1)
            files.add(document.file)
            data = document.text.encode()
            digest = hashlib.sha256(data)
            if not data.strip():
                dropped["blank"] += 1
            elif digest.digest() in seen:
                dropped["duplicates"] += 1
            else:
                seen.add(digest.digest())
                held_out = int(digest.hexdigest()[:16], 16) / 2**64 < val_fraction
                split = splits["val" if held_out else "train"]
                split.add(source.origin, document, len(data), digest.hexdigest())
                documents += 1
                size += len(data)
    return {
        "from": source.origin,
        "version": source.version,
        "sha256": source.sha256,
        "licence": source.licence,
        "files": len(files),
        "documents": documents,
        "bytes": size,
    }


@dataclass
class _Split:
    """Writes the shards of one split."""

    folder: Path
    name: str
    shards: list[dict[str, Any]] = field(default_factory=list)
    slots: dict[str, dict[str, int]] = field(
        default_factory=lambda: defaultdict(lambda: {"documents": 0, "bytes": 0})
    )
    _rows: list[dict[str, str]] = field(default_factory=list)
    _row_bytes: int = 0
    _shard_bytes: int = 0
    _writer: pq.ParquetWriter | None = None

    def add(self, origin: str, document: Document, size: int, sha256: str) -> None:
        self._rows.append(
            {
                "text": document.text,
                "source": origin,
                "path": document.path,
                "slot": document.slot,
                "sha256": sha256,
            }
        )
        count = self.slots[document.slot]
        count["documents"] += 1
        count["bytes"] += size
        self._row_bytes += size
        if self._row_bytes >= GROUP_BYTES:
            self._write_group()
        if self._shard_bytes >= SHARD_BYTES:
            self.close()

    def close(self) -> None:
        """End the current shard; the next document opens a new one."""
        if self._rows:
            self._write_group()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
            self._shard_bytes = 0
            path = self.folder / self.shards[-1]["file"]
            self.shards[-1]["sha256"] = file_sha256(path)

    def manifest(self) -> dict[str, Any]:
        return {
            "documents": sum(count["documents"] for count in self.slots.values()),
            "bytes": sum(count["bytes"] for count in self.slots.values()),
            "slots": dict(self.slots),
            "shards": self.shards,
        }

    def _write_group(self) -> None:
        if self._writer is None:
            file = f"{self.name}-{len(self.shards):05d}.parquet"
            self.shards.append({"file": file, "documents": 0})
            self._writer = pq.ParquetWriter(
                self.folder / file, SCHEMA, compression="zstd", use_dictionary=["source", "slot"]
            )
        self._writer.write_table(pa.Table.from_pylist(self._rows, schema=SCHEMA))
        self.shards[-1]["documents"] += len(self._rows)
        self._shard_bytes += self._row_bytes
        self._rows, self._row_bytes = [], 0
