"""Ranks for benchmarks: processes of one thread each that form a gloo group on this machine."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from algorithms.common.comm import Comm


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> Any:
    """Call `function(comm, *args)` on `world_size` ranks; returns rank 0's result, picklable.

    `function` is at the top level of a module. A rank that fails ends the others, and raises
    `torch.multiprocessing.ProcessRaisedException` with its traceback.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        spawn(_rank, (function, world_size, folder, args), nprocs=world_size)  # type: ignore[no-untyped-call]
        return pickle.loads((Path(folder) / "result").read_bytes())


def _rank(
    rank: int, function: Callable[..., Any], world_size: int, folder: str, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    try:
        result = function(Comm(dist.group.WORLD, torch.device("cpu")), *args)
    finally:
        dist.destroy_process_group()
    if rank == 0:
        (Path(folder) / "result").write_bytes(pickle.dumps(result))
