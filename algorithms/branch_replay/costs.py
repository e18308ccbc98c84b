"""FLOPs of an update, for naive sequences, a packed prefix and the modes of replay.

Derivation: docs/branch_replay.md. A multiply-add counts as two FLOPs. Attention's backward is five
products where forward is two (scores are recomputed); without a gradient for the prefix's keys and
values it is three. Weights' backward is two products, one where they are frozen. In prompt tokens
the top layer runs its projections to queries, keys and values only, and those to queries without a
backward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Attention:
    """One layer's."""

    heads: int
    key_dim: int
    value_dim: int
    window: int | None
    top: bool

    def pairs(self, tokens: int, before: int) -> int:
        """Query-key pairs of `tokens` tokens behind `before` others."""
        if self.window is None or before + tokens <= self.window:
            return tokens * before + tokens * (tokens + 1) // 2
        ramp = max(0, self.window - before)  # tokens that see less than the window
        return ramp * before + ramp * (ramp + 1) // 2 + (tokens - ramp) * self.window

    def product(self, pairs: int) -> float:
        """FLOPs of the mean of its two products, scores and values."""
        return pairs * self.heads * float(self.key_dim + self.value_dim)


@dataclass(frozen=True)
class Shape:
    """What costs depend on."""

    weights: float
    """Weights that multiply each token below the top layer, experts by their share."""
    top: float
    """The same in the top layer."""
    top_keys: float
    """Those of the top layer that make queries, keys and values."""
    top_back: float
    """Of these the ones that keys and values depend on: a prompt's queries get no gradient."""
    head: float
    layers: int
    vocabulary: int
    attention: tuple[Attention, ...]
    parameter_bytes: int
    """Of what gets a gradient."""
    graph_bytes: float
    """Autograd keeps, per token of a branch in the trunk."""
    prompt_graph_bytes: float
    """The same of a prompt's token, for which the top layer does not run."""
    kv_bytes: int
    """Keys and values per token, all layers."""
    grad_bytes: int
    """Their cotangents."""
    output_bytes: int
    """What attention gives for a prompt's token, all layers; kept with `keep_attention`."""
    state_bytes: int
    """Recurrent states, whatever the length."""
    item: int
    """Bytes of a value."""
    wide: int
    """Bytes of a value that is summed up."""
    trained: float = 1.0
    """Share of the weights that get a gradient: little with adapters."""


@dataclass(frozen=True)
class Forward:
    """FLOPs of the forward of some tokens, by what their backward costs."""

    products: float = 0.0
    """Of weights."""
    forward_only: float = 0.0
    """Of weights that get no gradient."""
    own: float = 0.0
    """Of attention, to keys with a gradient."""
    constant: float = 0.0
    """Of attention, to keys without."""
    trained: float = 1.0
    """Share of the weights."""

    @property
    def forward(self) -> float:
        return self.products + self.forward_only + self.own + self.constant

    @property
    def backward(self) -> float:
        return (1.0 + self.trained) * self.products + 2.5 * self.own + 1.5 * self.constant

    @property
    def update(self) -> float:
        return self.forward + self.backward


def tokens_forward(
    shape: Shape, tokens: int, before: int, *, scored: bool, constant: int = 0
) -> Forward:
    """`tokens` tokens behind `before` others, of which the first `constant` have no gradient.

    Not `scored`: prompt tokens, for which the top layer stops at its keys and values."""
    weights = shape.weights + (shape.top + shape.head if scored else shape.top_back)
    without = 0.0 if scored else shape.top_keys - shape.top_back
    own = fixed = 0.0
    for layer in shape.attention:
        if layer.top and not scored:
            continue
        pairs = layer.pairs(tokens, before)
        outside = pairs - layer.pairs(tokens, before - constant) if constant else 0
        own += 2 * layer.product(pairs - outside)
        fixed += 2 * layer.product(outside)
    return Forward(2.0 * weights * tokens, 2.0 * without * tokens, own, fixed, shape.trained)


def naive_flops(shape: Shape, prompt: int, responses: list[int]) -> float:
    """Every branch its own sequence, nothing stopped early, the head on responses."""
    total = 0.0
    for n in responses:
        inputs = prompt - 1 + n
        whole = tokens_forward(shape, inputs, 0, scored=True)
        head = 2.0 * shape.head * (inputs - n)  # rows that naive does not score either
        total += replace(whole, products=whole.products - head).update
    return total


def packed_flops(shape: Shape, prompt: int, responses: list[int]) -> float:
    """One prompt and all branches in one graph, as packed kernels do."""
    head = 2.0 * shape.head * (prompt - 1)
    first = tokens_forward(shape, prompt - 1, 0, scored=True)
    branches = [tokens_forward(shape, n, prompt - 1, scored=True) for n in responses]
    prefix = replace(first, products=first.products - head)
    return prefix.update + sum(b.update for b in branches)


def replay_flops(
    shape: Shape,
    prompt: int,
    responses: list[int],
    *,
    open_tokens: int,
    passes: int = 2,
    keep_attention: bool = False,
) -> float:
    """Branch replay; the gradient passes through the last `open_tokens` of the prompt: all of
    them in `exact`, none in `response_only`. `passes` 1: a loss per branch. `keep_attention`: the
    sweep runs the forward of weights only."""
    inputs = prompt - 1
    open_tokens = min(open_tokens, inputs)
    closed = inputs - open_tokens
    total = tokens_forward(shape, inputs, 0, scored=False).forward
    if open_tokens:
        swept = tokens_forward(shape, open_tokens, closed, scored=False)
        total += swept.update - (swept.own if keep_attention else 0.0)
    constant = 0 if open_tokens else inputs  # with any open token, all keys get a gradient
    for n in responses:
        branch = tokens_forward(shape, n, inputs, scored=True, constant=constant)
        total += branch.update + (passes - 1) * branch.forward
    return total
