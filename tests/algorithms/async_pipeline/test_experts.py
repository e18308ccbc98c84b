"""A mixture of experts under the pipeline, with every optimizer: experts are matrices each."""

import math

import pytest
import torch

from algorithms.async_pipeline.basis_rotation import BasisRotation
from algorithms.async_pipeline.config import PRESETS
from algorithms.async_pipeline.reference import Delayed
from algorithms.async_pipeline.stage import cut
from tests.pipelines import (
    WIDTH,
    assert_same,
    batch,
    model_of,
    optimizer_of,
    real,
    simulated,
    token_loss,
)

EXPERTS, INNER = 4, 12
SHAPES = {"gate_up_proj": (EXPERTS, 2 * INNER, WIDTH), "down_proj": (EXPERTS, WIDTH, INNER)}
every_preset = pytest.mark.parametrize("preset", PRESETS)


def delayed(preset, counts):
    stages = cut(model_of("qwen3_moe", sum(counts)), counts)
    return Delayed(stages, optimizer_of(PRESETS[preset]), token_loss, clip_norm=1.0)


def held_out(stages):
    with torch.no_grad():
        losses = []
        for index in range(1000, 1008):
            x, targets = batch(index)
            for stage in stages:
                x = stage(x)
            losses.append(token_loss(x, targets).item())
    return sum(losses) / len(losses)


def experts_of(stage):
    """Stacked weights by their name in the stage."""
    return {name: each for name, each in stage.named_parameters() if each.dim() == 3}


@every_preset
def test_a_few_updates_of_every_optimizer(preset):
    run = delayed(preset, [1, 1, 1])
    before = held_out(run.stages)
    losses = [run.microbatch(*batch(index)).item() for index in range(30)]
    assert all(map(math.isfinite, losses))
    assert held_out(run.stages) < before - 0.1
    for stage, optimizer in zip(run.stages, run.optimizers, strict=True):
        experts = experts_of(stage)
        assert {n.split(".")[-1]: tuple(w.shape) for n, w in experts.items()} == SHAPES
        for weight in experts.values():
            state = optimizer.state[weight]
            assert state["exp_avg"].shape == state["exp_avg_sq"].shape == weight.shape
            assert (state["exp_avg_sq"].flatten(1) > 0).any(dim=1).all()
            rotates = isinstance(optimizer, BasisRotation)
            assert rotates == (PRESETS[preset].rotation is not None)
            sides = {"left": weight.shape[1], "right": weight.shape[2]} if rotates else {}
            assert {n for n in state if n.endswith("basis")} == {f"{s}_basis" for s in sides}
            for side, length in sides.items():
                basis = state[f"{side}_basis"]
                assert basis.shape == (EXPERTS, length, length)
                identity = torch.eye(length).expand_as(basis)
                torch.testing.assert_close(basis.mT @ basis, identity, rtol=0, atol=1e-5)
                for one in range(EXPERTS):
                    for other in range(one):
                        assert (basis[one] - basis[other]).abs().max() > 0.1


@pytest.mark.parametrize("preset", ["paper", "ours"])
def test_experts_are_stepped_as_if_each_was_a_weight(preset):
    """From the gradients of a real run."""
    run = delayed(preset, [1, 1])
    alone = {}
    gradients = {}

    def note(optimizer, update):
        for group in optimizer.param_groups:
            gradients.update({id(each): each.grad.clone() for each in group["params"]})

    run.before_update = note
    for stage in run.stages:
        for name, weight in experts_of(stage).items():
            alone[name] = [torch.nn.Parameter(each.detach().clone()) for each in weight]
    optimizers = [
        optimizer_of(PRESETS[preset])(
            [(f"{n}.{e}", each) for n in experts_of(stage) for e, each in enumerate(alone[n])],
            k,
            len(run.stages),
        )
        for k, stage in enumerate(run.stages)
    ]
    for index in range(12):  # with a refresh
        run.microbatch(*batch(index))
        for stage, optimizer in zip(run.stages, optimizers, strict=True):
            for name, weight in experts_of(stage).items():
                for each, gradient in zip(alone[name], gradients[id(weight)], strict=True):
                    each.grad = gradient
            optimizer.step()
    for stage in run.stages:
        for name, weight in experts_of(stage).items():
            torch.testing.assert_close(torch.stack(alone[name]), weight, rtol=0, atol=2e-5)


@every_preset
def test_an_expert_that_no_token_chose_waits_unharmed(preset):
    """Its gradient is zero: only weight decay moves it, and what comes later moves it as others."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER))
    optimizer = optimizer_of(PRESETS[preset])([("experts.down_proj", weight)], 0, 1)
    first, decay = weight.detach().clone(), 1.0
    rates = []
    for step in range(24):  # with refreshes before and after
        weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(step))
        if step < 12:
            weight.grad[-1] = 0.0
            (group,) = optimizer.param_groups
            decay *= 1 - group["lr"] * group["weight_decay"]
        before = weight.detach().clone()
        optimizer.step()
        if step < 12:
            torch.testing.assert_close(weight[-1].detach(), decay * first[-1])
        rates.append((weight - before).square().mean(dim=(1, 2)).sqrt().tolist())
        assert all(map(math.isfinite, rates[-1]))
    assert rates[11][-1] < rates[11][0] / 20
    assert rates[0][0] / 10 < rates[12][-1] < 10 * rates[0][0]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.slow
def test_a_real_pipeline_is_the_reference(ranks, preset):
    changes = {"kind": PRESETS[preset], "family": "qwen3_moe"}
    results = ranks.run(real, [1, 2], 22, changes, world_size=2)
    assert_same(results, simulated([1, 2], 22, **changes))
