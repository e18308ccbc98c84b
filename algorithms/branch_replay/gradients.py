"""The parameters' .grad around a step: what was there lies apart until the step has succeeded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def take_gradients(model: Any) -> list[Tensor | None]:
    """The parameters' gradients, which are None afterwards."""
    taken = []
    for parameter in model.parameters():
        taken.append(parameter.grad)
        parameter.grad = None
    return taken


@contextmanager
def whole_step(model: Any) -> Iterator[None]:
    """Add the gradients found inside to .grad; after an exception .grad is what it was before.

    .grad is None inside, so gradients that are there already take their memory a second time.
    """
    parameters = list(model.parameters())
    before = take_gradients(model)
    try:
        yield
    except BaseException:
        for parameter, kept in zip(parameters, before, strict=True):
            parameter.grad = kept
        raise
    with torch.no_grad():
        for parameter, kept in zip(parameters, before, strict=True):
            if kept is not None:  # the same tensor stays: others may hold it
                parameter.grad = kept if parameter.grad is None else kept.add_(parameter.grad)
