"""Stage `tokens`: corpus -> tokenizer and flat shards of token ids that a loader memory-maps.

Byte-level BPE (Sennrich et al., 1508.07909; bytes as in GPT-2) trained on the train split, or an
existing tokenizer.json. Every document is followed by the end-of-text token. Marks such as
`<|endoftext|>` that stand in a document are encoded as the text they are, never as the token.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from algorithms.common.errors import InputError, one_line
from algorithms.common.files import TOKENIZER_FILES, read_json, require_inside, write_json
from tasks import paths
from tasks.data_config import TokensConfig
from tasks.downloads import file_sha256
from tasks.progress import progress
from tasks.staging import staged
from tasks.token_bytes import token_bytes

VERSION = "1"

END_OF_TEXT = "<|endoftext|>"
KNOWN_ENDS = (END_OF_TEXT, "</s>", "<|im_end|>", "<|end_of_text|>")
BATCH_CHARACTERS = 2**21
"""Documents are encoded together until they have this many characters."""


def build(config: TokensConfig, corpus: Path, out: Path) -> dict[str, Any]:
    """Encode the corpus in `corpus` into `out`, in one move; return the manifest.

    Writes {train,val}/NNNNN.bin (little-endian uint16, uint32 above 65536 tokens), token_bytes.npy
    (int32 [vocab], UTF-8 bytes that each token stands for), MANIFEST.json, and the tokenizer as
    `transformers.AutoTokenizer` reads it. Raises `InputError`; `out` is then as it was.
    """
    manifest_path = corpus / "MANIFEST.json"
    if not manifest_path.is_file():
        raise InputError(f"{manifest_path}: no such file; build the corpus first")
    source = read_json(manifest_path)["splits"]
    files = [shard["file"] for split in source.values() for shard in split["shards"]]
    require_inside(manifest_path, [*source, *files])
    with staged(out) as folder:
        if config.tokenizer is None:
            tokenizer, end = _train(config.vocab_size, corpus, source["train"]), END_OF_TEXT
            _write_tokenizer_config(folder, {"bos_token": end, "eos_token": end, "pad_token": end})
        else:
            tokenizer, end = _load(paths.PROJECT / config.tokenizer, folder)
        tokenizer.save(str(folder / "tokenizer.json"))
        tokenizer.encode_special_tokens = True  # a mark inside a document is text
        end_id = tokenizer.token_to_id(end)
        assert end_id is not None
        sizes = token_bytes(tokenizer)
        sizes[end_id] = 0
        np.save(folder / "token_bytes.npy", sizes)
        dtype = "uint16" if len(sizes) <= 2**16 else "uint32"
        splits: dict[str, Any] = {}
        for name, split in source.items():
            with _ShardWriter(folder, name, np.dtype(dtype), config.shard_tokens) as writer:
                _encode(tokenizer, corpus, split, end_id, writer)
            splits[name] = {
                "tokens": sum(shard["tokens"] for shard in writer.shards),
                "bytes": split["bytes"],
                "documents": split["documents"],
                "shards": writer.shards,
            }
        counted = _sum_bytes(folder, splits["val"]["shards"], dtype, sizes)
        if counted == 0:
            raise InputError("tokens.tokenizer: turns the held-out text into unknown tokens only")
        manifest = {
            "version": VERSION,
            "corpus_sha256": file_sha256(manifest_path),
            "tokenizer_sha256": file_sha256(folder / "tokenizer.json"),
            "vocab_size": len(sizes),
            "dtype": dtype,
            "end_of_text": end,
            "end_of_text_id": end_id,
            "bytes_per_token_bytes": splits["val"]["bytes"] / counted,
            "splits": splits,
        }
        write_json(folder / "MANIFEST.json", manifest)
    return manifest


def _train(vocab_size: int, corpus: Path, split: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE; smaller than `vocab_size` when the text has fewer pairs to merge."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    texts = _documents(corpus, split)
    tokenizer.train_from_iterator(texts, trainer, length=split["documents"])
    return tokenizer


def _load(path: Path, folder: Path) -> tuple[Tokenizer, str]:
    """The tokenizer at `path` and its end of a document; settings beside it come along."""
    if not path.is_file():
        raise InputError(f"tokens.tokenizer: {path}: no such file")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises no other class
        reason = one_line(error)
        raise InputError(f"tokens.tokenizer: {path}: not a tokenizer.json: {reason}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    added = sorted(tokenizer.get_added_tokens_decoder().items())
    special = [token.content for _, token in added if token.special]
    known = [token for token in KNOWN_ENDS if tokenizer.token_to_id(token) is not None]
    if not known and not special:
        raise InputError(f"tokens.tokenizer: {path}: has no token that can end a document")
    end = (known or special)[0]
    _write_tokenizer_config(folder, {"eos_token": end, "pad_token": end})
    for name in TOKENIZER_FILES[1:]:
        if path.with_name(name).is_file():
            shutil.copyfile(path.with_name(name), folder / name)
    return tokenizer, end


def _write_tokenizer_config(folder: Path, special: dict[str, str]) -> None:
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    write_json(folder / "tokenizer_config.json", settings | special)
    write_json(folder / "special_tokens_map.json", special)


def _documents(corpus: Path, split: dict[str, Any]) -> Iterator[str]:
    for shard in split["shards"]:
        parquet = pq.ParquetFile(corpus / shard["file"])
        for batch in parquet.iter_batches(batch_size=64, columns=["text"]):
            yield from batch.column(0).to_pylist()


def _batches(documents: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encode(
    tokenizer: Tokenizer, corpus: Path, split: dict[str, Any], end_id: int, writer: _ShardWriter
) -> None:
    with progress(f"encode {writer.split}", split["documents"]) as advance:
        for batch in _batches(_documents(corpus, split)):
            for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
                writer.add(np.array([*encoding.ids, end_id], dtype=writer.dtype))
            advance(len(batch))


def _sum_bytes(
    folder: Path, shards: list[dict[str, Any]], dtype: str, sizes: npt.NDArray[np.int32]
) -> int:
    """Bytes that the tokens of `shards` stand for."""
    counts = np.zeros(len(sizes), dtype=np.int64)
    for shard in shards:
        ids = np.memmap(folder / shard["file"], dtype=dtype, mode="r")
        counts += np.bincount(ids, minlength=len(sizes))
    return int(counts @ sizes)


@dataclass
class _ShardWriter:
    """Writes one stream of tokens as files of `limit` tokens each, the last one shorter."""

    folder: Path
    split: str
    dtype: np.dtype[Any]
    limit: int
    shards: list[dict[str, Any]] = field(default_factory=list)
    _file: BinaryIO | None = None

    def __enter__(self) -> _ShardWriter:
        (self.folder / self.split).mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._close(self._file)

    def add(self, ids: npt.NDArray[Any]) -> None:
        """Append `ids` [tokens]."""
        while len(ids):
            if self._file is None:
                name = f"{self.split}/{len(self.shards):05d}.bin"
                self.shards.append({"file": name, "tokens": 0})
                self._file = (self.folder / name).open("wb")
            part = ids[: self.limit - self.shards[-1]["tokens"]]
            ids = ids[len(part) :]
            self._file.write(part.astype(self.dtype.newbyteorder("<")).tobytes())
            self.shards[-1]["tokens"] += len(part)
            if self.shards[-1]["tokens"] == self.limit:
                self._close(self._file)

    def _close(self, file: BinaryIO) -> None:
        file.close()
        self._file = None
        self.shards[-1]["sha256"] = file_sha256(self.folder / self.shards[-1]["file"])
