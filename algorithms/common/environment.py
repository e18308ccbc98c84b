"""What a run ran on: recorded in env.json, so that numbers can be compared or kept apart."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch
import transformers

from algorithms.common.comm import Comm
from algorithms.common.errors import InputError


def describe(comm: Comm) -> dict[str, Any]:
    """Versions, devices and ranks. `oversubscribed`: more ranks than cores or devices.

    Times of an oversubscribed run say nothing about the method and are kept out of comparisons.
    """
    on_gpu = comm.device.type == "cuda"
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cores = len(os.sched_getaffinity(0))
    available = torch.cuda.device_count() if on_gpu else cores
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name(comm.device) if on_gpu else "cpu",
        "backend": comm.backend,
        "world_size": comm.world_size,
        "cores": cores,
        "threads": torch.get_num_threads(),
        "oversubscribed": per_node * (1 if on_gpu else torch.get_num_threads()) > available,
    }


def check_precision(precision: str, device: torch.device) -> None:
    """Raise `InputError` where bf16 autocast is asked of a device without it."""
    if precision == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        name = torch.cuda.get_device_name(device)
        raise InputError(f"training.precision: bf16 is not supported by {name}")
