"""The one progress bar: drawn on stderr when that is a terminal, silent otherwise."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def progress(description: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Gives `advance(n)`, which moves the bar by `n`. Without a total the bar only counts."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, TimeElapsedColumn(), console=console, disable=not sys.stderr.isatty()
    ) as bars:
        task = bars.add_task(description, total=total)
        yield lambda n: bars.advance(task, n)
