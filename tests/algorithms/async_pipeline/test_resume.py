"""Checkpoints: a resumed run is the uninterrupted one, under way or drained, even cut anew."""

from dataclasses import replace

import pytest
import torch

from algorithms.async_pipeline import resume
from algorithms.async_pipeline.config import PRESETS
from algorithms.async_pipeline.reference import Delayed
from algorithms.async_pipeline.resume import load, save
from algorithms.common.checkpoint import Checkpoints
from algorithms.common.comm import Comm
from algorithms.common.errors import InputError
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


def first_part(comm, folder, counts, until, drain_at, changes):
    mine = pipeline(comm, counts, **changes)
    losses = mine.run(batch, until, drain_at)
    save(Checkpoints(folder, 2, comm), mine, {"note": 3})
    return losses


def second_part(comm, folder, counts, until, changes):
    mine = pipeline(comm, counts, **changes)
    with torch.no_grad():
        for weight in mine.weights.values():  # nothing of the new pipeline's is to survive
            weight.zero_()
    extra = load(Checkpoints(folder, 2, comm), mine)
    return extra, mine.run(batch, until), weights_of(mine.stage)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"recompute": True, "kind": "sgd"},
        {"stash": "host", "kind": "nadam"},
        {"stash": "none"},
        {"delays": [5, 3, 1], "accumulation": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("until", [1, 5])
def test_what_is_under_way_goes_on_bit_for_bit(ranks, tmp_path, until, changes):
    counts = [1, 2, 1]
    before = ranks.run(first_part, tmp_path, counts, until, 9, changes, world_size=3)
    results = ranks.run(second_part, tmp_path, counts, 9, changes, world_size=3)
    losses, weights, _ = simulated(counts, 9, **changes)
    for k, (extra, found, own) in enumerate(results):
        assert extra == {"note": 3}
        assert before[k] + found == losses
        for name, weight in own.items():
            assert torch.equal(weight, weights[k][name]), (k, name)


@pytest.mark.parametrize("kind", ["adamw", "nadam"])
@pytest.mark.parametrize(
    ("old", "new"),
    [([2, 2], [1, 1, 1, 1]), ([1, 1, 1, 1], [3, 1]), ([1, 3], [2, 2]), ([2, 2], [2, 2])],
    ids=str,
)
def test_a_drained_run_goes_on_under_another_cut(ranks, tmp_path, old, new, kind):
    changes = {"kind": kind}
    ranks.run(first_part, tmp_path, old, 5, 5, changes, world_size=len(old))
    results = ranks.run(second_part, tmp_path, new, 11, changes, world_size=len(new))

    settings = {"clip_norm": 0.5, "before_update": warm_up}
    before = Delayed(toy_stages(old), optimizer_of(kind), token_loss, **settings)
    for index in range(5):
        before.microbatch(*batch(index))
    known = {
        name: (weight, before.optimizers[k].state[weight])
        for k, weights in enumerate(before.weights)
        for name, weight in weights.items()
    }
    after = Delayed(toy_stages(new), optimizer_of(kind), token_loss, **settings)
    for optimizer, weights in zip(after.optimizers, after.weights, strict=True):
        for name, weight in weights.items():
            weight.data.copy_(known[name][0])
            optimizer.state[weight] = known[name][1]
    after.microbatches = 5
    losses = [after.microbatch(*batch(index)).item() for index in range(5, 11)]
    for k, (_, found, own) in enumerate(results):
        assert found == losses
        for name, weight in after.weights[k].items():
            assert torch.equal(own[name], weight), name


@pytest.mark.parametrize(
    ("counts", "changes", "what"),
    [
        ([1, 3], {}, "the cut into stages has changed"),
        ([1, 1, 2], {}, "the cut into stages has changed"),
        ([2, 2], {"stash": "none"}, "stash has changed"),
        ([2, 2], {"accumulation": 2}, "accumulation has changed"),
        ([2, 2], {"delays": [2, 0]}, "delays has changed"),
    ],
)
def test_what_is_under_way_goes_on_as_it_began(ranks, tmp_path, counts, changes, what):
    ranks.run(first_part, tmp_path, [2, 2], 4, 9, {}, world_size=2)
    with pytest.raises(RankError, match=f"{what}, but microbatches are under way at update 4"):
        ranks.run(second_part, tmp_path, counts, 9, changes, world_size=len(counts))


def test_a_checkpoint_of_another_model(ranks, tmp_path):
    ranks.run(first_part, tmp_path, [2, 2], 4, 4, {}, world_size=2)
    with pytest.raises(RankError, match=r"holds no layer_4\.norm\.weight of this shape") as caught:
        ranks.run(second_part, tmp_path, [5], 9, {}, world_size=1)
    assert caught.value.kind == InputError.__name__


def another_width(folder, width):
    """Saves a pipeline of one stage and loads it into one whose weights have the same names."""
    comm = Comm(None, torch.device("cpu"))
    pipelines = [pipeline(comm, [2], kind="sgd") for _ in range(2)]
    pipelines[0].run(batch, 1)
    with torch.no_grad():
        bias = pipelines[0].stage.layer_1.down.bias
        bias.data = bias[:width].clone()
    before = weights_of(pipelines[1].stage)
    save(Checkpoints(folder, 2, comm), pipelines[0], {})
    with pytest.raises(InputError) as caught:
        load(Checkpoints(folder, 2, comm), pipelines[1])
    for name, weight in weights_of(pipelines[1].stage).items():
        assert torch.equal(weight, before[name]), name
    return str(caught.value)


@pytest.mark.parametrize("width", [1, 15])  # one number would be taken for all
def test_the_same_cut_of_another_width(tmp_path, width):
    said = f"{tmp_path}: holds no layer_1.down.bias of this shape, [16]"
    assert another_width(tmp_path, width) == said


ROTATED = PRESETS["paper"]


def rotated(**changes):
    return replace(ROTATED, rotation=replace(ROTATED.rotation, **changes))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("adamw", "nadam", "holds the state of AdamW, not of NAdam"),
        (ROTATED, "adamw", "holds the state of BasisRotation, not of AdamW"),
        ("adamw", ROTATED, "holds the state of AdamW, not of BasisRotation"),
        (
            ROTATED,
            rotated(source="first"),
            "holds a left_covariance of embed.weight, which the optimizer does not",
        ),
        (
            rotated(source="first"),
            ROTATED,
            "holds no left_covariance of embed.weight, which the optimizer keeps",
        ),
        (
            ROTATED,
            rotated(geometry="unilateral"),
            "holds a left_basis of embed.weight, which the optimizer does not",
        ),
        (
            ROTATED,
            rotated(max_side=60),
            "holds a left_basis of embed.weight, which the optimizer does not",
        ),
    ],
)
def test_a_new_cut_under_another_optimizer(ranks, tmp_path, old, new, said):
    ranks.run(first_part, tmp_path, [2, 2], 3, 3, {"kind": old}, world_size=2)
    with pytest.raises(RankError) as caught:
        ranks.run(second_part, tmp_path, [4], 5, {"kind": new}, world_size=1)
    assert caught.value.kind == InputError.__name__
    assert f"InputError: {tmp_path}: {said}\n" in str(caught.value)


