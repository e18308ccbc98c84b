"""Runs jobs in worker processes of one thread each, and keeps every result on disk.

A result is a file named by the job's key, written when the run ends: what was interrupted goes on
where it was, and a second call finds everything.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path

import torch

from algorithms.common.files import read_json, write_json
from benchmarks.lordo_study.code import code_hash
from benchmarks.lordo_study.search import Lookup
from benchmarks.lordo_study.setting import Job
from benchmarks.lordo_study.training import Result, train
from benchmarks.report import cores
from tasks.prctl import die_with_parent

TRAINING = "benchmarks.lordo_study.training"


class Results:
    """Results by job, in memory and below `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.code = code_hash(TRAINING)
        self.known: dict[str, Result] = {}

    def find(self, job: Job) -> Result | None:
        key = job.key(self.code)
        path = self._path(key)
        if key not in self.known and path.is_file():
            self.known[key] = read_json(path)
        return self.known.get(key)

    def keep(self, job: Job, result: Result) -> None:
        key = job.key(self.code)
        write_json(self._path(key), {"job": job.to_dict(), **result})
        self.known[key] = result

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"


def run_jobs(jobs: Callable[[Lookup], list[Job]], tokens: Path, results: Results) -> None:
    """Run what `jobs(lookup)` asks for until it asks for nothing new; prints a line a run.

    Two runs at a time, one on a single core. Raises what a run raises.
    """
    begun = time.perf_counter()
    running: dict[str, tuple[Job, Future[Result]]] = {}
    done, processes = 0, min(2, cores())
    with ProcessPoolExecutor(
        processes,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start,
        initargs=(os.getpid(),),
    ) as pool:
        while True:
            wanted = {job.key(results.code): job for job in jobs(results.find)}
            unfinished = {k: j for k, j in wanted.items() if results.find(j) is None}
            for key, job in unfinished.items():
                if key not in running and len(running) < processes:
                    running[key] = (job, pool.submit(train, job, tokens))
            if not running:
                return
            wait([future for _, future in running.values()], return_when=FIRST_COMPLETED)
            for key in [key for key, (_, future) in running.items() if future.done()]:
                job, future = running.pop(key)
                results.keep(job, future.result())
                done += 1
                minutes = (time.perf_counter() - begun) / 60
                print(_line(job, future.result(), done, len(unfinished) - 1, minutes), flush=True)


def _start(parent: int) -> None:
    die_with_parent(parent)
    torch.set_num_threads(1)


def _line(job: Job, result: Result, done: int, waiting: int, minutes: float) -> str:
    shown = [result[f"{split}_perplexity"] for split in ("validation", "test")]
    validation, test = ("diverged" if x is None else f"{x:.3f}" for x in shown)
    return (
        f"{minutes:5.1f} min  {done} done, {waiting} known to follow  {job.name}"
        f"  lr {job.arm.optimizer.lr:g}  seed {job.seed}  validation {validation}"
        f"  test {test}  {result['seconds']:.0f} s"
    )
