"""Rows that are sampled behind captured prompts, a token at a time and each of its own length.

A prompt's keys and values are those of `Path`, seen by all of its rows and copied for none: heads
of a group and rows are the queries of one product with them. A row owns the keys and values of what
it was fed since. A row that ends makes room for the next branch, so rows differ in their positions.
Prompts have equally many rows, which follow each other.
Scores of a token are dense, [rows, heads, positions] for one layer at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from algorithms.branch_replay.path import Path, accumulator, first_seen

if TYPE_CHECKING:  # it imports the attention function, which imports this
    from algorithms.branch_replay.state import State

FIRST_ROOM = 16


class Rows:
    """What `count` branches of each of `prompts` keep of their own, behind the first `start`
    positions of `path`."""

    def __init__(
        self, path: Path, start: int, state: State, prompts: int, count: int, device: Any
    ) -> None:
        self.path = path
        self.start = start
        self.prompt_state = state
        self.prompts = prompts
        self.lengths = torch.zeros(prompts * count, dtype=torch.long, device=device)
        """Inputs behind the prompt, by row."""
        self.longest = 0
        """Of the lengths."""
        self.keys: dict[int, Tensor] = {}
        """[rows, kv_heads, room, dim], by layer."""
        self.values: dict[int, Tensor] = {}
        self.states: State = {key: kept.repeat_interleave(count, 0) for key, kept in state.items()}
        """Of recurrent layers, [rows, ...]."""

    @property
    def positions(self) -> Tensor:
        """Of the next input, int64 [rows, 1]."""
        return self.start + self.lengths[:, None]

    def advance(self, states: State) -> None:
        """Every row has run one input, after which its recurrent states are `states`."""
        self.lengths += 1
        self.longest += 1
        self.states = states

    def restart(self, row: int) -> None:
        """Give the row to another branch, which begins behind the prompt."""
        prompt = row * self.prompts // len(self.lengths)
        self.lengths[row] = 0
        self.longest = int(self.lengths.max())
        for key, kept in self.prompt_state.items():
            self.states[key][row] = kept[prompt]

    def select(self, rows: list[int]) -> None:
        """Drop all other rows."""
        index = torch.tensor(rows, dtype=torch.long, device=self.lengths.device)
        self.lengths = self.lengths[index]
        self.longest = int(self.lengths.max())
        for buffers in (self.keys, self.values):
            for layer, kept in buffers.items():
                buffers[layer] = kept[index]
        self.states = {key: kept[index] for key, kept in self.states.items()}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, settings: dict[str, Any]
    ) -> Tensor:
        """Attention of one token a row to the prompt and to its own; `settings` are the keywords of
        `kernels.shared_prefix_attention.attention`, shapes [rows, heads, 1, dim] as there."""
        own_keys = self._keep(self.keys, layer, key)
        own_values = self._keep(self.values, layer, value)
        rows, heads, _, dim = query.shape
        kv_heads = key.shape[1]
        grouped = query.reshape(rows, kv_heads, heads // kv_heads, dim)
        before = torch.arange(own_keys.shape[2], device=query.device)
        distance = self.lengths[:, None] - before
        scores = [self._scores(grouped @ own_keys.mT, distance, settings)]
        if self.start:
            first = first_seen(self.start, settings["window"])
            behind = torch.arange(first, self.start, device=query.device)
            prefix_keys, prefix_values = (
                buffers[layer][:, first : self.start].to(device=query.device, dtype=query.dtype)
                for buffers in (self.path.keys, self.path.values)
            )
            product = _shared(grouped, prefix_keys.mT, self.prompts)
            scores.append(self._scores(product, self.positions - behind, settings))
        if settings["sinks"] is not None:
            sinks = settings["sinks"].reshape(1, kv_heads, -1, 1).to(scores[0].dtype)
            scores.append(sinks.expand(rows, -1, -1, -1))
        weights = torch.cat(scores, -1).softmax(-1).to(value.dtype)
        own = own_keys.shape[2]
        out = weights[..., :own] @ own_values
        if self.start:
            seen = weights[..., own : own + len(behind)]
            out = out + _shared(seen, prefix_values, self.prompts)
        return out.reshape(rows, heads, 1, value.shape[3])

    def _scores(self, product: Tensor, distance: Tensor, settings: dict[str, Any]) -> Tensor:
        """Of `product` [rows, kv_heads, group, keys], -inf where a key is ahead by `distance`
        [rows, keys] or out of the window."""
        scores: Tensor = product.to(accumulator(product.dtype)) * settings["scale"]
        if settings["softcap"] is not None:
            scores = settings["softcap"] * (scores / settings["softcap"]).tanh()
        seen = distance >= 0
        if settings["window"] is not None:
            seen &= distance < settings["window"]
        return scores.masked_fill(~seen[:, None, None, :], float("-inf"))

    def _keep(self, buffers: dict[int, Tensor], layer: int, new: Tensor) -> Tensor:
        """Write `new` [rows, kv_heads, 1, dim] at each row's length; all of use so far."""
        used = self.longest + 1
        held = buffers.get(layer)
        if held is None or held.shape[2] < used:
            room = max(FIRST_ROOM, 2 * used)
            grown = new.new_zeros(new.shape[0], new.shape[1], room, new.shape[3])
            if held is not None:
                grown[:, :, : held.shape[2]] = held
            held = buffers[layer] = grown
        held[torch.arange(len(new), device=new.device), :, self.lengths] = new[:, :, 0]
        return held[:, :, :used]


def _shared(rows: Tensor, matrix: Tensor, prompts: int) -> Tensor:
    """`rows` [rows, kv_heads, group, n] times the one `matrix` of all rows of a prompt, which is
    [prompts * kv_heads, n, m]."""
    count, kv_heads, group, n = rows.shape
    by_prompt = rows.reshape(prompts, -1, kv_heads, group, n).transpose(1, 2)
    product = by_prompt.reshape(prompts * kv_heads, -1, n) @ matrix
    parts = product.view(prompts, kv_heads, count // prompts, group, -1)
    return parts.transpose(1, 2).reshape(count, kv_heads, group, -1)
