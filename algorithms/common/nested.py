"""Nested state (dicts, lists, tuples, numbers, tensors) as flat tensors and one line of JSON.

What `torch.distributed.checkpoint` stores well is tensors under names. The rest of a state dict,
with its integer keys and tuples, becomes JSON, so that nothing has to be unpickled.
"""

from __future__ import annotations

import json
from typing import Any

from torch import Tensor

TENSOR, ITEMS, TUPLE = "$tensor", "$items", "$tuple"


def flatten(state: Any) -> tuple[dict[str, Tensor], str]:
    """The tensors of `state` by name, and JSON that tells where each belongs.

    Raises `TypeError` for a value that is neither plain nor a tensor.
    """
    tensors: dict[str, Tensor] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            name = str(len(tensors))
            tensors[name] = value.detach()
            return {TENSOR: name}
        if isinstance(value, dict):  # as pairs, since keys may be integers
            return {ITEMS: [[key, plain(each)] for key, each in value.items()]}
        if isinstance(value, tuple):
            return {TUPLE: [plain(each) for each in value]}
        if isinstance(value, list):
            return [plain(each) for each in value]
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise TypeError(f"state holds a {type(value).__name__}")

    return tensors, json.dumps(plain(state))


def restore(tensors: dict[str, Tensor], text: str) -> Any:
    """What `flatten` took apart; the tensors are those given, not copies."""

    def whole(value: Any) -> Any:
        if isinstance(value, list):
            return [whole(each) for each in value]
        if not isinstance(value, dict):
            return value
        if TENSOR in value:
            return tensors[value[TENSOR]]
        if TUPLE in value:
            return tuple(whole(each) for each in value[TUPLE])
        return {key: whole(each) for key, each in value[ITEMS]}

    return whole(json.loads(text))
