"""Randomness depends on seed, step and rank, on nothing else, and repeats."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor, nn

from algorithms.common.comm import Comm
from algorithms.common.seeding import mix, seed_model, seed_step
from tests.distributed import RankPool


def dropout_mask(seed: int, step: int, rank: int) -> Tensor:
    seed_step(seed, step, rank)
    return nn.functional.dropout(torch.ones(1000), 0.5) > 0


def test_dropout_mask_is_a_function_of_seed_step_and_rank() -> None:
    keys = [(seed, step, rank) for seed in (-1, 0, 1) for step in range(4) for rank in range(4)]
    masks = {key: dropout_mask(*key) for key in keys}
    torch.rand(17)
    for key in reversed(keys):  # in another order, after other draws
        assert torch.equal(dropout_mask(*key), masks[key])
    together = torch.stack(list(masks.values())).double()
    agreement = together @ together.T + (1 - together) @ (1 - together).T
    off_diagonal = agreement[~torch.eye(len(keys), dtype=torch.bool)]
    # Independent masks agree on 500 of 1000 places, with a standard deviation of 16.
    assert off_diagonal.min() > 400 and off_diagonal.max() < 600


def test_python_and_numpy_follow() -> None:
    draws = []
    for step in (3, 4, 3):
        seed_step(0, step, 1)
        draws.append((random.random(), np.random.rand()))
    assert draws[0] == draws[2] != draws[1]


def test_mix_has_no_collisions_where_sums_and_products_would() -> None:
    keys = [(seed, step, rank) for seed in range(20) for step in range(200) for rank in range(8)]
    hashes = {mix(*key) for key in keys}
    assert len(hashes) == len(keys)
    assert all(0 <= value < 2**64 for value in hashes)
    assert mix(1, 23) != mix(12, 3)
    assert mix("step", 0, 0, 0) == 0x0251E6786B44E1DE  # fixed: a resumed run may be a later Python


def initial_weights(comm: Comm) -> tuple[Tensor, Tensor]:
    torch.rand(comm.rank)
    seed_model(7)
    weights = nn.Linear(5, 5).weight.detach()
    seed_step(7, 0, comm.rank)
    return weights, torch.rand(5)


def test_initial_weights_are_equal_on_all_ranks_and_later_draws_are_not(ranks: RankPool) -> None:
    results = ranks.run(initial_weights)
    assert all(torch.equal(weights, results[0][0]) for weights, _ in results)
    assert len({tuple(draws.tolist()) for _, draws in results}) == 4
