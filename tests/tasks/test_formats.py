import gzip
import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from algorithms.common.errors import InputError
from tasks import formats
from tasks.formats import texts


def read(name: str, data: bytes) -> list[tuple[int | None, str]]:
    return list(texts(io.BytesIO(data), name, "text"))


def parquet(columns: dict[str, Any]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue()


def test_plain_text_is_one_document() -> None:
    assert read("a.txt", "gr\u00fcn\n".encode()) == [(None, "gr\u00fcn\n")]
    assert read("README", b"x") == [(None, "x")]


def test_jsonl_rows_count_lines_and_null_is_empty() -> None:
    data = b'{"text": "one"}\n\n{"text": null, "x": 1}\n{"text": "three"}'
    assert read("a.jsonl", data) == [(1, "one"), (3, ""), (4, "three")]


def test_parquet_reads_the_column() -> None:
    data = parquet({"id": [1, 2], "text": ["one", None]})
    assert read("a.parquet", data) == [(1, "one"), (2, "")]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_gzip_is_unpacked(name: str) -> None:
    data = b'{"text": "one"}\n'
    assert read(f"{name}.gz", gzip.compress(data)) == read(name, data)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"abc\xffd", "a.txt: not UTF-8 at byte 3"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', "a.jsonl: not UTF-8 at byte 24"),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', "a.jsonl: line 2: not JSON: "),
        ("a.jsonl", b"[" * 99999, "a.jsonl: line 1: not JSON: "),
        ("a.jsonl", b'{"text": ' + b"1" * 5000 + b"}", "a.jsonl: line 1: not JSON: "),
        ("a.jsonl", b"[1]\n", "a.jsonl: line 1: must be an object, not list"),
        ("a.jsonl", b"null\n", "a.jsonl: line 1: must be an object, not NoneType"),
        ("a.jsonl", b'{"a": 1, "b": 2}', "a.jsonl: line 1: no column 'text'; it has: a, b"),
        ("a.jsonl", b'{"text": 7}', "a.jsonl: line 1: text: holds int, not text"),
        ("a.jsonl", b'{"text": "\\ud800"}', "a.jsonl: line 1: text: lone surrogate at character 0"),
        ("a.parquet", b"PAR1 no", "a.parquet: not Parquet: "),
        ("a.parquet", parquet({"b": ["x"]}), "a.parquet: no column 'text'; it has: b"),
        ("a.parquet", parquet({"text": [1]}), "a.parquet: row 1: text: holds int, not text"),
        ("a.txt.gz", b"plain", "a.txt.gz: damaged gzip: "),
        ("a.txt.gz", gzip.compress(bytes(9999))[:-9], "a.txt.gz: damaged gzip: "),
    ],
)
def test_bad_input_is_one_line_that_says_where(name: str, data: bytes, message: str) -> None:
    with pytest.raises(InputError) as error:
        read(name, data)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_undecodable_bytes_in_parquet_name_the_row() -> None:
    text = pa.array([b"fine", b"ab\xff"], pa.binary()).view(pa.string())
    with pytest.raises(InputError, match=r"^a.parquet: row 2: not UTF-8 at byte 2 of text$"):
        read("a.parquet", parquet({"text": text}))


def test_a_document_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "MAX_DOCUMENT", 2**20)
    assert read("a.txt", b"x" * 2**20)
    with pytest.raises(InputError, match=r"^a.txt: more than 1 MiB in one document"):
        read("a.txt", b"x" * (2**20 + 1))
    with pytest.raises(InputError, match=r"^a.jsonl: line 1: text: more than 1 MiB"):
        read("a.jsonl", b'{"text": "' + b"x" * (2**20 + 1) + b'"}')


def test_parquet_is_read_from_a_real_file(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(parquet({"text": ["x"] * 1000}))
    with (tmp_path / "a.parquet").open("rb") as file:
        rows = list(texts(file, "a.parquet", "text"))
    assert rows[-1] == (1000, "x") and len(rows) == 1000
