"""The harness of the benchmarks, from outside: real processes, exit codes, what lies on disk."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import names
from benchmarks.timing import Measured, interleaved, measured, ratio

PROJECT = Path(__file__).resolve().parents[2]

TOY = """
import sys
from pathlib import Path
from algorithms.common.errors import InputError
from benchmarks.report import run

def measure(quick):
    Path("worked").touch()
    {body}

def main(argv):
    return run("{name}", "A toy.", measure, argv)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def package(tmp_path):
    """A copy of the package's harness, without its benchmarks."""
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    for name in ("__init__", "__main__", "report", "timing"):
        shutil.copyfile(PROJECT / "benchmarks" / f"{name}.py", folder / f"{name}.py")
    return folder


def add(package, name, body):
    (package / f"{name}.py").write_text(TOY.format(name=name, body=body))


def start(package, module, *arguments):
    """Run `python -m module` where `benchmarks` is the copy."""
    return subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        cwd=package.parent,
        env=os.environ | {"PYTHONPATH": f"{package.parent}:{PROJECT}"},
        capture_output=True,
        text=True,
    )


def test_figures_are_printed_and_written_flat_and_sorted(package, tmp_path):
    add(package, "toy", "return {'z_ms': 1.25, 'a_bytes': 12345, 'never': None}")
    out = tmp_path / "out.json"
    done = start(package, "benchmarks.toy", "--json", out)
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())
    cores = len(os.sched_getaffinity(0))
    assert figures == {"z_ms": 1.25, "a_bytes": 12345, "never": None, "quick": 0, "cores": cores}
    assert list(figures) == sorted(figures)
    for shown in ("a_bytes", "12,345", "1.25", "not run"):
        assert shown in done.stdout
    assert {file.name for file in tmp_path.iterdir()} == {"benchmarks", "out.json", "worked"}


def test_quick_is_passed_on_and_json_is_optional(package, tmp_path):
    add(package, "toy", "return {'told_quick': int(quick)}")
    done = start(package, "benchmarks.toy", "--quick")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert any("told_quick" in row and "1" in row for row in rows)
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--json", "missing/out.json"], "missing/out.json: No such file or directory"),
        (["--json", "file/out.json"], "file/out.json: Not a directory"),
        (["--json", "benchmarks"], "benchmarks: is not a file"),
        (["--json", "/dev/null"], "/dev/null: is not a file"),
        (["--json"], "expected one argument"),
        (["--fast"], "unrecognized arguments: --fast"),
    ],
)
def test_bad_arguments_end_before_any_work_with_one_line(package, tmp_path, arguments, said):
    add(package, "toy", "return {}")
    (tmp_path / "file").touch()
    done = start(package, "benchmarks.toy", *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1 and said in done.stderr
    assert not (tmp_path / "worked").exists()


def test_bad_input_found_by_a_benchmark_ends_with_one_line(package):
    add(package, "toy", "raise InputError('params.yaml: model.x: unknown key')")
    done = start(package, "benchmarks.toy")
    assert done.returncode == 2
    assert done.stderr == "python -m benchmarks.toy: params.yaml: model.x: unknown key\n"


@pytest.mark.parametrize("value", ["[1]", "{'a': 1}", "'fast'", "True", "float('nan')"])
def test_what_is_no_number_is_a_bug_and_not_written(package, tmp_path, value):
    add(package, "toy", f"return {{'figure': {value}}}")
    done = start(package, "benchmarks.toy", "--json", tmp_path / "out.json")
    assert done.returncode == 1
    assert "figure 'figure' is" in done.stderr
    assert not (tmp_path / "out.json").exists()


def test_all_benchmarks_run_quick_and_those_that_failed_are_named(package):
    add(package, "good", "return {'told_quick': int(quick)}")
    add(package, "bad", "raise RuntimeError('broken')")
    add(package, "ugly", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    done = start(package, "benchmarks")
    assert done.returncode == 1
    lines = [line for line in done.stdout.splitlines() if " s, " in line]
    assert [line.split(":")[0] for line in lines] == ["bad", "good", "ugly"]
    assert [line.split(" s, ")[1] for line in lines] == [
        "FAILED, exit code 1",
        "ok",
        "FAILED, exit code -9",
    ]
    assert "good --quick" in done.stdout
    assert done.stderr.endswith("python -m benchmarks: failed: bad, ugly\n")


def test_all_went_well(package):
    add(package, "good", "return {}")
    done = start(package, "benchmarks")
    assert (done.returncode, done.stderr) == (0, "")


def test_the_project_s_benchmarks_are_found_and_each_has_a_section():
    found = names()
    text = (PROJECT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert {*re.findall(r"^## (\w+)$", text, re.MULTILINE)} >= {*found}
    kept = {path.stem for path in (PROJECT / "benchmarks" / "results").glob("*.json")}
    assert kept <= {*found}
    assert "training_step" in found
    assert not {"report", "timing", "ranks"} & set(found)


def test_contestants_take_turns_and_the_first_round_does_not_count():
    calls = []

    def contestant(name):
        calls.append(name)
        return len(calls)

    results = interleaved({"a": lambda: contestant("a"), "b": lambda: contestant("b")}, rounds=2)
    assert calls == ["a", "b"] * 3
    assert results == {"a": [3, 5], "b": [4, 6]}


def test_median_and_spread():
    assert measured([3.0]) == Measured(3.0, 0.0)
    assert measured([1.0, 2.0, 3.0, 4.0, 100.0]) == Measured(3.0, 2.0)
    # A machine that slows down between rounds does not change the ratio.
    assert ratio([2.0, 20.0, 6.0], [1.0, 10.0, 3.0]) == Measured(2.0, 0.0)
