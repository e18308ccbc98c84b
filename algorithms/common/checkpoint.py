"""Resumable state, written by `torch.distributed.checkpoint`: whole or absent, last K kept.

A checkpoint is written to a temporary folder, sealed with the sizes of its files, and renamed by
rank 0 after all ranks are done. One that is truncated or unreadable is passed over, with a warning,
for the one before. Transfers inside torch.distributed.checkpoint are not metered.
"""

from __future__ import annotations

import json
import logging
import shutil
import warnings
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from algorithms.common.comm import Comm
from algorithms.common.errors import InputError
from algorithms.common.files import read_json, sync_directory, write_json

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
        """Write the state after `step`. `extra` holds plain JSON values, equal on all ranks."""
        final = self.folder / f"step_{step:08d}"
        temporary = self.folder / f".writing_step_{step:08d}"
        if self.comm.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        self.comm.barrier()
        weights, moments = get_state_dict(model, optimizer)
        save(
            {"model": weights, "optimizer": moments, "extra": json.dumps(extra)},
            checkpoint_id=temporary,
            process_group=self.comm.group,
            no_dist=self.comm.group is None,
        )
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

    def load(self, model: nn.Module, optimizer: Optimizer) -> tuple[int, dict[str, Any]]:
        """Restore the newest sound checkpoint in place: its step and `extra`; (0, {}) without one.

        Raises `InputError` when a sound checkpoint does not fit the model.
        """
        step: int = self.comm.broadcast_object(self._newest() if self.comm.rank == 0 else 0, src=0)
        if step == 0:
            return 0, {}
        weights, moments = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": weights, "optimizer": moments, "extra": ""}
        folder = self.folder / f"step_{step:08d}"
        try:
            load(
                state,
                checkpoint_id=folder,
                process_group=self.comm.group,
                no_dist=self.comm.group is None,
            )
        except CheckpointException as error:
            cause = next(iter(error.failures.values()))[0]
            raise InputError(f"{folder}: cannot be loaded: {cause}") from error
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        return step, json.loads(state["extra"])

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
    return None
