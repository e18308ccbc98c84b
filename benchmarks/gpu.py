"""What the Triton twin and a replay step do on one GPU; at most six minutes.

    python -m benchmarks.gpu --json PATH      on a bare node: torch, triton and transformers only
    python -m benchmarks.gpu --dry-run        every line of it on a CPU, at toy size

Each part is a process of its own (`gpu_parts/`) with a budget of seconds, since a bad kernel can
hang or leave a GPU that fails every later call. A part prints its figures as it finds them, so what
was found before it broke or was stopped is kept. `--quick` is another name for `--dry-run`: the
quick form of a benchmark runs anywhere.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from algorithms.common.files import write_json

ROOT = Path(__file__).resolve().parents[1]
BUDGETS = {"accuracy": 85, "speed": 45, "replay_16k": 85, "replay_64k": 125}
"""Seconds after which a part is stopped; with the start of this process less than six minutes."""

START = 10
"""Of these, what a process may take before it measures anything."""

SHAPES = ("branches_16k", "branches_64k", "chunk_64k", "few_64k")
MODES = ("exact", "response_only")
GROUPS = (2, 8, 32)
FIGURE = re.compile(r"^  (\w+) = (\S+)$")

Figures = dict[str, float | None]


def names(part: str) -> list[str]:
    """The figures of a part; null until it prints them."""
    if part == "accuracy":
        return [f"triton_{d}_{k}_error" for d in ("fp32", "bf16") for k in ("value", "gradient")]
    if part == "speed":
        return [
            f"{contestant}_{shape}_{direction}_tflops"
            for shape in SHAPES
            for contestant in ("triton", "sdpa")
            for direction in ("forward", "backward")
        ]
    steps = [f"{mode}_g{group}" for mode in MODES for group in GROUPS]
    figures = [f"{step}_{kind}" for step in steps for kind in ("s", "peak_bytes", "speedup")]
    naive = ["naive_s_per_branch", "naive_peak_bytes", "gradient_error_vs_naive"]
    return [f"{part}_{figure}" for figure in figures + naive]


def main(argv: Sequence[str]) -> int:
    """0 when every part went well, 1 when one failed, 2 for bad arguments or no CUDA device."""
    parser = _Parser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--dry-run", "--quick", dest="dry", action="store_true", help="toy sizes on the CPU"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures to this file")
    arguments = parser.parse_args(argv)
    figures: Figures = {name: None for part in BUDGETS for name in names(part)}
    figures |= {"parts_run": 0, "parts_failed": 0, "quick": int(arguments.dry)}
    if not arguments.dry:
        import torch

        if not torch.cuda.is_available():
            parser.error("no CUDA device; --dry-run goes through every part on the CPU")
    begun = time.perf_counter()
    failed = []
    for part in BUDGETS:
        _write(parser, arguments.json, figures)  # after each part: the node may be gone any time
        if not _run(part, arguments.dry, figures):
            failed.append(part)
        figures["parts_run"] = (figures["parts_run"] or 0) + 1
        figures["parts_failed"] = len(failed)
    figures["seconds"] = round(time.perf_counter() - begun, 1)
    _write(parser, arguments.json, figures)
    outcome = f"failed: {', '.join(failed)}" if failed else "all went well"
    print(f"{len(BUDGETS)} parts in {figures['seconds']} s, {outcome}")
    return 1 if failed else 0


def _run(part: str, dry: bool, figures: Figures) -> bool:
    """Run a part, show what it prints, add its figures; whether it ended well in time."""
    command = [sys.executable, "-m", "benchmarks.gpu_parts", part, str(BUDGETS[part] - START)]
    environment = dict(os.environ)
    if dry:
        # The interpreter is too slow for whole steps: those run the twin for CPUs.
        interpreted = "0" if part.startswith("replay") else "1"
        environment |= {"TRITON_INTERPRET": interpreted, "CUDA_VISIBLE_DEVICES": ""}
    print(
        f"{part}, at most {BUDGETS[part]} s{' (dry run: numbers mean nothing)' * dry}", flush=True
    )
    known = names(part)
    late = threading.Event()
    with subprocess.Popen(
        [*command, *(["--dry-run"] * dry)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that a compiler it started is stopped with it
    ) as process:

        def stop() -> None:
            with suppress(ProcessLookupError):  # it ended by itself in this moment
                os.killpg(process.pid, signal.SIGKILL)
                late.set()

        timer = threading.Timer(BUDGETS[part], stop)
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if (found := FIGURE.match(line)) and found[1] in known:
                figures[found[1]] = json.loads(found[2])
        code = process.wait()
        timer.cancel()
    if late.is_set():
        print(f"  {part}: stopped, its {BUDGETS[part]} s are over", flush=True)
    elif code:
        print(f"  {part}: FAILED, exit code {code}", flush=True)
    return code == 0


def _write(parser: _Parser, path: Path | None, figures: Figures) -> None:
    try:
        if path is not None:
            write_json(path, figures)
    except OSError as error:
        parser.error(f"--json: {path}: {error.strerror}")


class _Parser(argparse.ArgumentParser):
    """Like that of `report.py`, which needs more than a bare node has."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
