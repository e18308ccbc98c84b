"""The hash of the code: what changes it and what does not."""

import pytest

from benchmarks.study import code


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.setattr(code, "ROOT", tmp_path)
    write(tmp_path, "algorithms/__init__.py", "")
    write(tmp_path, "algorithms/far.py", "X = 1\n")
    write(tmp_path, "algorithms/near.py", "from algorithms import far\n")
    write(tmp_path, "algorithms/other.py", "X = 1\n")
    write(tmp_path, "benchmarks/run.py", "import math\nfrom algorithms.near import thing\n")
    return tmp_path


def write(root, name, text):
    path = root / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("file", "text", "same"),
    [
        ("algorithms/far.py", "X = 2\n", False),
        ("benchmarks/run.py", "from algorithms.near import thing\n", False),
        ("algorithms/__init__.py", "X = 1\n", False),
        ("algorithms/far.py", '"""Says what."""\n\nX = 1  # one\n', True),
        ("algorithms/other.py", "X = 2\n", True),
    ],
)
def test_code_counts_with_all_that_it_imports(project, file, text, same):
    before = code.code_hash("benchmarks.run")
    write(project, file, text)
    assert (code.code_hash("benchmarks.run") == before) is same


def test_strings_that_are_values_count(project):
    write(project, "algorithms/far.py", "def f():\n    return 'a'\n")
    before = code.code_hash("benchmarks.run")
    write(project, "algorithms/far.py", "def f():\n    'does it'\n    return 'a'\n")
    assert code.code_hash("benchmarks.run") == before
    write(project, "algorithms/far.py", "def f():\n    return 'b'\n")
    assert code.code_hash("benchmarks.run") != before


def test_the_study_depends_on_the_algorithms():
    assert {"algorithms.lordo.stacked", "algorithms.lordo.wire", "algorithms.common.codec"} <= (
        code.closure("benchmarks.lordo_study.training")
    )
