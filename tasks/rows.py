"""Rows of jsonl and Parquet files, by the file's name; each row knows where it is."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from algorithms.common.errors import InputError, one_line
from algorithms.common.files import write_text

Row = dict[str, Any]


def read_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Yield (where, row); `where` is "FILE: line 3" or "FILE: row 3", counted from 1.

    Raises `InputError` for a file that is missing, of another kind or damaged.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    if path.suffix == ".jsonl":
        yield from _jsonl(path)
    elif path.suffix == ".parquet":
        yield from _parquet(path)
    else:
        raise InputError(f"{path}: must be a .jsonl or .parquet file")


def write_rows(path: Path, rows: Iterable[Row], schema: pa.Schema | None = None) -> None:
    """Write all rows in one rename; `schema`, of Parquet, None: as the values are."""
    if path.suffix == ".jsonl":
        write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    pq.write_table(pa.Table.from_pylist(list(rows), schema=schema), temporary)
    os.replace(temporary, path)


def _jsonl(path: Path) -> Iterator[tuple[str, Row]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}: line {number}"
            try:
                row = json.loads(line.decode())
            except UnicodeDecodeError as error:
                raise InputError(f"{where}: not UTF-8 at byte {error.start}") from None
            except json.JSONDecodeError as error:
                raise InputError(
                    f"{where}: not JSON: {error.msg} at column {error.colno}"
                ) from None
            except (ValueError, RecursionError) as error:  # 5,000 digits, or brackets
                raise InputError(f"{where}: not JSON: {one_line(error)}") from None
            if b"\\u" in line and not _is_unicode(row):
                raise InputError(f"{where}: not Unicode: half of a surrogate pair")
            if not isinstance(row, dict):
                raise InputError(f"{where}: must be an object, not {type(row).__name__}")
            yield where, row


def _is_unicode(row: Any) -> bool:
    """Whether its texts can be written: JSON may name half a character."""
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _parquet(path: Path) -> Iterator[tuple[str, Row]]:
    number = 0
    try:
        with pq.ParquetFile(path) as parquet:
            for batch in parquet.iter_batches(batch_size=256):
                for row in batch.to_struct_array():
                    number += 1
                    yield f"{path}: row {number}", row.as_py()
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: row {number}: not UTF-8 at byte {error.start}") from None
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path}: not Parquet: {one_line(error)}") from None
