"""One token from given logits and numbers."""

import math

import pytest
import torch

from algorithms.branch_replay.sampling import choose, uniform

LOGITS = torch.tensor([[0.1, 0.4, 0.0, 0.2, 0.3]]).log()  # the third is impossible


def at(u, temperature=1.0, top_p=1.0):
    return int(choose(LOGITS, torch.tensor([u], dtype=torch.float64), temperature, top_p))


@pytest.mark.parametrize(
    ("u", "token"), [(0.0, 0), (0.09, 0), (0.11, 1), (0.49, 1), (0.51, 3), (0.71, 4), (0.9999, 4)]
)
def test_probabilities_lie_end_to_end(u, token):
    assert at(u) == token


def test_temperature_sharpens_and_zero_takes_the_likeliest():
    """At temperature 1/2 weights are squared: .01 .16 0 .04 .09 of .30."""
    assert at(0.02, 0.5) == 0 and at(0.04, 0.5) == 1 and at(0.56, 0.5) == 1 and at(0.58, 0.5) == 3
    assert {at(u, 0) for u in (0.0, 0.5, 0.99)} == {1}


@pytest.mark.parametrize(
    ("top_p", "tokens"),
    [(0.3, {1}), (0.4, {1}), (0.41, {1, 4}), (0.9, {1, 4, 3}), (0.95, {0, 1, 3, 4})],
)
def test_the_nucleus_is_the_fewest_tokens_that_hold_top_p(top_p, tokens):
    assert {at(u / 200, 1.0, top_p) for u in range(200)} == tokens


def test_the_nucleus_is_renormalised():
    """Of 0.4 and 0.3 the first holds 4/7."""
    assert at(0.57, 1.0, 0.7) == 1 and at(0.573, 1.0, 0.7) == 4


def test_a_token_without_probability_is_never_drawn():
    logits = torch.full((1, 4), -math.inf)
    logits[0, 2] = 0.0
    for u in (0.0, 0.5, 1 - 2**-53):
        for top_p in (0.5, 1.0):
            assert int(choose(logits, torch.tensor([u], dtype=torch.float64), 1.0, top_p)) == 2


def test_numbers_are_of_a_seed_and_a_place():
    numbers = [uniform(seed, place) for seed in range(20) for place in range(50)]
    assert len(set(numbers)) == 1000 and all(0 <= u < 1 for u in numbers)
    assert uniform(3, 4) == uniform(3, 4)
    assert abs(sum(numbers) / 1000 - 0.5) < 4 * 12**-0.5 / 1000**0.5
