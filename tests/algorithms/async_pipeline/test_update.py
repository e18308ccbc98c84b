"""One update: clipped over all of a stage's parameters at once, or refused."""

import math

import pytest
import torch

from algorithms.async_pipeline.pipeline import Pipeline
from algorithms.async_pipeline.reference import Delayed
from algorithms.async_pipeline.synchronous import Synchronous, placement
from algorithms.async_pipeline.update import accumulate, apply, bad_weight, objective
from algorithms.common.errors import NonFiniteError


def stage(*gradients):
    weights = {f"w{index}": torch.nn.Parameter(torch.ones(2)) for index in range(len(gradients))}
    accumulate(weights, [None if g is None else torch.tensor(g) for g in gradients])
    return weights, torch.optim.SGD(weights.values(), lr=1.0)


def update(weights, optimizer, clip_norm):
    return apply(weights, optimizer, stage=2, update=7, clip_norm=clip_norm, before_update=None)


def test_the_norm_is_that_of_all_parameters_and_scales_them_alike():
    weights, optimizer = stage([3.0, 0.0], [0.0, 4.0], None)
    assert update(weights, optimizer, 1.0) == pytest.approx(5.0)
    torch.testing.assert_close(weights["w0"].data, torch.tensor([1 - 3 / 5, 1.0]))
    torch.testing.assert_close(weights["w1"].data, torch.tensor([1.0, 1 - 4 / 5]))
    assert all(weight.grad is None for weight in weights.values())


@pytest.mark.parametrize("clip_norm", [0.0, 9.0])
def test_what_is_not_clipped_is_not_touched(clip_norm):
    weights, optimizer = stage([3.0, 0.0], [0.0, 4.0])
    update(weights, optimizer, clip_norm)
    assert weights["w0"].tolist() == [-2.0, 1.0] and weights["w1"].tolist() == [1.0, -3.0]


def test_gradients_add_up_in_order():
    weights, _ = stage([1.0, 2.0])
    accumulate(weights, [torch.tensor([0.5, 0.25])])
    assert weights["w0"].grad.tolist() == [1.5, 2.25]


@pytest.mark.parametrize(
    ("gradients", "finding"),
    [
        (([1.0, 1.0], [math.inf, 0.0]), "gradient of w1 is not finite"),
        (([3e38, 3e38], [3e38, 3e38]), "the gradient's norm overflows"),
    ],
)
def test_a_bad_gradient_is_named_and_changes_nothing(gradients, finding):
    weights, optimizer = stage(*gradients)
    with pytest.raises(NonFiniteError, match=f"^update 7: stage 2: {finding}$"):
        update(weights, optimizer, 1.0)
    assert all(weight.tolist() == [1.0, 1.0] for weight in weights.values())


def test_a_bad_weight_is_named_before_a_gradient():
    weights, optimizer = stage([1.0, 1.0], [math.nan, 0.0])
    assert bad_weight(weights) == ""
    weights["w0"].data[1] = math.nan
    with pytest.raises(NonFiniteError, match="parameter w0 is not finite$"):
        update(weights, optimizer, 1.0)


def test_an_infinite_loss_has_a_gradient_that_shows_it():
    x = torch.tensor(1.0, requires_grad=True)
    assert objective(6.0 * x, 2).item() == 3.0
    objective(x + torch.inf, 1).backward()
    assert x.grad.isnan()


class Shares(torch.nn.Module):
    """Autograd gives one tensor to a and b, one to d and the input, and c one number, expanded."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (torch.nn.Parameter(torch.full((3, 5), each)) for each in (0.5, 0.75))
        self.c = torch.nn.Parameter(torch.linspace(-0.2, 0.1, 7))
        self.d = torch.nn.Parameter(torch.linspace(-1, 1, 15).view(3, 5))

    def forward(self, x):
        return (x + self.d) * (self.a + self.b) + self.c.sum()


def numbers(index):
    generator = torch.Generator().manual_seed(index)
    return torch.randn(3, 5, generator=generator), torch.randn(3, 5, generator=generator)


def distance(x, y):
    return (x - y).square().mean()


def sgd(named, stage, stages):
    return torch.optim.SGD([weight for _, weight in named], lr=0.1, momentum=0.5)


def plain(count, updates, accumulation, clip_norm=0.3):
    """Weights by stage after the ordinary loop, each stage clipped for itself."""
    stages = [Shares() for _ in range(count)]
    optimizers = [sgd(stage.named_parameters(), 0, 1) for stage in stages]
    for index in range(updates * accumulation):
        x, targets = numbers(index)
        for stage in stages:
            x = stage(x)
        (distance(x, targets) / accumulation).backward()
        if (index + 1) % accumulation == 0:
            for stage, optimizer in zip(stages, optimizers, strict=True):
                torch.nn.utils.clip_grad_norm_(stage.parameters(), clip_norm)
                optimizer.step()
                optimizer.zero_grad()
    return [[weight.tolist() for weight in stage.parameters()] for stage in stages]


def trained(comm, schedule, updates, accumulation):
    """Weights of this rank's stages."""
    if schedule == "async":
        (mine, delays) = ([Shares()], [0] * comm.world_size)
        settings = {"delays": delays, "accumulation": accumulation, "clip_norm": 0.3}
        Pipeline(mine[0], sgd, distance, comm, **settings).run(numbers, updates)
    else:
        mine = [Shares() for _ in placement(schedule, comm.world_size)[comm.rank]]
        settings = {"schedule": schedule, "microbatches": accumulation, "clip_norm": 0.3}
        Synchronous(mine, sgd, distance, comm, **settings).run(numbers, updates)
    return [[weight.tolist() for weight in each.parameters()] for each in mine]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_reference_separates_gradients_that_share_memory(accumulation):
    stages = [Shares() for _ in range(3)]
    settings = {"delays": [0] * 3, "accumulation": accumulation, "clip_norm": 0.3}
    mine = Delayed(stages, sgd, distance, **settings)
    for index in range(4 * accumulation):
        mine.microbatch(*numbers(index))
    found = [[weight.tolist() for weight in each.parameters()] for each in stages]
    assert found == plain(3, 4, accumulation)


@pytest.mark.parametrize(
    ("schedule", "world", "accumulation"),
    [("async", 1, 1), ("async", 3, 1), ("async", 2, 3), ("gpipe", 1, 2), ("gpipe", 3, 1)]
    + [("one_f_one_b", 2, 2), ("zero_bubble", 2, 2), ("zero_bubble", 2, 4)],
)
def test_pipelines_separate_gradients_that_share_memory(ranks, schedule, world, accumulation):
    results = ranks.run(trained, schedule, 4, accumulation, world_size=world)
    expected = plain(2 * world if schedule == "zero_bubble" else world, 4, accumulation)
    for rank, indices in enumerate(placement(schedule, world)):
        assert results[rank] == [expected[index] for index in indices]
