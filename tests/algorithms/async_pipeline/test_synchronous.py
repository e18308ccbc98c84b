"""torch's synchronous schedules train as one process does, and send what the formula says."""

import pytest
import torch
from torch import nn

from algorithms.async_pipeline.synchronous import Synchronous, placement
from algorithms.async_pipeline.trace import utilisation
from algorithms.common.comm import Comm
from algorithms.common.errors import InputError, NonFiniteError
from tests.pipelines import (
    BATCH,
    TOKENS,
    WIDTH,
    batch,
    optimizer_of,
    stages_of,
    token_loss,
    toy_stages,
    warm_up,
    weights_of,
)

SCHEDULES = ["gpipe", "one_f_one_b", "zero_bubble"]
UPDATES = 5


def counts_of(schedule, ranks):
    """Layers of each stage, uneven."""
    stages = len(placement(schedule, ranks)[0]) * ranks
    return [1 + index % 2 for index in range(stages)]


def synchronous(comm, schedule, microbatches, *, family=None, kind="adamw", **changes):
    """This rank's part of a pipeline."""
    settings = {"clip_norm": 0.5, "before_update": warm_up} | changes
    whole = stages_of(family, counts_of(schedule, comm.world_size))
    own = [whole[index] for index in placement(schedule, comm.world_size)[comm.rank]]
    settings |= {"schedule": schedule, "microbatches": microbatches}
    return Synchronous(own, optimizer_of(kind), token_loss, comm, **settings)


def real(comm, schedule, microbatches, changes):
    """Losses of two runs, weights and norms by stage, and metrics."""
    mine = synchronous(comm, schedule, microbatches, **changes)
    losses = mine.run(batch, 2)
    norms = [list(each) for each in mine.norms]
    losses += mine.run(batch, UPDATES)
    norms = [early + late for early, late in zip(norms, mine.norms, strict=True)]
    weights = {k: weights_of(stage) for k, stage in zip(mine.indices, mine.stages, strict=True)}
    return losses, weights, dict(zip(mine.indices, norms, strict=True)), comm.metrics()


def plain(counts, microbatches, family=None, kind="adamw", updates=UPDATES):
    """The same by backward, clipping and step, in one process; an optimizer for each stage."""
    stages = stages_of(family, counts)
    build = optimizer_of(kind)
    optimizers = [
        build(list(stage.named_parameters()), k, len(stages)) for k, stage in enumerate(stages)
    ]
    losses, norms = [], []
    for update in range(updates):
        for index in range(update * microbatches, (update + 1) * microbatches):
            x, targets = batch(index)
            for stage in stages:
                x = stage(x)
            loss = token_loss(x, targets)
            losses.append(loss.item())
            (loss / microbatches).backward()
        norms.append([nn.utils.clip_grad_norm_(stage.parameters(), 0.5).item() for stage in stages])
        for optimizer in optimizers:
            warm_up(optimizer, update)
            optimizer.step()
            optimizer.zero_grad()
    return losses, [weights_of(stage) for stage in stages], norms


def assert_same(results, expected):
    """Bit for bit."""
    losses, weights, norms = expected
    seen = set()
    for found, own, own_norms, _ in results:
        assert found == losses
        for k, parameters in own.items():
            assert own_norms[k] == [each[k] for each in norms]
            for name, weight in parameters.items():
                assert torch.equal(weight, weights[k][name]), (k, name)
            seen.add(k)
    assert seen == set(range(len(weights)))


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_updates_are_those_of_plain_training(ranks, schedule, world, rounds):
    microbatches = world * rounds
    results = ranks.run(real, schedule, microbatches, {}, world_size=world)
    assert_same(results, plain(counts_of(schedule, world), microbatches))


@pytest.mark.parametrize("microbatches", [1, 3, 5])
def test_microbatches_that_are_no_multiple_of_the_ranks(ranks, microbatches):
    for schedule in ["gpipe", "one_f_one_b", "zero_bubble"] if microbatches > 4 else ["gpipe"]:
        results = ranks.run(real, schedule, microbatches, {})
        assert_same(results, plain(counts_of(schedule, 4), microbatches))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.slow
def test_a_decoder_of_transformers(ranks, schedule):
    changes = {"family": "llama", "kind": "nadam"}
    results = ranks.run(real, schedule, 4, changes, world_size=2)
    assert_same(results, plain(counts_of(schedule, 2), 4, **changes))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("grouped", [True, False])
def test_one_rank_is_plain_training(ranks, schedule, grouped):
    if grouped:
        results = ranks.run(real, schedule, 3, {}, world_size=1)
    else:
        results = [real(Comm(None, torch.device("cpu")), schedule, 3, {})]
    assert_same(results, plain(counts_of(schedule, 1), 3))
    assert results[0][3]["comm/payload_bytes"] == 0


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bytes_are_those_of_the_formula(ranks, schedule, world):
    microbatches = world + 1
    results = ranks.run(real, schedule, microbatches, {}, world_size=world)
    hidden = 4 * BATCH * TOKENS * WIDTH * microbatches * UPDATES
    for rank, (_, _, _, moved) in enumerate(results):
        twice = 1 if schedule == "zero_bubble" else 0  # two stages on each rank
        sent = {
            "activations": hidden * (twice + (rank < world - 1)),
            "gradients": hidden * (twice + (rank > 0)),
            "targets": 8 * BATCH * TOKENS * microbatches * UPDATES if rank == 0 else 0,
        }
        for tag, size in sent.items():
            assert moved.get(f"comm/{tag}/payload_bytes", 0) == size, (rank, tag)
        assert moved["comm/payload_bytes"] == sum(sent.values())


def right(scores, targets):
    return (scores.argmax(-1) == targets).double().mean()


def evaluated(comm, schedule):
    mine = synchronous(comm, schedule, comm.world_size)
    before = mine.evaluate(batch, 3)
    mine.run(batch, 2)
    sent = comm.metrics()["comm/payload_bytes"]
    after = mine.evaluate(batch, 3), mine.evaluate(batch, 3, right), mine.evaluate(batch, 0)
    bytes_of = comm.metrics()
    once = (bytes_of["comm/payload_bytes"] - sent) // 2
    assert bytes_of.get("comm/evaluation/payload_bytes", 0) == 3 * once
    mine.run(batch, UPDATES)
    weights = {k: weights_of(stage) for k, stage in zip(mine.indices, mine.stages, strict=True)}
    return before, after, once, weights


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_evaluation_is_plain_and_leaves_no_trace(ranks, schedule, world):
    results = ranks.run(evaluated, schedule, world_size=world)
    counts = counts_of(schedule, world)
    stages = stages_of(None, counts)

    def scores(index):
        x = batch(index)[0]
        for stage in stages:
            x = stage(x)
        return x

    before = [token_loss(scores(index), batch(index)[1]).item() for index in range(3)]
    _, weights, _ = plain(counts, world, updates=2)
    for stage, values in zip(stages, weights, strict=True):
        stage.load_state_dict(values)
    after = [
        [metric(scores(index), batch(index)[1]).item() for index in range(3)]
        for metric in (token_loss, right)
    ]
    for found_before, found_after, _, own in results:
        assert found_before == before
        assert found_after == (*after, [])
        for k, parameters in own.items():
            trained = plain(counts, world)[1][k]
            assert all(torch.equal(trained[name], w) for name, w in parameters.items())
    crossings = 0 if world == 1 else len(counts) - 1
    targets = 0 if world == 1 else 8 * BATCH * TOKENS
    total = 3 * (4 * BATCH * TOKENS * WIDTH * crossings + targets)
    assert sum(once for _, _, once, _ in results) == total


def traced(comm, schedule):
    mine = synchronous(comm, schedule, 4)
    mine.run(batch, 2)
    traces = mine.traces()
    assert mine.trace.events == []
    return traces


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_trace_has_what_each_rank_did(ranks, schedule, world):
    traces = ranks.run(traced, schedule, world_size=world)[0]
    assert len(traces) == world
    stages = len(placement(schedule, world)[0])
    for rank, events in enumerate(traces):
        losses = rank == world - 1
        forwards = (1 if world == 1 else stages) + losses
        counts = {kind: 0 for kind in ("forward", "backward", "update", "wait")}
        for event in events:
            counts[event.kind] += 1
        split = world > 1 and schedule == "zero_bubble"
        assert counts["forward"] == 8 * forwards
        assert counts["backward"] == 8 * (2 * stages if split else 1)
        assert counts["update"] == 2 * stages
        assert {e.index for e in events if e.kind == "backward"} == set(range(8))
        assert [e.index for e in events if e.kind == "update"] == [0] * stages + [1] * stages
        for early, late in zip(events, events[1:], strict=False):  # nothing overlaps
            assert early.start <= early.end <= late.start
    assert 0 < utilisation(traces) < 1


class Explode(torch.autograd.Function):
    """The identity, whose gradient is infinite."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.inf


class Fragile(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, Explode.apply(self.weight), self.bias)


def broken(comm, schedule, index, how):
    """What every rank says and the weights of its stages; stage `index` breaks in update 2."""
    counts = counts_of(schedule, comm.world_size)

    def loss(scores, targets):
        value = token_loss(scores, targets)
        return value * torch.inf if how == "loss" and mine.updates == 2 else value

    mine = synchronous(comm, schedule, comm.world_size)
    mine.loss = loss
    mine.run(batch, 2)
    if index in mine.indices and how != "loss":
        stage = mine.stages[mine.indices.index(index)]
        layer = getattr(stage, f"layer_{sum(counts[:index])}")
        if how == "gradient":
            layer.up.__class__ = Fragile
        else:
            layer.down.weight.data[0, 0] = torch.nan
    try:
        mine.run(batch, UPDATES)
    except NonFiniteError as error:
        weights = {k: weights_of(stage) for k, stage in zip(mine.indices, mine.stages, strict=True)}
        return str(error), mine.updates, weights
    return "", mine.updates, {}


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_rank_names_what_was_not_finite(ranks, schedule, index):
    world = 2 if schedule == "zero_bubble" else 4
    counts = counts_of(schedule, world)
    layer = f"layer_{sum(counts[:index])}"
    _, weights, _ = plain(counts, world, updates=2)
    for how, said in {
        "gradient": f"update 2: stage {index}: gradient of {layer}.up.weight is not finite",
        "weight": f"update 2: stage {index}: parameter {layer}.down.weight is not finite",
    }.items():
        said += ", loss is nan" if how == "weight" and index == 3 else ""
        results = ranks.run(broken, schedule, index, how, world_size=world)
        assert [result[:2] for result in results] == [(said, 2)] * world
        own = next(own[index] for _, _, own in results if index in own)
        for name, weight in own.items():
            if how == "gradient":
                assert torch.equal(weight, weights[index][name]), name


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_loss_that_is_not_finite(ranks, schedule):
    last = 3
    world = 2 if schedule == "zero_bubble" else 4
    for text, updates, _ in ranks.run(broken, schedule, last, "loss", world_size=world):
        assert text.startswith(f"update 2: stage {last}: gradient of ")
        assert text.endswith(" is not finite, loss is inf")
        assert updates == 2


def refused(comm, schedule, microbatches):
    try:
        synchronous(comm, schedule, microbatches)
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("schedule", ["one_f_one_b", "zero_bubble"])
def test_fewer_microbatches_than_ranks(ranks, schedule):
    said = f"microbatches: 3, but {schedule} on 4 ranks needs at least 4"
    assert ranks.run(refused, schedule, 3) == [said] * 4


def test_zero_bubble_takes_equal_rounds(ranks):
    said = "microbatches: 9, but zero_bubble on 4 ranks needs 2 equal rounds"
    assert ranks.run(refused, "zero_bubble", 9) == [said] * 4


def test_what_does_not_fit():
    comm = Comm(None, torch.device("cpu"))
    settings = {"schedule": "gpipe", "microbatches": 2}
    with pytest.raises(InputError, match="^microbatches: 0, but gpipe on 1 ranks needs at least 1"):
        synchronous(comm, "gpipe", 0)
    with pytest.raises(InputError, match="^stages: 2 on rank 0, but gpipe has 1$"):
        Synchronous(toy_stages([1, 1]), optimizer_of("sgd"), token_loss, comm, **settings)
    mine = synchronous(comm, "gpipe", 2)
    mine.run(batch, 1)
    with pytest.raises(InputError, match="^until: 0 updates, but 1 have been made$"):
        mine.run(batch, 0)
    with pytest.raises(InputError, match="^batch 3: is "):
        mine.run(lambda index: (batch(index)[0][:, index - 2 :], batch(index)[1]), 2)


class Flat(nn.Module):
    """The gradient of its input is one number, expanded: not contiguous."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return (self.w * x.sum()).expand(3, 4) + 0


def expanded(comm, schedule):
    stages = [Flat() for _ in placement(schedule, comm.world_size)[0]]
    mine = Synchronous(
        stages, optimizer_of("sgd"), lambda x, y: x.mean(), comm, schedule=schedule, microbatches=2
    )
    return mine.run(lambda index: (torch.ones(3, 4), torch.ones(1)), 2)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_messages_that_do_not_lie_in_one_piece(ranks, schedule):
    assert ranks.run(expanded, schedule, world_size=2)[0][0] == 12 ** (
        4 if schedule == "zero_bubble" else 2
    )
