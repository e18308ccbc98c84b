"""A step of the peer PrefixGrouper (arXiv 2506.05433) on a model of `transformers`.

Prompt and responses are one sequence; in each layer its package attends to the prompt once, then
copies the prompt's keys and values in front of every response's own. Its adapter for the library
(`utils/register_transformers.py`) hands the two calls to a registered attention function, by
default FlashAttention 2, which no CPU runs. Here they go to SDPA: causal for the prompt, with a
dense mask for responses. The head runs on response positions only, as ours does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from prefix_grouper import PrefixGrouper
from prefix_grouper.forward import AttentionForward
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.groups import Group, log_probs_of

ADAPTER = "prefix_grouper_adapter"
"""The library's own SDPA function, called as the package's adapter calls one."""
DIRECT = "prefix_grouper_direct"
"""torch's SDPA with grouped heads, its mask made once."""


def prefix_grouper_step(model: Any, group: Group, way: str) -> None:
    """Add the gradient of the group's loss to .grad; `way`: ADAPTER or DIRECT."""
    lengths = [len(response) for response in group.responses]
    grouper = PrefixGrouper([[len(group.prompt), *lengths]], padding_mode="right")
    # A single group needs no padding, so this is what the package's `concat_input` returns.
    inputs = torch.cat([group.prompt, *group.responses])
    start = torch.arange(len(group.prompt))
    positions = [start, *(len(group.prompt) + torch.arange(n) for n in lengths)]
    before = model.config._attn_implementation
    model.set_attn_implementation(way)
    try:
        output = model.base_model(
            input_ids=inputs[None],
            position_ids=torch.cat(positions)[None],
            use_cache=False,
            prefix_grouper=grouper,
        )
    finally:
        model.set_attn_implementation(before)
    split = grouper.split_output(output.last_hidden_state, include_prefix_last=1)
    logits = model.get_output_embeddings()(split[2][:, :-1])
    log_probs = log_probs_of(logits, torch.stack(group.responses))
    torch.autograd.backward([group.loss(list(log_probs))])


def _register(name: str, call: Callable[..., Tensor]) -> None:
    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        prefix_grouper: PrefixGrouper,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        forward = AttentionForward(call)
        return forward(prefix_grouper, query, key, value, module, **kwargs), None

    AttentionInterface.register(name, attend)


def _adapter(
    query: Tensor, key: Tensor, value: Tensor, padding: Tensor, module: nn.Module, **kwargs: Any
) -> Tensor:
    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
    out: Tensor = attend(module, query, key, value, _visible(query, key), **kwargs)[0]
    return out


def _direct(
    query: Tensor, key: Tensor, value: Tensor, padding: Tensor, module: nn.Module, **kwargs: Any
) -> Tensor:
    visible = _visible(query, key)
    out = nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=None if visible is None else _added(visible, query.dtype),
        is_causal=visible is None,
        scale=kwargs["scaling"],
        enable_gqa=True,
    )
    return out.transpose(1, 2)


def _visible(query: Tensor, key: Tensor) -> Tensor | None:
    """Which keys each query sees [1, 1, queries, keys]; None for the prompt, where it is causal."""
    queries, keys = query.shape[2], key.shape[2]
    return None if queries == keys else _bottom_right(queries, keys)


@lru_cache
def _bottom_right(queries: int, keys: int) -> Tensor:
    return torch.ones(1, 1, queries, keys, dtype=torch.bool).tril(keys - queries)


@lru_cache
def _added(visible: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, -torch.inf)


_register(ADAPTER, _adapter)
_register(DIRECT, _direct)
