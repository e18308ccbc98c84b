"""Which decoder layers lie on which stage: by a cost model, or by hand.

A pipeline runs at the pace of its slowest stage, so the cost model makes the largest cost as small
as it gets, and among such partitions takes the most even one, which has the least sum of squares.
Costs are FLOPs of a forward pass per token; a backward costs each stage twice that, or three times
with recomputation. The embedding adds its row to the first stage, the head its product with the
whole vocabulary to the last.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

from torch import nn

from algorithms.common.errors import InputError


def layer_flops(
    layer: nn.Module, config: Any, sequence_length: int, window: int | None = None
) -> int:
    """Forward FLOPs per token of one decoder layer of `transformers` with settings `config`.

    2 per weight of a matrix; of stacked experts `[experts, m, n]` only the chosen ones count. Then
    scores and values of causal attention: of T = `sequence_length` tokens each sees T/2 on average,
    and W - W^2 / 2T with a sliding `window` of W tokens below T.
    """
    flops = 0
    for weight in layer.parameters():
        if weight.ndim == 2:
            flops += 2 * weight.numel()
        elif weight.ndim == 3:
            flops += 2 * weight.numel() * config.num_experts_per_tok // weight.shape[0]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    seen = min(sequence_length, window or sequence_length)
    width: int = config.num_attention_heads * head_dim
    return flops + 2 * width * seen * (2 * sequence_length - seen) // sequence_length


def windows(config: Any) -> list[int | None]:
    """Of each layer, its sliding window; none: its tokens see all before them. Without
    `layer_types` a `sliding_window` is that of all layers."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return [window] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def by_cost(
    layers: list[int], stages: int, *, embedding: int = 0, head: int = 0, name: str = "stages"
) -> list[int]:
    """Number of layers on each of `stages` stages, given the cost of each layer, of the embedding
    (on the first stage) and of the head (on the last).

    Every stage has a layer, but the first may be the embedding alone and the last the head alone,
    where these cost something. Raises `InputError` that begins with `name` for too many stages.
    """
    if stages < 1:
        raise InputError(f"{name}: must be positive, not {stages}")
    first_least, last_least = int(embedding == 0), int(head == 0)
    at_least = [1] * stages
    if stages > 1:
        at_least[0], at_least[-1] = first_least, last_least
    if sum(at_least) > len(layers):
        raise InputError(f"{name}: {len(layers)} layers cannot fill {stages} stages")
    before = [0]
    for cost in layers:
        before.append(before[-1] + cost)

    def cost_of(stage: int, start: int, end: int) -> int:
        extra = embedding * (stage == 0) + head * (stage == stages - 1)
        return before[end] - before[start] + extra

    def least(weigh: Callable[[int, int], int | None]) -> tuple[int, list[int]]:
        """The smallest total and its counts; `weigh` adds a stage of a cost to a total, or says
        that it may not be. Of totals that are alike the first counts in order."""
        # best[end]: of all ways to put the first `end` layers on the stages so far.
        best: dict[int, tuple[int, list[int]]] = {0: (0, [])}
        for stage in range(stages):
            found: dict[int, tuple[int, list[int]]] = {}
            for start, (total, counts) in best.items():
                for end in range(start + at_least[stage], len(layers) + 1):
                    weighed = weigh(total, cost_of(stage, start, end))
                    if weighed is None:
                        continue
                    candidate = (weighed, [*counts, end - start])
                    if end not in found or candidate < found[end]:
                        found[end] = candidate
            best = found
        return best[len(layers)]

    # One after the other: a first part may be the best in both and yet not begin the best whole.
    largest, _ = least(max)
    _, counts = least(lambda total, cost: total + cost**2 if cost <= largest else None)
    return counts


def partition(model: Any, stages: int, sequence_length: int) -> list[int]:
    """`by_cost` for a decoder of `transformers`: layers on each stage.

    Raises `InputError` for too many stages.
    """
    layers, embedding, head = _flops(model, sequence_length)
    return by_cost(layers, stages, embedding=embedding, head=head)


def costs(model: Any, counts: list[int], sequence_length: int) -> list[int]:
    """Forward FLOPs per token of each stage of a decoder with `counts` layers on them."""
    layers, embedding, head = _flops(model, sequence_length)
    ends = list(accumulate(counts))
    found = [sum(layers[end - count : end]) for count, end in zip(counts, ends, strict=True)]
    found[0] += embedding
    found[-1] += head
    return found


def _flops(model: Any, sequence_length: int) -> tuple[list[int], int, int]:
    """Of each layer, the embedding and the head."""
    config = model.config
    layers = [
        layer_flops(layer, config, sequence_length, window)
        for layer, window in zip(model.base_model.layers, windows(config), strict=True)
    ]
    return layers, config.hidden_size, 2 * model.get_output_embeddings().weight.numel()


def by_hand(counts: list[int], layers: int, stages: int, name: str = "layers") -> list[int]:
    """`counts` if they are a partition of `layers` layers into `stages` stages.

    Only the first and last stage may have no layer: they have the embedding and the head. Raises
    `InputError` that begins with `name`.
    """
    if len(counts) != stages:
        raise InputError(f"{name}: {len(counts)} numbers for {stages} stages")
    for stage, count in enumerate(counts):
        if count < (0 if stages > 1 and stage in (0, stages - 1) else 1):
            raise InputError(f"{name}: stage {stage} cannot have {count} layers")
    if sum(counts) != layers:
        raise InputError(f"{name}: sum is {sum(counts)}, the model has {layers} layers")
    return list(counts)
