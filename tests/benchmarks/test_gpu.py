"""The GPU benchmark: a dry run from end to end, and parts that break, hang or find nothing."""

import json
import math
import subprocess
import sys

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu_parts import attention
from benchmarks.gpu_parts.part import Part
from tasks.paths import PROJECT

PARTS = """
import os, signal, sys, time
part = sys.argv[1]
print("  triton_fp32_value_error = 1e-07", flush=True)
print("  sdpa_few_64k_forward_tflops = 250.0", flush=True)
print("  replay_64k_exact_g2_peak_bytes = 12345", flush=True)
print("  replay_64k_exact_g2_s = null", flush=True)
if part == "accuracy":
    os.kill(os.getpid(), signal.SIGKILL)
if part == "speed":
    time.sleep(60)
if part == "replay_16k":
    raise RuntimeError("an illegal memory access")
"""


def start(*arguments):
    command = [sys.executable, "-m", "benchmarks.gpu", *map(str, arguments)]
    return subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)


@pytest.mark.slow
def test_a_dry_run_goes_through_every_part(tmp_path):
    path = tmp_path / "gpu.json"
    done = start("--dry-run", "--json", path)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(path.read_text())
    assert (figures["parts_run"], figures["parts_failed"], figures["quick"]) == (4, 0, 1)
    wanted = {name for part in gpu.BUDGETS for name in gpu.names(part)}
    assert wanted | {"parts_run", "parts_failed", "quick", "seconds"} == set(figures)
    # A CPU has no peak of device memory; all else is measured.
    missing = {name for name, value in figures.items() if value is None}
    assert missing == {name for name in wanted if name.endswith("peak_bytes")}
    assert figures["triton_fp32_gradient_error"] < 1e-6
    assert figures["triton_bf16_gradient_error"] < 2e-2
    for part in ("replay_16k", "replay_64k"):
        assert figures[f"{part}_gradient_error_vs_naive"] < 1e-5


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_one_line(tmp_path):
    done = start("--json", tmp_path / "gpu.json")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and "no CUDA device; --dry-run" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_path_that_cannot_be_written_ends_before_any_work(tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        gpu.main(["--dry-run", "--json", str(tmp_path / "missing" / "gpu.json")])
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1 and "No such file or directory" in err


def test_parts_survive_each_other_and_keep_what_they_found(tmp_path, monkeypatch, capsys):
    package = tmp_path / "benchmarks"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "gpu_parts.py").write_text(PARTS)
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setitem(gpu.BUDGETS, "speed", 3)
    path = tmp_path / "gpu.json"
    assert gpu.main(["--quick", "--json", str(path)]) == 1
    figures = json.loads(path.read_text())
    assert (figures["parts_run"], figures["parts_failed"]) == (4, 3)
    found = {name: value for name, value in figures.items() if value is not None}
    assert found == {
        "triton_fp32_value_error": 1e-07,
        "sdpa_few_64k_forward_tflops": 250.0,
        "replay_64k_exact_g2_peak_bytes": 12345,
        "parts_run": 4,
        "parts_failed": 3,
        "quick": 1,
        "seconds": figures["seconds"],
    }
    out = capsys.readouterr().out
    for line in (
        "  accuracy: FAILED, exit code -9",
        "  speed: stopped, its 3 s are over",
        "RuntimeError: an illegal memory access",
        "  replay_16k: FAILED, exit code 1",
    ):
        assert line in out.splitlines()
    assert out.endswith(" s, failed: accuracy, speed, replay_16k\n")


def test_all_parts_together_end_within_six_minutes():
    assert sum(gpu.BUDGETS.values()) <= 345
    assert min(gpu.BUDGETS.values()) > gpu.START


@pytest.mark.slow
def test_nothing_but_torch_triton_and_transformers_is_needed():
    """With all else that the project installs out of reach."""
    blocked = ["rich", "tasks", "flows", "prefect", "mlflow", "dvc", "pydantic", "psutil"]
    blocked += ["pyarrow", "datasets", "ruamel", "matplotlib", "pytest"]
    code = f"import sys; sys.modules.update(dict.fromkeys({blocked!r}))\n"
    code += "import benchmarks.gpu, benchmarks.gpu_parts.attention, benchmarks.gpu_parts.replay"
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_goes_wrong_is_a_line_and_the_part_goes_on(capsys):
    part = Part(seconds=10, dry=True)

    def too_large():
        raise torch.OutOfMemoryError("tried to allocate\n  100 GiB")

    assert part.attempt("naive", too_large) is None
    assert part.attempt("long", lambda: 1, expected=1000) is None
    assert part.failed == []  # neither is an error
    assert part.attempt("wrong", lambda: 1 // 0) is None
    assert part.attempt("right", lambda: 2) == 2
    part.figure("speed", math.inf)
    part.figure("bytes", 123456789)
    part.figure("error", 1.23456e-7)
    part.figure("peak", None)
    assert part.failed == ["wrong", "speed"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "  naive: does not fit: tried to allocate 100 GiB"
    assert lines[1].startswith("  long: not run, ") and lines[1].endswith("1000 s expected")
    assert lines[2].startswith("  wrong: ZeroDivisionError: ")
    assert lines[3:] == [
        "  speed: is inf",
        "  bytes = 123456789",
        "  error = 1.235e-07",
        "  peak = null",
    ]
    assert [bool(gpu.FIGURE.match(line)) for line in lines[3:]] == [False, True, True, True]


def test_a_twin_that_is_wrong_fails_its_part(monkeypatch):
    errors = {"out": 1e-7, "query": 1e-7, "sinks": 5e-5}
    monkeypatch.setattr(attention, "_errors", lambda *_: errors)
    part = Part(seconds=100, dry=True)
    attention.accuracy(part)
    assert part.failed == []
    errors["query"] = 1e-3
    attention.accuracy(part)
    assert part.failed == [f"fp32 {case}: past 1e-05" for case in attention.TOY_CASES]
    errors["query"] = math.nan
    other = Part(seconds=100, dry=True)
    attention.accuracy(other)
    assert len(other.failed) == 2 * len(attention.TOY_CASES) + 2  # and both figures are undefined
