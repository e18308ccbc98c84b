"""Resumable state, written by `torch.distributed.checkpoint`: whole or absent, last K kept.

Where all ranks hold the same state it is stored once; where each has its own (weights between two
exchanges, moments), `own` stores one per rank. A checkpoint is written to a temporary folder,
sealed with the sizes of its files, and renamed by rank 0 after all ranks are done. One that is
truncated or unreadable is passed over, with a warning, for the one before. Nothing in one is ever
executed. Transfers inside torch.distributed.checkpoint are not metered.
"""

from __future__ import annotations

import json
import logging
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from algorithms.common.checkpoint_reader import Planner, Reader
from algorithms.common.comm import Comm
from algorithms.common.errors import InputError, disk_error
from algorithms.common.files import read_json, sync_directory, write_json
from algorithms.common.nested import flatten, restore

log = logging.getLogger(__name__)

SEAL = "seal.json"

# A world of one is what was asked for.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")


class Checkpoints:
    """The checkpoints of one run, below `folder`; every method is called by all ranks."""

    def __init__(self, folder: Path, keep: int, comm: Comm) -> None:
        self.folder = folder
        self.keep = keep
        self.comm = comm

    def save(
        self, step: int, model: nn.Module, optimizer: Optimizer, extra: dict[str, Any]
    ) -> None:
        """Write the state after `step`, equal on all ranks. `extra` holds plain JSON values.

        Raises `InputError` where the disk is full or read-only; what is there stays.
        """
        weights, moments = get_state_dict(model, optimizer)
        self._write(step, {"model": weights, "optimizer": moments, "extra": json.dumps(extra)})

    def save_own(self, step: int, own: dict[str, Any], extra: dict[str, Any]) -> None:
        """Write each rank's `own` state after `step`: nested plain values and tensors. `extra` is
        equal on all ranks."""
        tensors, text = flatten(own)
        state: dict[str, Any] = {"extra": json.dumps(extra), self._mine("plain"): text}
        self._write(step, state | {self._mine(name): each for name, each in tensors.items()})

    def load(self, model: nn.Module, optimizer: Optimizer) -> tuple[int, dict[str, Any]]:
        """Restore in place what `save` wrote: the newest sound step and its `extra`; (0, {})
        without one.

        Raises `InputError` when a sound checkpoint does not fit the model.
        """
        step = self._agree_on_newest()
        if step == 0:
            return 0, {}
        weights, moments = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": weights, "optimizer": moments, "extra": ""}
        self._read(step, state)
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        return step, json.loads(state["extra"])

    def peek(self) -> tuple[int, dict[str, Any]]:
        """The newest sound step and its `extra`, without any state; (0, {}) without one."""
        step = self._agree_on_newest()
        if step == 0:
            return 0, {}
        state: dict[str, Any] = {"extra": ""}
        self._read(step, state)
        return step, json.loads(state["extra"])

    def load_own(self, rank: int | None = None) -> tuple[int, dict[str, Any], dict[str, Any]]:
        """What `save_own` wrote: the newest sound step, the state of this rank, or of `rank`, the
        same on all ranks, and `extra`; (0, {}, {}) without one.

        Raises `InputError` when a sound checkpoint holds nothing of that rank.
        """
        rank = self.comm.rank if rank is None else rank
        step = self._agree_on_newest()
        if step == 0:
            return 0, {}, {}
        folder = self._folder(step)
        written = Reader(folder).read_metadata().state_dict_metadata
        if _of(rank, "plain") not in written:
            raise InputError(f"{folder}: holds no state of rank {rank}")
        tensors = {
            name: torch.empty(stored.size, dtype=stored.properties.dtype)
            for name, stored in written.items()
            if name.startswith(_of(rank, "")) and isinstance(stored, TensorStorageMetadata)
        }
        state: dict[str, Any] = {"extra": "", _of(rank, "plain"): "", **tensors}
        self._read(step, state)
        own = {name.removeprefix(_of(rank, "")): each for name, each in tensors.items()}
        return step, restore(own, state[_of(rank, "plain")]), json.loads(state["extra"])

    def _write(self, step: int, state: dict[str, Any]) -> None:
        final = self._folder(step)
        temporary = self.folder / f".writing_{final.name}"
        if self.comm.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        self.comm.barrier()
        try:
            save(
                state,
                checkpoint_id=temporary,
                process_group=self.comm.group,
                no_dist=self.comm.group is None,
            )
        except CheckpointException as error:  # on all ranks
            if self.comm.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            causes = (disk_error(cause, temporary) for cause, _ in error.failures.values())
            raise next(filter(None, causes), error) from error
        self.comm.barrier()
        if self.comm.rank == 0:
            sizes = {file.name: file.stat().st_size for file in temporary.iterdir()}
            write_json(temporary / SEAL, sizes)
            if final.exists():  # an unsound one of this step, passed over when we resumed
                shutil.rmtree(final)
            temporary.rename(final)
            sync_directory(self.folder)
            self._retire()
        self.comm.barrier()

    def _read(self, step: int, state: dict[str, Any]) -> None:
        """Fill `state` in place."""
        folder = self._folder(step)
        try:
            load(
                state,
                storage_reader=Reader(folder),
                planner=Planner(),
                process_group=self.comm.group,
                no_dist=self.comm.group is None,
            )
        except CheckpointException as error:
            cause = next(iter(error.failures.values()))[0]
            raise InputError(f"{folder}: cannot be loaded: {cause}") from error

    def _mine(self, name: str) -> str:
        return _of(self.comm.rank, name)

    def _folder(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}"

    def _agree_on_newest(self) -> int:
        step: int = self.comm.broadcast_object(self._newest() if self.comm.rank == 0 else 0, src=0)
        return step

    def _newest(self) -> int:
        for folder in sorted(self.folder.glob("step_*"), reverse=True):
            reason = _unsound(folder)
            if reason is None:
                return int(folder.name.removeprefix("step_"))
            log.warning("%s is passed over: %s", folder, reason)
        return 0

    def _retire(self) -> None:
        for folder in sorted(self.folder.glob("step_*"))[: -self.keep]:
            shutil.rmtree(folder)


def _of(rank: int, name: str) -> str:
    return f"rank_{rank}.{name}"


def _unsound(folder: Path) -> str | None:
    """Why a checkpoint cannot be trusted, or None."""
    try:
        sizes = read_json(folder / SEAL)
    except (OSError, ValueError):
        return f"{SEAL} is missing or unreadable"
    for name, size in sizes.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} of {size} bytes"
    try:
        Reader(folder).read_metadata()
    except InputError as error:
        return str(error)
    return None
