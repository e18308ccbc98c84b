"""The command line that all benchmarks share: arguments, a table, and flat JSON.

A benchmark is a module of this package with `main(argv)`, which hands its `measure` to `run`. Keys
of the JSON end in their unit; its values are numbers, or null for what was not run.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

from algorithms.common.errors import InputError
from algorithms.common.files import write_json

Figures = Mapping[str, float | None]


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def run(
    name: str,
    text: str,
    measure: Callable[..., Figures],
    argv: Sequence[str],
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> int:
    """Call `measure(quick)`, print its figures, and write them where `--json` says.

    Adds the figures `quick` (0 or 1) and `cores`. `options` of the benchmark's own (name without
    dashes -> keywords of `add_argument`) reach `measure` as keywords. Returns the exit code; bad
    arguments and `InputError` end with one line and 2, before any work where they can be known by
    then.
    """
    parser = Parser(prog=f"python -m benchmarks.{name}", description=text)
    parser.add_argument("--quick", action="store_true", help="less is measured, with more noise")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures to this file")
    for option, keywords in (options or {}).items():
        parser.add_argument(f"--{option}", **keywords)
    arguments = parser.parse_args(argv)
    own = {option: getattr(arguments, option) for option in options or {}}
    try:
        if arguments.json is not None:
            _check_writable(arguments.json)
        measured = measure(arguments.quick, **own)
    except InputError as error:
        parser.error(str(error))
    figures = dict(measured) | {"quick": int(arguments.quick), "cores": cores()}
    _check_figures(figures)
    _print(f"{name} --quick" if arguments.quick else name, figures)
    if arguments.json is not None:
        write_json(arguments.json, figures)
    return 0


def cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _check_writable(path: Path) -> None:
    """Raise `InputError` unless `write_json` can write `path`: minutes of work hang on it."""
    if path.exists() and not path.is_file():
        raise InputError(f"--json: {path}: is not a file")
    probe = path.with_name(f".{path.name}.{os.getpid()}")  # as long a name as write_json's own
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(f"--json: {path}: {error.strerror}") from None


def _check_figures(figures: Figures) -> None:
    for key, value in figures.items():
        if value is None:
            continue
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise TypeError(f"figure {key!r} is {type(value).__name__}, not a number or None")
        if not math.isfinite(value):
            raise ValueError(f"figure {key!r} is {value}")


def _print(title: str, figures: Figures) -> None:
    table = Table(title=title, title_justify="left")
    table.add_column("figure", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    for key, value in sorted(figures.items()):
        table.add_row(key, _shown(value))
    Console(file=sys.stdout).print(table)


def _shown(value: float | None) -> str:
    if value is None:
        return "not run"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
