"""Texts of one file: plain text, jsonl, Parquet, each also gzipped. Chosen by the file's name."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

import pyarrow as pa
import pyarrow.parquet as pq

from algorithms.common.errors import InputError, one_line

MAX_DOCUMENT = 16 * 2**20
"""Largest document in bytes of UTF-8. Encoding one takes some 130 times that in memory, 2 GB."""


def texts(file: BinaryIO, where: str, column: str) -> Iterator[tuple[int | None, str]]:
    """Yield (row, text); rows count from 1, a plain text file is one text with row None.

    `where` names the file in errors and decides its format. `column` holds the text of jsonl and
    Parquet; a null there is an empty text. Raises `InputError` with file and byte, line or row.
    """
    name = where
    if name.endswith(".gz"):
        file, name = cast(BinaryIO, gzip.GzipFile(fileobj=file)), name[: -len(".gz")]
    try:
        if name.endswith(".jsonl"):
            yield from _jsonl(file, where, column)
        elif name.endswith(".parquet"):
            yield from _parquet(file, where, column)
        else:
            yield None, _plain(file, where)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{where}: damaged gzip: {error}") from None


def check_text(value: Any, where: str) -> str:
    """`value` as a text that is not too long, or `InputError`."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise InputError(f"{where}: holds {type(value).__name__}, not text")
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        raise InputError(f"{where}: lone surrogate at character {error.start}") from None
    _check_size(size, where)
    return value


def missing_column(where: str, column: str, known: list[str]) -> InputError:
    return InputError(f"{where}: no column {column!r}; it has: {', '.join(known) or 'none'}")


def _check_size(size: int, where: str) -> None:
    if size > MAX_DOCUMENT:
        limit = MAX_DOCUMENT // 2**20
        raise InputError(f"{where}: more than {limit} MiB in one document; split it, as jsonl say")


def _plain(file: BinaryIO, where: str) -> str:
    data = file.read(MAX_DOCUMENT + 1)
    _check_size(len(data), where)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not UTF-8 at byte {error.start}") from None


def _jsonl(file: BinaryIO, where: str, column: str) -> Iterator[tuple[int, str]]:
    offset = 0
    for number, line in enumerate(file, start=1):
        here = f"{where}: line {number}"
        try:
            row = json.loads(line.decode()) if line.strip() else None
        except UnicodeDecodeError as error:
            raise InputError(f"{where}: not UTF-8 at byte {offset + error.start}") from None
        except json.JSONDecodeError as error:
            raise InputError(f"{here}: not JSON: {error.msg} at column {error.colno}") from None
        except (ValueError, RecursionError) as error:  # 5,000 digits, or brackets
            raise InputError(f"{here}: not JSON: {one_line(error)}") from None
        offset += len(line)
        if not line.strip():
            continue
        if not isinstance(row, dict):
            raise InputError(f"{here}: must be an object, not {type(row).__name__}")
        if column not in row:
            raise missing_column(here, column, list(row))
        yield number, check_text(row[column], f"{here}: {column}")


def _parquet(file: BinaryIO, where: str, column: str) -> Iterator[tuple[int, str]]:
    number = 0
    try:
        parquet = pq.ParquetFile(file)
        if column not in parquet.schema_arrow.names:
            raise missing_column(where, column, parquet.schema_arrow.names)
        for batch in parquet.iter_batches(batch_size=256, columns=[column]):
            for value in batch.column(0):
                number += 1
                yield number, check_text(value.as_py(), f"{where}: row {number}: {column}")
    except UnicodeDecodeError as error:
        byte = f"byte {error.start} of {column}"
        raise InputError(f"{where}: row {number}: not UTF-8 at {byte}") from None
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{where}: not Parquet: {one_line(error)}") from None
