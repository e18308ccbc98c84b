"""Partitions: the slowest stage is as fast as it can be; what does not fit is said in one line."""

import random
from itertools import combinations, pairwise

import pytest
import torch

from algorithms.async_pipeline.partition import (
    by_cost,
    by_hand,
    costs,
    layer_flops,
    partition,
    windows,
)
from algorithms.common.errors import InputError
from tests.families import tiny


def stage_costs(counts, layers, embedding, head):
    ends = [sum(counts[: k + 1]) for k in range(len(counts))]
    costs = [sum(layers[end - count : end]) for count, end in zip(counts, ends, strict=True)]
    costs[0] += embedding
    costs[-1] += head
    return costs


def slowest(*cut):
    return max(stage_costs(*cut))


def every_cut(layers, stages, embedding, head):
    first, last = int(embedding == 0), len(layers) - int(head == 0)
    for cuts in combinations(range(first, last + 1), stages - 1):
        ends = (0, *cuts, len(layers))
        yield [b - a for a, b in pairwise(ends)]


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(("embedding", "head"), [(0, 0), (1, 9), (30, 2)])
def test_no_other_partition_has_a_faster_slowest_stage(stages, embedding, head):
    layers = [5, 1, 1, 7, 2, 2, 9]
    found = by_cost(layers, stages, embedding=embedding, head=head)
    assert sum(found) == len(layers) and len(found) == stages
    every = every_cut(layers, stages, embedding, head)
    best = min(slowest(counts, layers, embedding, head) for counts in every)
    assert slowest(found, layers, embedding, head) == best


def test_among_the_fastest_none_is_more_even():
    """Against all that there are; ties go to the first in order, as equal layers show."""
    drawn = random.Random(0)
    cases = [([1, 5, 5, 3, 2], 5, 0, 12), ([7] * 6, 4, 3, 10), ([7] * 7, 3, 0, 0)]
    for _ in range(400):
        layers = [drawn.randint(1, 6) for _ in range(drawn.randint(4, 8))]
        extra = drawn.choice([0, 1, 4]), drawn.choice([0, 3, 8, 12])
        cases.append((layers, drawn.randint(1, min(6, len(layers))), *extra))
    for layers, stages, embedding, head in cases:

        def unevenness(counts, cut=(layers, embedding, head)):
            costs = stage_costs(counts, *cut)
            return max(costs), sum(cost**2 for cost in costs), counts

        best = min(every_cut(layers, stages, embedding, head), key=unevenness)
        assert by_cost(layers, stages, embedding=embedding, head=head) == best
    assert by_cost(*cases[0][:2], head=12) == [2, 1, 1, 1, 0]


def test_a_large_head_gets_a_stage_of_its_own_and_equal_layers_lie_evenly():
    assert by_cost([3] * 8, 4, head=30, embedding=1) == [2, 3, 3, 0]
    assert by_cost([3] * 8, 4, head=3, embedding=1) == [2, 2, 2, 2]
    assert by_cost([3] * 8, 3, head=0) in ([3, 3, 2], [3, 2, 3], [2, 3, 3])


def test_flops_of_a_layer_are_those_of_its_products():
    model = tiny("llama", torch.float32)
    d, ff, heads, kv, dim, length = 32, 48, 4, 2, 8, 20
    projections = 2 * (2 * d * heads * dim + 2 * d * kv * dim)
    attention = 2 * length * heads * dim
    expected = projections + attention + 6 * d * ff
    assert layer_flops(model.model.layers[0], model.config, length) == expected


@pytest.mark.parametrize("length", [3, 7, 8, 20, 901])
def test_a_window_counts_what_its_tokens_see(length):
    """Against a count at every position, each token half of itself, as without a window."""
    model = tiny("mistral", torch.float32, sliding_window=7)
    layer, config = model.model.layers[0], model.config
    products = layer_flops(layer, config, length) - 2 * length * 4 * 8
    seen = sum(min(i + 0.5, 7) for i in range(length)) / length
    if length <= 7:
        assert seen == length / 2
    expected = products + 4 * seen * 4 * 8
    assert layer_flops(layer, config, length, 7) == pytest.approx(expected, abs=1)
    assert layer_flops(layer, config, length, 901) == layer_flops(layer, config, length)


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("llama", {}, [None] * 3),
        ("qwen3", {}, [None] * 3),
        ("mistral", {}, [7] * 3),
        ("mistral", {"sliding_window": None}, [None] * 3),
        ("gpt_oss", {}, [7, None, 7]),
        ("gemma3_text", {}, [7, None, 7]),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
            [None, 5, 5],
        ),
    ],
)
def test_windows_are_those_of_the_layers_that_have_one(family, changes, expected):
    model = tiny(family, torch.float32, **changes)
    assert windows(model.config) == expected
    length, cut = 50, [1, 1, 1]
    found = costs(model, cut, length)
    found[0] -= model.config.hidden_size
    found[-1] -= 2 * model.get_output_embeddings().weight.numel()
    assert found == [
        layer_flops(layer, model.config, length, window)
        for layer, window in zip(model.base_model.layers, expected, strict=True)
    ]
    slid = [window is not None for window in expected]
    whole = layer_flops(model.base_model.layers[0], model.config, length)
    assert [cost < whole for cost in found] == slid


def test_only_chosen_experts_count():
    model = tiny("qwen3_moe", torch.float32)
    dense = tiny("qwen3", torch.float32, intermediate_size=2 * 16)
    router = 2 * 32 * 4
    moe = layer_flops(model.model.layers[0], model.config, 20)
    assert moe == layer_flops(dense.model.layers[0], dense.config, 20) + router


def test_the_head_weighs_in():
    model = tiny("llama", torch.float32, num_hidden_layers=6, vocab_size=600)
    assert partition(model, 2, 20) == [4, 2]
    assert partition(model, 1, 20) == [6]


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([3, 3], "layers: 2 numbers for 3 stages"),
        ([3, 0, 3], "layers: stage 1 cannot have 0 layers"),
        ([-1, 3, 4], "layers: stage 0 cannot have -1 layers"),
        ([2, 2, 3], "layers: sum is 7, the model has 6 layers"),
    ],
)
def test_counts_by_hand_that_do_not_fit(counts, message):
    with pytest.raises(InputError) as caught:
        by_hand(counts, 6, 3)
    assert str(caught.value) == message


def test_counts_by_hand_that_fit():
    assert by_hand([0, 6, 0], 6, 3) == [0, 6, 0]


@pytest.mark.parametrize("stages", [0, 4])
def test_a_number_of_stages_that_cannot_be(stages):
    with pytest.raises(InputError, match="^stages: "):
        by_cost([1, 1, 1], stages)
