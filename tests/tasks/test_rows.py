"""Rows of both kinds of file, and what is said of damaged ones."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from algorithms.common.errors import InputError
from tasks.rows import read_rows, write_rows

ROWS = [{"a": 1, "b": ["x", "y"]}, {"a": 2, "b": []}]


@pytest.mark.parametrize(("name", "unit"), [("r.jsonl", "line"), ("r.parquet", "row")])
def test_rows_survive_a_round_trip(tmp_path, name, unit):
    path = tmp_path / name
    write_rows(path, ROWS)
    assert list(read_rows(path)) == [
        (f"{path}: {unit} {i}", row) for i, row in enumerate(ROWS, start=1)
    ]
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_blank_lines_are_passed_over_and_counted(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text('{"a": 1}\n\n{"a": 2}\n')
    assert [where for where, _ in read_rows(path)] == [f"{path}: line 1", f"{path}: line 3"]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("r.jsonl", b'{"a": 1}\n[1]\n', "line 2: must be an object, not list"),
        ("r.jsonl", b'{"a": \n', "line 1: not JSON: Expecting value at column"),
        ("r.jsonl", b'{"a": "\xff"}\n', "line 1: not UTF-8 at byte 7"),
        ("r.jsonl", b'{"a": %s}\n' % (b"9" * 5000), "line 1: not JSON: Exceeds the limit"),
        ("r.jsonl", b'{"a": 1}\n' + b"[" * 100_000, "line 2: not JSON: maximum recursion"),
        ("r.jsonl", rb'{"a": ["\ud83d"]}', "line 1: not Unicode: half of a surrogate pair"),
        ("r.parquet", b"no", "not Parquet: "),
        ("r.csv", b"a,b", "must be a .jsonl or .parquet file"),
    ],
)
def test_a_damaged_file_is_one_line_that_says_where(tmp_path, name, data, message):
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(InputError) as error:
        list(read_rows(path))
    assert str(error.value).startswith(f"{path}: {message}") and "\n" not in str(error.value)


def test_undecodable_bytes_in_parquet_name_the_row(tmp_path):
    path = tmp_path / "r.parquet"
    text = pa.array([b"fine", b"ab\xff"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"prompt": text}), path)
    with pytest.raises(InputError, match=r"r.parquet: row 2: not UTF-8 at byte 2$"):
        list(read_rows(path))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match="no.jsonl: no such file$"):
        list(read_rows(tmp_path / "no.jsonl"))
