"""A pipeline of real ranks is its reference, bit for bit, however cut and whatever it keeps."""

import pytest
import torch

from algorithms.async_pipeline.pipeline import Pipeline
from algorithms.async_pipeline.synchronous import Synchronous
from algorithms.common.comm import Comm
from algorithms.common.errors import InputError
from tests.pipelines import (
    BATCH,
    TOKENS,
    WIDTH,
    assert_same,
    batch,
    optimizer_of,
    pipeline,
    real,
    simulated,
    token_loss,
    toy_stages,
    warm_up,
    weights_of,
)


def check(ranks, counts, updates, **changes):
    results = ranks.run(real, counts, updates, changes, world_size=len(counts))
    assert_same(results, simulated(counts, updates, **changes))
    return results


@pytest.mark.parametrize("kind", ["adamw", "nadam", "sgd"])
@pytest.mark.parametrize("stash", ["device", "none"])
@pytest.mark.parametrize("counts", [[2, 2], [1, 1, 1, 1]], ids=["2", "4"])
def test_fifty_updates_are_those_of_the_reference(ranks, counts, stash, kind):
    check(ranks, counts, 50, stash=stash, kind=kind)


@pytest.mark.parametrize(
    ("family", "counts"), [("llama", [1, 3]), ("qwen3", [1, 1, 2]), ("qwen3_moe", [1, 1, 1, 1])]
)
@pytest.mark.slow
def test_decoders_of_transformers(ranks, family, counts):
    for stash in ("device", "none"):
        check(ranks, counts, 50, family=family, stash=stash)


@pytest.mark.parametrize(
    "changes",
    [
        {"recompute": True},
        {"stash": "host"},
        {"accumulation": 3},
        {"accumulation": 2, "stash": "none"},
        {"delays": [7, 5, 1]},
        {"delays": [8, 4, 4], "stash": "none"},
        {"delays": [4, 2, 0], "stash": "host", "accumulation": 2},
    ],
    ids=str,
)
def test_what_is_kept_and_how_old_weights_are(ranks, changes):
    check(ranks, [1, 2, 1], 9, **changes)


@pytest.mark.parametrize("stash", ["device", "none"])
@pytest.mark.parametrize("updates", [1, 2, 3])
def test_fewer_microbatches_than_stages(ranks, updates, stash):
    check(ranks, [1, 1, 1, 1], updates, stash=stash)


@pytest.mark.parametrize("counts", [[3, 1], [0, 3, 1, 0]], ids=str)
def test_uneven_stages(ranks, counts):
    check(ranks, counts, 8)


@pytest.mark.parametrize("kind", ["adamw", "nadam", "sgd"])
def test_one_stage_is_plain_training(ranks, kind):
    (stage,) = toy_stages([4])
    optimizer = optimizer_of(kind)(list(stage.named_parameters()), 0, 1)
    losses = []
    for update in range(12):
        inputs, targets = batch(update)
        loss = token_loss(stage(inputs), targets)
        losses.append(loss.item())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(stage.parameters(), 0.5)
        warm_up(optimizer, update)
        optimizer.step()
        optimizer.zero_grad()
    ((found, weights, _, moved),) = ranks.run(real, [4], 12, {"kind": kind}, world_size=1)
    assert found == losses
    for name, weight in stage.named_parameters():
        assert torch.equal(weight, weights[name]), name
    assert moved["comm/payload_bytes"] == 0


@pytest.mark.parametrize("counts", [[2, 2], [1, 1, 1, 1]], ids=["2", "4"])
def test_bytes_are_those_of_the_formula(ranks, counts):
    updates, last = 6, len(counts) - 1
    hidden = 4 * BATCH * TOKENS * WIDTH * updates
    for k, (_, _, _, moved) in enumerate(check(ranks, counts, updates)):
        sent = {
            "activations": hidden if k < last else 0,
            "gradients": hidden if k > 0 else 0,
            "targets": 8 * BATCH * TOKENS * updates if k == 0 else 0,
        }
        for tag, size in sent.items():
            assert moved.get(f"comm/{tag}/payload_bytes", 0) == size, (k, tag)
        assert moved["comm/payload_bytes"] == sum(sent.values())


