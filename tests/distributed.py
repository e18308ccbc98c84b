"""One warm pool of four gloo ranks for a whole pytest run.

A test calls `ranks.run(fn, *args, world_size=2)`; `fn(comm, *args)`, a function at the top level of
a module, runs in `world_size` processes that form a group of their own, and the results come back
in rank order. The processes start at the first use, import torch once and stay, so a run costs
about a millisecond. They have one thread each and a fixed torch seed at the start of every run.

A function that raises makes `run` raise `RankError` with the remote traceback; the next run gets
fresh groups, free of messages that nobody received. A rank that dies or hangs does so too, and the
next run gets fresh processes.

Workers find `fn` by file and name, because under pytest's import mode `importlib` test modules
cannot be imported by name. This module imports no torch: most tests that load it need none.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

WORLD = 4
GRACE_SECONDS = 2.0
"""How long the other ranks may go on once one has failed: they may be waiting for it for ever."""


class RankError(Exception):
    """A function failed on a rank. `kind` is the class of the remote exception, or died or hung."""

    def __init__(self, rank: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.kind = kind


@dataclass
class _Task:
    """What a worker needs to run a function; arguments stay pickled until its module is loaded."""

    module: str
    file: str
    name: str
    arguments: bytes
    world_size: int
    generation: int


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection


class RankPool:
    """Four worker processes; see the module docstring. Use as the fixture `ranks`."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._folder: str | None = None
        self._generation = 0

    def run(
        self, fn: Callable[..., Any], *args: Any, world_size: int = WORLD, timeout: float = 600
    ) -> list[Any]:
        """Results of `fn(comm, *args)` by rank. Raises `RankError` naming the rank that failed."""
        assert 1 <= world_size <= WORLD, f"world_size must be in [1, {WORLD}]"
        task = _task(fn, args, world_size, self._generation)
        if not all(worker.process.is_alive() for worker in self._workers):
            self.close()
        if not self._workers:
            self._start()
        for worker in self._workers:
            worker.connection.send(task)
        return self._collect(fn.__qualname__, world_size, timeout)

    def close(self) -> None:
        """Kill all workers; the next run starts new ones."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.connection.close()
        self._workers = []
        if self._folder is not None:
            shutil.rmtree(self._folder)
            self._folder = None

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.mkdtemp(prefix="ranks-")
        for rank in range(WORLD):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs, self._folder), daemon=True)
            process.start()
            theirs.close()
            self._workers.append(_Worker(process, ours))

    def _collect(self, name: str, world_size: int, timeout: float) -> list[Any]:
        """Wait for every rank's answer; after a failure only `GRACE_SECONDS` longer."""
        deadline = time.monotonic() + timeout
        waiting = {self._workers[rank].connection: rank for rank in range(world_size)}
        results: list[Any] = [None] * world_size
        failures: list[RankError] = []
        died = False
        while waiting and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(waiting), left):
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                where = f"rank {rank} of {world_size}, {name}"
                try:
                    succeeded, kind, answer = connection.recv()
                except (EOFError, ConnectionResetError):
                    self._workers[rank].process.join()
                    code = self._workers[rank].process.exitcode
                    failures.append(RankError(rank, "died", f"{where}: died with exit code {code}"))
                    died = True
                else:
                    if succeeded:
                        results[rank] = pickle.loads(answer)
                    else:
                        failures.append(RankError(rank, kind, f"{where}: {answer}"))
                if failures:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if waiting and not failures:
            late = ", ".join(map(str, waiting.values()))
            message = f"rank {late} of {world_size}, {name}: hung, no answer in {timeout:g} s"
            failures.append(RankError(min(waiting.values()), "hung", message))
            self._print_stacks(list(waiting.values()))
        if waiting or died:
            self.close()
        if failures:
            self._generation += 1
            for other in failures[1:]:
                failures[0].add_note(f"also {other}")
            raise failures[0]
        return results

    def _print_stacks(self, late: list[int]) -> None:
        """Let hung workers write to stderr where they are; pytest shows it with the failure."""
        for rank in late:
            pid = self._workers[rank].process.pid
            assert pid is not None
            os.kill(pid, signal.SIGUSR1)
        time.sleep(0.5)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """The warm pool. Nothing starts before the first `run`, nothing is left at the end."""
    pool = RankPool()
    yield pool
    pool.close()


def _task(fn: Callable[..., Any], args: Any, world_size: int, generation: int) -> _Task:
    if "<" in fn.__qualname__:
        raise ValueError(f"{fn.__qualname__}: must be at the top level of its module")
    file = inspect.getfile(fn)
    return _Task(fn.__module__, file, fn.__qualname__, pickle.dumps(args), world_size, generation)


def _serve(rank: int, connection: Connection, folder: str) -> None:
    """The life of a worker: run tasks until the pool goes away, however it goes."""
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is pytest's; it closes the pool
    faulthandler.register(signal.SIGUSR1)
    threading.Thread(target=_die_with_parent, args=(folder,), daemon=True).start()
    import torch
    import torch.distributed as dist

    from algorithms.common.comm import Comm

    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD)
    generation, groups = -1, list[Any]()
    while True:
        task: _Task = connection.recv()
        if task.generation != generation:
            # torch wants all ranks to take part in making a group, also those outside it.
            groups = [dist.new_group(list(range(size))) for size in range(1, WORLD + 1)]
            generation = task.generation
        if rank >= task.world_size:
            continue
        comm = Comm(groups[task.world_size - 1], torch.device("cpu"))
        try:
            function = getattr(_load(task.module, task.file), task.name)
            arguments = pickle.loads(task.arguments)
            torch.manual_seed(0)
            result = pickle.dumps(function(comm, *arguments))
        except Exception as error:
            kind = type(error).__name__
            connection.send((False, kind, f"{kind}: {error}\n\n{traceback.format_exc()}"))
        else:
            connection.send((True, "", result))


def _die_with_parent(folder: str) -> None:
    """A rank may be busy for minutes or wait for another; it must not outlive a killed pytest."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    shutil.rmtree(folder, ignore_errors=True)  # every rank tries
    os._exit(1)


def _load(name: str, file: str) -> Any:
    """The module that pytest knows as `name`; under that name, so that its classes unpickle."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(file))
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]
