"""The seam to `transformers`: an attention function that finds the prefix by layer index.

Keys and values are taken where they enter attention, after every transformation of the model
(rotary embedding, expansion of MLA's latents), and kept in `Path`. The cache that the model sees
(`state.py`) only counts positions. So one function serves every family whose layers call the
attention interface; `Run.check` raises for a layer that did not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from algorithms.branch_replay.decoding import Rows
from algorithms.branch_replay.errors import SelfCheckError
from algorithms.branch_replay.path import Path
from algorithms.branch_replay.remote import attend_remote
from algorithms.common.errors import InputError
from kernels.shared_prefix_attention import Saved, attention

NAME = "shoestring_branch_replay"

Write = tuple[int, str]
"""What a layer writes in one forward: (layer index, "attention" | "conv" | "recurrent")."""


Outputs = dict[int, Saved]
"""What attention computed in one forward, by layer."""


class TopReached(Exception):
    """The last layer has written its state: nothing above it is needed for prompt tokens."""


@dataclass
class Run:
    """One forward of the trunk behind `start` positions of `path`."""

    path: Path | None
    start: int
    stop: frozenset[Write] = frozenset()
    """Writes of the last layer after which `TopReached` is raised; empty: run to the end."""
    prompts: int = 1
    """That `path` holds; rows of the same prompt follow each other."""
    window: int | None = None
    """Imposed on every layer."""
    rows: Rows | None = None
    """Branches that are sampled: each is given one token, behind what it keeps of its own."""
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    windows: dict[int, int | None] = field(default_factory=dict)
    heads: dict[int, int] = field(default_factory=dict)
    """Of queries."""
    outputs: Outputs | None = None
    """Kept here, or if there are any, taken from here; None: neither."""
    written: set[Write] = field(default_factory=set)
    cached: set[int] = field(default_factory=set)
    """Layers that handed their keys to the cache."""
    consumed: int = 0
    """Attention calls that saw the whole prefix."""
    stopped: bool = False
    over: bool = False
    """The forward has ended: whoever calls attention now is recomputing in backward."""

    def wrote(self, layer: int, kind: str) -> None:
        self.written.add((layer, kind))
        if self.stop and self.stop <= self.written:
            self.stopped = True
            raise TopReached

    def check(self, layers: set[int]) -> None:
        """Raise `SelfCheckError` unless every attention layer of `layers` saw its prefix."""
        missing = (layers | self.cached) - set(self.keys)
        above = {layer for layer, _ in self.stop} if self.stopped else set()
        expected = len(layers - above)
        if missing or self.consumed != expected:
            raise SelfCheckError(
                f"{self.consumed} of {expected} attention layers used their prefix of {self.start} "
                f"tokens; without keys: {sorted(missing)}"
            )


_current: Run | None = None  # backward may run in another thread, so no context variable


@contextmanager
def running(run: Run) -> Iterator[Run]:
    """Make `run` the one that the layers' calls belong to, its backward included."""
    global _current
    if _current is not None:
        raise RuntimeError("a replay inside a replay")
    _current = run
    try:
        yield run
    finally:
        _current = None


@contextmanager
def our_attention(model: Any) -> Iterator[None]:
    """Let all layers of `model` use our attention function; what was set before comes back."""
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """See `transformers.AttentionInterface`; query [batch, heads, tokens, head_dim]."""
    run = _current
    if run is None or run.over:
        raise SelfCheckError(
            "attention was called outside a replay's forward: by gradient checkpointing of a layer "
            "(turn it off, it would corrupt the gradient) or by a loss that calls the model"
        )
    _refuse(module, attention_mask, dropout, sliding_window, kwargs)
    layer: int = module.layer_idx  # type: ignore[assignment]
    if layer in run.keys:
        raise SelfCheckError(f"layer {layer} called attention twice in one forward")
    window = min((w for w in (run.window, sliding_window) if w), default=None)
    run.keys[layer], run.values[layer] = key, value
    run.windows[layer], run.heads[layer] = window, query.shape[1]
    run.wrote(layer, "attention")
    settings: dict[str, Any] = {
        "scale": query.shape[-1] ** -0.5 if scaling is None else scaling,
        "window": window,
        "softcap": softcap,
        "sinks": s_aux,
    }
    if run.rows is not None:
        out = run.rows.attend(layer, query, key, value, settings)
    elif run.start > 0 and run.prompts > 1:
        if s_aux is not None:
            settings["sinks"] = s_aux.repeat(run.prompts)
        query, key, value = (_fold(each, run.prompts) for each in (query, key, value))
        out = _unfold(_behind(run, layer, query, key, value, settings), run.prompts)
    else:
        out = _behind(run, layer, query, key, value, settings)
    run.consumed += 1
    return out.transpose(1, 2).contiguous(), None