def test_another_optimizer_under_the_same_cut(ranks, tmp_path):
    ranks.run(first_part, tmp_path, [2], 3, 3, {"kind": ROTATED}, world_size=1)
    said = "holds the state of BasisRotation, not of AdamW"
    with pytest.raises(RankError, match=said) as caught:
        ranks.run(second_part, tmp_path, [2], 5, {"kind": "adamw"}, world_size=1)
    assert caught.value.kind == InputError.__name__


def old_part(comm, folder, counts, until, changes):
    """Of a version that did not write the optimizer's class."""
    mine = pipeline(comm, counts, **changes)
    losses = mine.run(batch, until)
    write = resume._optimizer_state
    resume._optimizer_state = lambda *pair: {k: v for k, v in write(*pair).items() if k != "class"}
    try:
        save(Checkpoints(folder, 2, comm), mine, {})
    finally:
        resume._optimizer_state = write
    return losses


def test_a_checkpoint_that_does_not_name_its_optimizer(ranks, tmp_path):
    """Is read where it is sure to fit: by what a weight keeps, or under the same cut."""
    for kind, cuts in ((ROTATED, ([1, 2], [3])), ("adamw", ([3], [3]))):
        old, new = cuts
        changes, found = {"kind": kind}, []
        for part, spans in ((old_part, (3,)), (first_part, (3, 3))):
            folder = tmp_path / f"{part.__name__}_{len(old)}"
            ranks.run(part, folder, old, *spans, changes, world_size=len(old))
            ((_, losses, weights),) = ranks.run(second_part, folder, new, 5, changes, world_size=1)
            found.append((losses, {name: weight.tolist() for name, weight in weights.items()}))
        assert found[0] == found[1] and len(found[0][0]) == 2
    with pytest.raises(RankError, match="does not say whose state of embed.weight it holds"):
        ranks.run(old_part, tmp_path, [1, 2], 3, {"kind": "adamw"}, world_size=2)
        ranks.run(second_part, tmp_path, [3], 5, {"kind": "adamw"}, world_size=1)


def test_without_a_checkpoint_nothing_changes(ranks, tmp_path):
    assert ranks.run(nothing, tmp_path, world_size=1) == [({}, 0)]


def nothing(comm, folder):
    mine = pipeline(comm, [1])
    return load(Checkpoints(folder, 2, comm), mine), mine.updates
