"""The slow twin: every branch is its own full sequence, with the model's own attention.

Nothing is shared, padded, chunked or replayed. What `replay.py` computes must equal this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from algorithms.branch_replay.config import RolloutConfig
from algorithms.branch_replay.moe import Routing
from algorithms.branch_replay.sampling import uniform
from algorithms.branch_replay.tree import Node, group

Branches = list[Tensor]


def branches(model: Any, tree: Node, window: int | None = None, value_head: Any = None) -> Branches:
    """Log-probabilities, with their graph, of the scored tokens on the path to each leaf; with a
    `value_head` values in a second column."""
    return [_log_probs(model, path, window, value_head) for path in _paths(tree) if len(path) > 1]


def step(
    model: Any,
    prompt: Tensor,
    responses: Sequence[Tensor | Node],
    loss_fn: Callable[[Branches], Tensor],
    value_head: Any = None,
) -> tuple[float, Branches]:
    """Add the gradient of `loss_fn` to .grad; the loss and the log-probabilities [tokens]."""
    tree = group(prompt, responses)
    loss, log_probs, _ = step_trees(
        model, [tree], lambda trees: loss_fn(trees[0]), value_head=value_head
    )
    return loss, log_probs[0]


def step_trees(
    model: Any,
    trees: Sequence[Node],
    loss_fn: Callable[[list[Branches]], Tensor],
    *,
    aux_loss: float = 0.0,
    window: int | None = None,
    value_head: Any = None,
) -> tuple[float, list[Branches], float]:
    """The same for several trees. `aux_loss`: coefficient of the load-balancing loss; `window`:
    imposed on every attention layer. Returned are the loss, the log-probabilities of each tree, and
    the load-balancing loss."""
    routing = Routing(model)
    logits: list[Tensor] = []
    hooks = [
        router.register_forward_hook(lambda _, __, output: logits.append(output[0]))
        for router in routing.routers
    ]
    log_probs = [branches(model, tree, window, value_head) for tree in trees]
    for hook in hooks:
        hook.remove()
    loss = total = loss_fn(log_probs)
    balance = _load_balancing(logits, routing.top_k) if aux_loss else torch.zeros(())
    if aux_loss:
        total = loss + aux_loss * balance
    if total.requires_grad:
        total.backward()  # type: ignore[no-untyped-call]
    detached = [[b.detach() for b in tree] for tree in log_probs]
    return float(loss.detach()), detached, float(balance.detach())


def sample(
    model: Any, prompt: Tensor, seed: int, config: RolloutConfig, eos: Collection[int]
) -> tuple[list[int], list[float], bool]:
    """A response to `prompt` int64 [tokens], which is run anew with all that followed for every
    token: its tokens, their log-probabilities, whether it was cut off at `max_tokens`."""
    tokens, log_probs = prompt, []
    for place in range(config.max_tokens):
        with torch.no_grad():
            logits = model(input_ids=tokens[None], use_cache=False).logits[0, -1].double()
        token = _draw(logits.tolist(), uniform(seed, place), config)
        log_probs.append(float(logits.log_softmax(-1)[token]))
        tokens = torch.cat([tokens, tokens.new_tensor([token])])
        if token in eos:
            return tokens[len(prompt) :].tolist(), log_probs, False
    return tokens[len(prompt) :].tolist(), log_probs, True


def _draw(logits: list[float], u: float, config: RolloutConfig) -> int:
    """Where u falls among the probabilities laid end to end: by vocabulary, or the likeliest first
    up to `top_p`."""
    order = list(range(len(logits)))
    if config.top_p < 1 or config.temperature == 0:
        order.sort(key=lambda v: -logits[v])
    if config.temperature == 0:
        return order[0]
    weights = [math.exp((logits[v] - max(logits)) / config.temperature) for v in order]
    total = sum(weights)
    kept = len(order)
    while config.top_p < 1 and kept > 1 and sum(weights[: kept - 1]) / total >= config.top_p:
        kept -= 1
    left = u * sum(weights[:kept])
    for v, weight in zip(order, weights[:kept], strict=False):
        left -= weight
        if left < 0:
            return v
    return order[kept - 1]


def _load_balancing(logits: list[Tensor], top_k: int) -> Tensor:
    """E * sum_e f_e * p_e over all layers and tokens (2101.03961, eq. 4-6)."""
    weights = torch.cat(logits).softmax(-1)
    chosen = torch.zeros_like(weights).scatter_(-1, weights.topk(top_k, dim=-1).indices, 1.0)
    return weights.shape[-1] * (chosen.mean(0) * weights.mean(0)).sum()


def _paths(node: Node) -> list[list[Node]]:
    if not node.children:
        return [[node]]
    return [
        [node if child.behind is None else Node(node.tokens[child.behind], scored=False), *path]
        for child in node.children
        for path in _paths(child)
    ]


def _log_probs(model: Any, path: list[Node], window: int | None, value_head: Any) -> Tensor:
    tokens = torch.cat([node.tokens for node in path])
    scored = torch.cat([torch.full((len(node.tokens),), node.scored) for node in path])[1:]
    weight: Tensor = model.get_input_embeddings().weight
    inputs = tokens[None, :-1]
    if inputs.numel() == 0:
        return weight.new_zeros(0 if value_head is None else (0, 2))
    mask = None if window is None else _window_mask(inputs.shape[1], window, weight)
    logits = model(input_ids=inputs, attention_mask=mask, use_cache=False).logits[0]
    logits = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32)
    log_probs: Tensor = logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
    if value_head is not None:
        hidden = model.base_model(input_ids=inputs, attention_mask=mask, use_cache=False)
        values = value_head(hidden.last_hidden_state[0].to(value_head.weight.dtype))[:, 0]
        log_probs = torch.stack([log_probs, values.to(log_probs.dtype)], -1)
    return log_probs[scored.to(log_probs.device)]


def _window_mask(tokens: int, window: int, like: Tensor) -> Tensor:
    """What the library adds to scores [1, 1, tokens, tokens]."""
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    outside = ((distance < 0) | (distance >= window)).to(like.device)
    return torch.zeros_like(outside, dtype=like.dtype).masked_fill_(
        outside, torch.finfo(like.dtype).min
    )[None, None]
