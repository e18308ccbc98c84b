"""How much memory a rank and its optimizer take."""

from __future__ import annotations

import resource

import torch
from torch.optim import Optimizer


def peak_bytes(device: torch.device) -> int:
    """Largest memory of this rank so far: allocated on CUDA, resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def optimizer_bytes(optimizer: Optimizer) -> int:
    """Bytes of all tensors in the optimizer's state."""
    return sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )
