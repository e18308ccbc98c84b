"""A stage that fails: all ranks learn of it in bounded time, and what they say is the cause."""

import math
import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from algorithms.async_pipeline.reference import Delayed
from algorithms.async_pipeline.simulated import Simulated
from algorithms.common.comm import Comm
from algorithms.common.errors import NonFiniteError
from tests.distributed import RankError
from tests.pipelines import (
    batch,
    optimizer_of,
    pipeline,
    simulated,
    token_loss,
    toy_stages,
    warm_up,
    weights_of,
)

COUNTS = [1, 1, 1, 1]


def own_group(comm, seconds=60, size=4):
    """A group of the first `size` ranks that nobody uses after a failure; all four call this."""
    group = dist.new_group(list(range(size)), timeout=timedelta(seconds=seconds))
    return Comm(group, comm.device) if comm.rank < size else None


class Explode(torch.autograd.Function):
    """The identity, whose gradient is infinite once `armed`."""

    armed = False

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.inf if Explode.armed else gradient


class Fragile(torch.nn.Linear):
    def forward(self, x):
        return torch.nn.functional.linear(x, Explode.apply(self.weight), self.bias)


def broken(comm, rank, how, changes):
    """What every rank says; the gradient, weight or loss of `rank` breaks in update 5, or the loss
    in the first microbatch of it."""
    Explode.armed = False

    def before_update(optimizer, update):
        warm_up(optimizer, update)
        if comm.rank == rank and update == 4:
            if how == "gradient":
                Explode.armed = True
            elif how == "weight":
                mine.weights[f"layer_{rank}.down.weight"].data[0, 0] = torch.nan

    def loss(scores, targets):
        value = token_loss(scores, targets)
        bad = mine.done == 5 * mine.accumulation if how == "first loss" else mine.updates == 5
        return value * torch.inf if how.endswith("loss") and bad else value

    mine = pipeline(own_group(comm), COUNTS, before_update=before_update, **changes)
    mine.loss = loss
    layer = getattr(mine.stage, f"layer_{comm.rank}")
    layer.up.__class__ = Fragile
    try:
        mine.run(batch, 30)
    except NonFiniteError as error:
        return str(error), mine.updates, weights_of(mine.stage)
    return "", 0, {}


def broken_alone(rank, how, stash="device", accumulation=1):
    """What the simulator says of the same."""
    Explode.armed = False
    stages = toy_stages(COUNTS)
    layer = getattr(stages[rank], f"layer_{rank}")
    if how == "gradient":
        layer.up.__class__ = Fragile

    def before_update(optimizer, update):
        warm_up(optimizer, update)
        if update == 4:
            Explode.armed = True
            if how == "weight":
                layer.down.weight.data[0, 0] = torch.nan

    def loss(scores, targets):
        update, part = divmod(mine.microbatches, accumulation)
        bad = how == "loss" or (how == "first loss" and part == 0)
        return token_loss(scores, targets) * (torch.inf if bad and update == 5 else 1.0)

    settings = {"stash": stash != "none", "accumulation": accumulation, "clip_norm": 0.5}
    mine = Delayed(stages, optimizer_of("adamw"), loss, before_update=before_update, **settings)
    with pytest.raises(NonFiniteError) as caught:
        for index in range(30 * accumulation):
            mine.microbatch(*batch(index))
    return str(caught.value)


@pytest.mark.parametrize(
    "changes", [{}, {"stash": "none"}, {"accumulation": 2}, {"accumulation": 3}], ids=str
)
@pytest.mark.parametrize(
    ("rank", "how"),
    [(0, "gradient"), (2, "gradient"), (3, "gradient"), (3, "loss"), (3, "first loss")]
    + [(rank, "weight") for rank in range(4)],
)
def test_the_simulator_names_what_real_ranks_do(ranks, rank, how, changes):
    said = broken_alone(rank, how, **changes)
    name = "down.weight" if how == "weight" else "up.weight" if how == "gradient" else "norm.weight"
    what = "parameter" if how == "weight" else "gradient of"
    assert f"stage {rank}: {what} layer_{rank}.{name} is not finite" in said
    assert how == "weight" or said.startswith("update 5: ")
    assert said.endswith(", loss is inf") == how.endswith("loss")
    for text, _, _ in ranks.run(broken, rank, how, changes):
        if how == "weight":  # which ranks find as soon as one of them forwards with it
            text, expected = (each.split(": ", 1)[1] for each in (text, said))
            assert text == expected
        else:
            assert text == said


@pytest.mark.parametrize("changes", [{}, {"stash": "none"}, {"accumulation": 2}], ids=str)
@pytest.mark.parametrize("rank", range(4))
def test_every_rank_names_the_gradient_that_was_not_finite(ranks, rank, changes):
    results = ranks.run(broken, rank, "gradient", changes)
    said = f"update 5: stage {rank}: gradient of layer_{rank}.up.weight is not finite"
    assert [text for text, _, _ in results] == [said] * 4
    _, weights, _ = simulated(COUNTS, 5, **changes)
    for name, weight in results[rank][2].items():
        assert torch.equal(weight, weights[rank][name]), name


def test_a_loss_that_is_not_finite(ranks):
    for text, _, _ in ranks.run(broken, 3, "loss", {}):
        assert text.startswith("update 5: stage 3: gradient of ")
        assert text.endswith(" is not finite, loss is inf")


@pytest.mark.parametrize("rank", range(3))
def test_a_weight_that_is_not_finite_is_found_by_what_it_does_to_others(ranks, rank):
    for text, _, _ in ranks.run(broken, rank, "weight", {}):
        assert f"stage {rank}: parameter layer_{rank}.down.weight is not finite" in text


def near_a_pause(comm, delays, accumulation, until, stop):
    """What this rank says, and after how long, when the gradient of each stage breaks in each of
    the updates before a pause in which another may be done with its part of the run."""
    said = []
    for rank, failing in where(delays, accumulation, until):
        Explode.armed = False
        own = own_group(comm, 60, len(delays))
        if own is None:
            continue

        def before_update(optimizer, update, rank=rank, failing=failing):
            if comm.rank == rank and update == failing - 1:
                time.sleep(0.05)  # all others go as far as they can
                Explode.armed = True

        changes = {"delays": delays, "accumulation": accumulation, "kind": "sgd"}
        mine = pipeline(own, [1] * len(delays), before_update=before_update, **changes)
        getattr(mine.stage, f"layer_{comm.rank}").up.__class__ = Fragile
        begun = time.monotonic()
        try:
            mine.run(batch, until, stop)
        except NonFiniteError as error:
            said.append((str(error), time.monotonic() - begun))
    return said


def where(delays, accumulation, until):
    first = max(1, until - 1 - delays[0] // accumulation)
    return [(rank, update) for rank in range(len(delays)) for update in range(first, until)]


@pytest.mark.parametrize(
    ("delays", "accumulation", "more"),
    [
        ([3, 0], 1, 20),
        ([2, 1, 0], 1, 0),
        ([6, 2, 1], 1, 1),
        ([5, 5, 0], 2, 20),
        ([3, 2, 1, 0], 1, 0),
        ([3, 2, 1, 0], 1, 20),
        ([7, 4, 2, 0], 3, 1),
    ],
    ids=str,
)
def test_a_failure_just_before_a_pause_is_told_to_those_who_are_done(
    ranks, delays, accumulation, more
):
    """`more`: updates that are left behind the pause; with 0 the run drains."""
    until = 9
    args = (delays, accumulation, until, until + more)
    results = ranks.run(near_a_pause, *args)[: len(delays)]
    for told in zip(*results, strict=True):
        assert len({text for text, _ in told}) == 1
        assert max(seconds for _, seconds in told) < 30
    assert [text for text, _ in results[0]] == [
        f"update {update}: stage {rank}: gradient of layer_{rank}.up.weight is not finite"
        for rank, update in where(delays, accumulation, until)
    ]


def break_weights(stage, broken):
    own = dict(stage.named_parameters())
    for name, place in broken.items():
        if name in own:
            own[name].data[place] = torch.nan


def evaluated(comm, counts, broken):
    """Values at bad weights, twice, and what training at these weights ends with."""
    own = own_group(comm, 60, len(counts))
    if own is None:
        return None
    mine = pipeline(own, counts)
    mine.run(batch, 2, 9)
    break_weights(mine.stage, broken)
    values = [mine.evaluate(lambda index: batch(1000 + index), 7) for _ in range(2)]
    with pytest.raises(NonFiniteError) as caught:
        mine.run(batch, 9)
    return values, str(caught.value)


@pytest.mark.parametrize(
    "broken",
    [{"embed.weight": 6}, {"layer_0.down.bias": 0}, {"layer_1.up.weight": 3}, {"head.weight": 5}],
    ids=str,
)
def test_an_evaluation_at_bad_weights_is_nan_as_in_the_simulator(ranks, broken):
    """And the pipeline is not the worse for it: the next run says whose weight it was."""
    counts = [1, 1, 1]
    settings = {"delays": [2, 1, 0], "stash": True, "accumulation": 1, "clip_norm": 0.5}
    settings |= {"costs": [1, 1, 1], "before_update": warm_up}
    alone = Simulated(toy_stages(counts), optimizer_of("adamw"), token_loss, **settings)
    alone.run(batch, 2)
    for stage in alone.delayed.stages:
        break_weights(stage, broken)
    values = alone.evaluate(lambda index: batch(1000 + index), 7)
    assert any(map(math.isnan, values))
    assert all(map(math.isnan, values)) == ("embed.weight" not in broken)  # a rare token's row
    for (found, again), said in ranks.run(evaluated, counts, broken)[:3]:
        assert repr(found) == repr(again) == repr(values)
        assert f"parameter {next(iter(broken))} is not finite" in said


def imported(comm):
    """Nothing: a rank that has answered has imported this module."""


def gone(comm, rank, how):
    """Stage `rank` dies or stalls in update 3."""

    def before_update(optimizer, update):
        if comm.rank == rank and update == 3:
            if how == "dies":
                os._exit(7)
            time.sleep(60)

    comm.barrier()  # the imports of some take longer than those of others
    pipeline(own_group(comm, 8), COUNTS, before_update=before_update).run(batch, 30)


@pytest.mark.parametrize("rank", [0, 2, 3])
@pytest.mark.parametrize("how", ["dies", "stalls"])
@pytest.mark.slow
def test_a_stage_that_is_gone_is_named_within_the_timeout(ranks, rank, how):
    ranks.run(imported)
    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        ranks.run(gone, rank, how, timeout=100)
    assert time.monotonic() - started < 90
    said = [str(caught.value), *getattr(caught.value, "__notes__", [])]
    assert any("StageLostError: stage " in text and f"lost stage {rank} (" in text for text in said)
