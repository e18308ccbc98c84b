"""Search for a learning rate on a grid: outwards until the best has a worse one on each side."""

from __future__ import annotations

from collections.abc import Callable

from algorithms.common.errors import InputError

Losses = Callable[[int], float | None]
"""Index into the grid -> what is to be small, infinite where a run diverged, None if not known."""


def tried(name: str, start: int, size: int, losses: Losses) -> range:
    """The neighbouring indices that the search has to know by now.

    It begins with `start` and its two neighbours. Raises `InputError` about `name` where it would
    leave the grid of `size` rates.
    """
    low, high = start - 1, start + 1
    while True:
        if low < 0 or high >= size:
            raise InputError(f"{name}: the best learning rate is at the edge of the grid")
        found = [losses(index) for index in range(low, high + 1)]
        known = [loss for loss in found if loss is not None]
        if len(known) < len(found):
            return range(low, high + 1)
        best = found.index(min(known))
        if 0 < best < len(found) - 1:
            return range(low, high + 1)
        low, high = (low - 1, high) if best == 0 else (low, high + 1)


def best(name: str, start: int, size: int, losses: Losses) -> int | None:
    """Index of the best rate, None while the search goes on."""
    indices = tried(name, start, size, losses)
    found = [losses(index) for index in indices]
    known = [loss for loss in found if loss is not None]
    return None if len(known) < len(found) else indices[found.index(min(known))]