def paused(comm, counts, pauses, drain_at, changes):
    mine = pipeline(comm, counts, **changes)
    losses, evaluated, under_way = [], [], []
    for until in pauses:
        losses += mine.run(batch, until, drain_at)
        under_way.append(len(mine.flights))
        evaluated.append(mine.evaluate(lambda index: batch(1000 + index), 5))
    return losses, weights_of(mine.stage), evaluated, under_way


@pytest.mark.parametrize(
    "changes", [{}, {"stash": "none"}, {"stash": "host", "accumulation": 2}], ids=str
)
@pytest.mark.parametrize("counts", [[2, 2], [1, 1, 1, 1]], ids=["2", "4"])
def test_a_pause_with_an_evaluation_changes_nothing(ranks, counts, changes):
    stops = [1, 4, 8, 9]
    results = ranks.run(paused, counts, stops, 9, changes, world_size=len(counts))
    losses, weights, _ = simulated(counts, 9, **changes)
    for k, (found, own, evaluated, under_way) in enumerate(results):
        assert found == losses
        assert under_way[1] == len(counts) - 1 - k and under_way[-1] == 0
        for name, weight in own.items():
            assert torch.equal(weight, weights[k][name]), (k, name)
        assert evaluated == results[0][2]
    for updates, values in zip(stops, results[0][2], strict=True):
        *_, at_pause = simulated_at(counts, updates, changes)
        assert values == at_pause


def simulated_at(counts, updates, changes):
    """What the stages say of five other batches after `updates` of nine updates."""
    _, weights, _ = simulated(counts, updates, **changes)
    stages = toy_stages(counts)
    values = []
    with torch.no_grad():
        for stage, own in zip(stages, weights, strict=True):
            for name, parameter in stage.named_parameters():
                parameter.copy_(own[name])
        for index in range(5):
            x, targets = batch(1000 + index)
            for stage in stages:
                x = stage(x)
            values.append(token_loss(x, targets).item())
    return weights, values


def two_runs(comm, counts):
    mine = pipeline(comm, counts)
    mine.run(batch, 5)
    assert mine.drained
    with pytest.raises(InputError, match="until: 4 microbatches are not in"):
        mine.run(batch, 4)
    mine.run(batch, 6, 9)
    assert not mine.drained
    with pytest.raises(InputError, match="drain_at: 8 microbatches, but this run ends at 9"):
        mine.run(batch, 8)
    mine.run(batch, 9)
    return weights_of(mine.stage)


def test_after_a_drain_all_stages_see_the_newest_weights(ranks):
    from algorithms.async_pipeline.reference import Delayed

    counts = [1, 2, 1]
    stages = toy_stages(counts)
    settings = {"clip_norm": 0.5, "before_update": warm_up}
    reference = Delayed(stages, optimizer_of("adamw"), token_loss, **settings)
    for index in range(9):
        if index == 5:
            reference.drain()
        reference.microbatch(*batch(index))
    for stage, own in zip(stages, ranks.run(two_runs, counts, world_size=3), strict=True):
        for name, weight in stage.named_parameters():
            assert torch.equal(weight, own[name]), name


def test_nccl_is_refused():
    comm = Comm(None, torch.device("cpu"))
    comm.backend = "nccl"
    with pytest.raises(InputError, match="^backend: "):
        Pipeline(toy_stages([1])[0], optimizer_of("sgd"), token_loss, comm)


def test_frozen_parameters_are_refused():
    (stage,) = toy_stages([1])
    stage.head.requires_grad_(False)
    comm = Comm(None, torch.device("cpu"))
    with pytest.raises(InputError, match="^head.weight: is frozen; "):
        Pipeline(stage, optimizer_of("sgd"), token_loss, comm)
    with pytest.raises(InputError, match="^head.weight: is frozen; "):
        settings = {"schedule": "gpipe", "microbatches": 2}
        Synchronous([stage], optimizer_of("sgd"), token_loss, comm, **settings)
