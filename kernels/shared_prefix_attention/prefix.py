"""The keys and values that all rows of a batch share, and the checks that every twin relies on."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Prefix:
    """Keys and values of a shared prefix, and where their cotangents are summed.

    All four may be views into larger buffers. The tensors stay the caller's: they are not saved for
    autograd, so they must hold the same numbers in forward and backward.
    """

    key: Tensor  # [kv_heads, prefix, head_dim]; prefix may be 0
    value: Tensor  # [kv_heads, prefix, value_dim]
    key_grad: Tensor | None = None  # like key, in `accumulation_dtype`, added to in every backward
    value_grad: Tensor | None = None  # None (both or neither): the prefix gets no gradient

    def __len__(self) -> int:
        return self.key.shape[1]


@dataclass
class Saved:
    """What forward computes, kept for a second call on the same numbers, which then skips it.

    A call fills an empty one and takes its result from a filled one. The twin `reference` does
    neither: it computes every time.
    """

    out: Tensor | None = None  # [batch, heads, tokens, value_dim]
    lse: Tensor | None = None  # [batch, heads, tokens], in `accumulation_dtype`


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """What softmax and gradient sums are kept in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_prefix(key: Tensor, value: Tensor) -> Prefix:
    """A prefix of no tokens that fits the own keys and values `[batch, kv_heads, tokens, dim]`."""
    return Prefix(
        key.new_empty(key.shape[1], 0, key.shape[3]),
        value.new_empty(value.shape[1], 0, value.shape[3]),
    )


def check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prefix: Prefix,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    """Raise ValueError, in one line, for arguments of `attention` that do not fit each other."""
    batch, heads, tokens, head_dim = query.shape
    kv_heads, value_dim = key.shape[1], value.shape[3]
    _check_shape("key", key, (batch, kv_heads, tokens, head_dim))
    _check_shape("value", value, (batch, kv_heads, tokens, value_dim))
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads do not divide into {kv_heads} key heads")
    _check_shape("prefix.key", prefix.key, (kv_heads, len(prefix), head_dim))
    _check_shape("prefix.value", prefix.value, (kv_heads, len(prefix), value_dim))
    tensors = (query, key, value, prefix.key, prefix.value)
    if len({(x.dtype, x.device) for x in tensors}) > 1:
        kinds = ", ".join(f"{x.dtype} on {x.device}" for x in tensors)
        raise ValueError(f"query, key, value and prefix must have one dtype and device: {kinds}")
    if prefix.key.requires_grad or prefix.value.requires_grad:
        raise ValueError("the prefix must be detached: its gradient goes to key_grad, value_grad")
    if (prefix.key_grad is None) != (prefix.value_grad is None):
        raise ValueError("prefix.key_grad and prefix.value_grad: give both or neither")
    for name, grad, like in (
        ("prefix.key_grad", prefix.key_grad, prefix.key),
        ("prefix.value_grad", prefix.value_grad, prefix.value),
    ):
        if grad is None:
            continue
        _check_shape(name, grad, tuple(like.shape))
        if grad.dtype != accumulation_dtype(like.dtype) or grad.device != like.device:
            wanted = f"{accumulation_dtype(like.dtype)} on {like.device}"
            raise ValueError(f"{name} must be {wanted}, not {grad.dtype} on {grad.device}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, not {window}")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap must be positive, not {softcap}")
    if sinks is not None:
        _check_shape("sinks", sinks, (heads,))


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}")
