"""Runs jobs in worker processes of one thread each, and keeps every result on disk.

A result is a file named by the job's key, written when the run ends: what was interrupted goes on
where it was, and a second call finds everything.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch

from algorithms.common.files import read_json, write_json
from benchmarks.report import cores
from benchmarks.study.code import code_hash
from tasks.prctl import die_with_parent

Result = dict[str, Any]
"""Plain values."""


class Job(Protocol):
    """One run: it and the code decide the result."""

    def key(self, code: str, /) -> str:
        """Names the file of the result; `code` is a hash of what computes it."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, kept with the result for people."""

    def line(self, result: Result, /) -> str:
        """Itself and its result in a line."""


J = TypeVar("J", bound=Job)


class Results(Generic[J]):
    """Results by job, in memory and below `folder`."""

    def __init__(self, folder: Path, train: Callable[[J, Path], Result]) -> None:
        """`train`, at the top level of its module, runs a job on the streams in a file."""
        self.folder = folder
        self.train = train
        self.code = code_hash(train.__module__)
        self.known: dict[str, Result] = {}

    def find(self, job: J) -> Result | None:
        """The result of a run, None if it has not ended."""
        key = job.key(self.code)
        path = self._path(key)
        if key not in self.known and path.is_file():
            self.known[key] = read_json(path)
        return self.known.get(key)

    def keep(self, job: J, result: Result) -> None:
        """Remember the result of a run that ended."""
        key = job.key(self.code)
        write_json(self._path(key), {"job": job.to_dict(), **result})
        self.known[key] = result

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"


def run_jobs(jobs: Callable[[], Sequence[J]], tokens: Path, results: Results[J]) -> None:
    """Run what `jobs()` asks for until it asks for nothing new; prints a line a run.

    Two runs at a time, one on a single core. Raises what a run raises.
    """
    begun = time.perf_counter()
    running: dict[str, tuple[J, Future[Result]]] = {}
    done, processes = 0, min(2, cores())
    with ProcessPoolExecutor(
        processes,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start,
        initargs=(os.getpid(),),
    ) as pool:
        while True:
            wanted = {job.key(results.code): job for job in jobs()}
            unfinished = {k: j for k, j in wanted.items() if results.find(j) is None}
            for key, job in unfinished.items():
                if key not in running and len(running) < processes:
                    running[key] = (job, pool.submit(results.train, job, tokens))
            if not running:
                return
            wait([future for _, future in running.values()], return_when=FIRST_COMPLETED)
            for key in [key for key, (_, future) in running.items() if future.done()]:
                job, future = running.pop(key)
                results.keep(job, future.result())
                done += 1
                minutes = (time.perf_counter() - begun) / 60
                so_far = f"{minutes:5.1f} min  {done} done, {len(unfinished) - 1} known to follow"
                print(f"{so_far}  {job.line(future.result())}", flush=True)


def _start(parent: int) -> None:
    die_with_parent(parent)
    torch.set_num_threads(1)
