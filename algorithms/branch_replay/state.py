"""The cache that a model sees: it counts positions and carries convolution and recurrent states.

Attention's keys never pass through it (`attention.py`). Departs from the library's own layers in
two points: states are assigned, not copied into a static buffer (that breaks autograd), and
convolutions always take the many-token path (the one-token kernels write in place).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionLayer

from algorithms.branch_replay.attention import Run
from algorithms.branch_replay.path import accumulator

Key = tuple[int, str]
"""(layer, "conv" | "recurrent")"""

State = dict[Key, Tensor]
"""What recurrent layers pass on at a node's end, `[prompts, ...]`; `Path` has attention's part."""


class StateLayer(LinearAttentionLayer, DynamicLayer):  # type: ignore[misc]
    """Any layer's cache in one forward: attention, recurrent, or both side by side."""

    def __init__(self, run: Run, layer: int, state: State) -> None:
        DynamicLayer.__init__(self)
        LinearAttentionLayer.__init__(self)
        self.run = run
        self.layer = layer
        self.is_initialized = True
        self.record_past = True  # what makes layers take the many-token path
        for kind, kept in (("conv", self.conv_states), ("recurrent", self.recurrent_states)):
            if (layer, kind) in state:
                kept[0] = state[layer, kind]
                self.has_previous_state[0] = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The new keys and values only: attention finds the older ones by itself."""
        self.run.cached.add(self.layer)
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self.run.start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.run.start + query_length, 0

    def update_conv_state(
        self,
        conv_states: Tensor,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Inputs of the convolution `[batch, channels, tokens]`, those before them in front."""
        past = self.conv_states[state_idx]
        size = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
        full = conv_states if past is None else torch.cat([past, conv_states], dim=-1)
        kept = full[..., -size:]
        self.conv_states[state_idx] = torch.nn.functional.pad(kept, (size - kept.shape[-1], 0))
        self.has_previous_state[state_idx] = True
        self.run.wrote(self.layer, "conv")
        return full

    def update_recurrent_state(
        self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        self.recurrent_states[state_idx] = recurrent_states
        self.has_previous_state[state_idx] = True
        self.run.wrote(self.layer, "recurrent")
        return recurrent_states


def make_cache(run: Run, layers: int, state: State) -> Any:
    """A cache of `layers` layers for one forward that starts from `state`."""
    return Cache(layers=[StateLayer(run, layer, state) for layer in range(layers)])


def read_state(cache: Any) -> State:
    """What the forward left in `cache`."""
    state: State = {}
    for layer in cache.layers:
        for kind, kept in (("conv", layer.conv_states), ("recurrent", layer.recurrent_states)):
            if kept[0] is not None:
                state[layer.layer, kind] = kept[0]
    return state


def leaves(state: State, branches: int, gradient: bool) -> State:
    """A copy of a node's state for each of `branches` of each prompt, the leaves of their graph:
    `[prompts * branches, ...]`."""
    return {
        key: kept.detach().repeat_interleave(branches, 0).requires_grad_(gradient)
        for key, kept in state.items()
    }


def clones(state: State) -> State:
    """What a model is given in place of `state`: it may write in it."""
    return {key: kept.clone() for key, kept in state.items()}


def zero_cotangents(state: State) -> State:
    return {
        key: torch.zeros_like(kept, dtype=accumulator(kept.dtype)) for key, kept in state.items()
    }


def add_cotangents(total: State, given: State) -> None:
    """Add the cotangents that autograd left on the leaves `given` to `total`."""
    for key, leaf in given.items():
        if leaf.grad is not None:
            prompts, *shape = total[key].shape
            by_prompt = leaf.grad.reshape(prompts, -1, *shape)
            total[key] += by_prompt.to(total[key].dtype).sum(1)