def _behind(
    run: Run, layer: int, query: Tensor, key: Tensor, value: Tensor, settings: dict[str, Any]
) -> Tensor:
    """Attention to the prefix that `run` has, if it has one, and to the own keys."""
    path = run.path if run.start > 0 else None
    if path is not None and path.remote:
        return attend_remote(query, key, value, path, layer, run.start, settings)
    prefix = None if path is None else path.prefix(layer, run.start, settings["window"])
    saved = None if run.outputs is None else run.outputs.setdefault(layer, Saved())
    return attention(query, key, value, prefix, saved=saved, **settings)


def _fold(rows: Tensor, prompts: int) -> Tensor:
    """[prompts * rows, heads, tokens, dim] -> [rows, prompts * heads, tokens, dim]: prompts become
    heads, each with its own prefix, so a kernel for one prefix serves all."""
    return rows.reshape(prompts, -1, *rows.shape[1:]).transpose(0, 1).flatten(1, 2)


def _unfold(rows: Tensor, prompts: int) -> Tensor:
    """Back."""
    count, heads, *shape = rows.shape
    by_prompt = rows.reshape(count, prompts, heads // prompts, *shape)
    return by_prompt.transpose(0, 1).flatten(0, 1)


def _refuse(
    module: nn.Module,
    mask: Tensor | None,
    dropout: float,
    window: int | None,
    kwargs: dict[str, Any],
) -> None:
    if dropout:
        raise InputError(f"attention dropout of {dropout}: replay needs equal passes, set it to 0")
    if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
        raise InputError("attention that is not causal cannot be replayed")
    for name in ("position_bias", "head_mask"):
        if kwargs.get(name) is not None:
            raise InputError(f"attention with {name} cannot be replayed")
    if mask is not None and (mask.numel() != 1 or int(mask) != (window or 0)):
        raise InputError(
            "the model masks attention in a way that it does not tell the attention function"
        )


def _mask(
    *,
    q_length: int,
    kv_length: int,
    q_offset: int,
    kv_offset: int,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    **_: Any,
) -> Tensor:
    """In place of a mask the window's size [1, 1, 1, 1] (0: none), for `_refuse` to compare.

    Raises `InputError` for a padding mask and for anything but causal or sliding-window attention.
    """
    if attention_mask is not None and not bool(attention_mask.all()):
        raise InputError("a padding mask: give prompts and responses without padding")
    window = local_size or 0
    # The mask as the model means it, on a few rows and columns.
    rows = torch.tensor(sorted({0, q_length // 2, q_length - 1})) + q_offset
    columns = torch.linspace(0, kv_length - 1, min(kv_length, 64)).long()
    distance = rows[:, None] - (columns + kv_offset)[None, :]
    wanted = (distance >= 0) & ((distance < window) if window else True)
    zero = torch.zeros((), dtype=torch.long)
    meant = mask_function(zero, zero, rows[:, None], (columns + kv_offset)[None, :])
    if use_vmap or not torch.equal(torch.as_tensor(meant).expand_as(wanted), wanted):
        raise InputError("the model's attention mask is neither causal nor a sliding window")
    return torch.full((1, 1, 1, 1), window)


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _mask)
