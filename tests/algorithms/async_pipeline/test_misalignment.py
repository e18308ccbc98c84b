"""Misalignment against the whole Hessian of a small model, in float64."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.func import functional_call

from algorithms.async_pipeline.baselines import build
from algorithms.async_pipeline.basis_rotation import BasisRotation
from algorithms.async_pipeline.config import PRESETS
from algorithms.async_pipeline.misalignment import (
    bases_of,
    hessian_products,
    misalignment,
    trained,
    turn,
)
from algorithms.async_pipeline.reference import Delayed
from algorithms.async_pipeline.stage import cut
from algorithms.common.errors import InputError
from tests import pipelines


def sigma(draws):
    """Relative standard deviation of an estimate, at most: both norms at their worst."""
    return (math.pi / 2 + math.sqrt(0.5)) / math.sqrt(draws)


class Experts(nn.Module):
    """x + sum_e tanh(W_e x), with stacked weights."""

    def __init__(self, experts, width):
        super().__init__()
        self.weight = nn.Parameter(0.5 * torch.randn(experts, width, width))

    def forward(self, x):
        return x + torch.einsum("eoi,bi->beo", self.weight, x).tanh().sum(1)


def small_stages():
    """Uneven: a matrix and a bias, a vector alone, three experts and two matrices."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(2, 3), nn.Tanh())
    last = nn.Sequential(Experts(3, 3), nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2, bias=False))
    return [each.double() for each in (first, nn.LayerNorm(3, bias=False), last)]


def square_loss(output, targets):
    return (output - targets).square().mean()


def batch(index):
    generator = torch.Generator().manual_seed(index)
    inputs, targets = torch.randn(2, 5, 2, generator=generator, dtype=torch.float64)
    return inputs, targets


BATCHES = [batch(100), batch(101)]


def trained_small(preset):
    """Stages and optimizers after a few delayed updates; paper and ours have bases by then."""
    stages = small_stages()

    def factory(named, k, count):
        return build(named, PRESETS[preset], stage=k, stages=count)

    run = Delayed(stages, factory, square_loss)
    for index in range(12):
        run.microbatch(*batch(index))
    return stages, run.optimizers


def exact_hessian(stages, k):
    """H of stage k, `[n, n]`."""
    weights = dict(stages[k].named_parameters())
    sizes = [weight.numel() for weight in weights.values()]

    def loss_at(flat):
        parts = zip(weights, flat.split(sizes), strict=True)
        own = {name: part.view_as(weights[name]) for name, part in parts}
        values = []
        for x, targets in BATCHES:
            for index, stage in enumerate(stages):
                x = functional_call(stage, own, (x,)) if index == k else stage(x)
            values.append(square_loss(x, targets))
        return torch.stack(values).mean()

    flat = torch.cat([weight.detach().flatten() for weight in weights.values()])
    return torch.autograd.functional.hessian(loss_at, flat)


def exact_turn(stage, optimizer):
    """Q, `[n, n]`: U kron V of each matrix, the identity for all else."""
    blocks = []
    for weight in stage.parameters():
        if weight.dim() < 2:
            blocks.append(torch.eye(weight.numel(), dtype=weight.dtype))
            continue
        state = optimizer.state[weight]
        left, right = (state[f"{side}_basis"] for side in ("left", "right"))
        experts = zip(*(each.reshape(-1, *each.shape[-2:]) for each in (left, right)), strict=True)
        blocks += [torch.kron(U, V) for U, V in experts]
    return torch.block_diag(*blocks)


def exact(H):
    return (H.abs().sum() / H.norm()).item()


def unit_vectors(stage):
    return torch.eye(sum(weight.numel() for weight in stage.parameters()), dtype=torch.float64)


@pytest.mark.parametrize("k", [0, 1, 2])
def test_products_are_those_with_the_whole_hessian(k):
    stages, _ = trained_small("adamw")
    found = hessian_products(stages, k, square_loss, BATCHES, unit_vectors(stages[k]))
    torch.testing.assert_close(found, exact_hessian(stages, k), rtol=0, atol=1e-13)
    assert found.abs().max() > 0.01


@pytest.mark.parametrize("k", [0, 1, 2])
def test_rotated_products_are_those_with_the_rotated_hessian(k):
    stages, optimizers = trained_small("paper")
    weights = trained(stages[k])
    turns = bases_of(weights, optimizers[k])
    Q = exact_turn(stages[k], optimizers[k])
    eye = unit_vectors(stages[k])
    torch.testing.assert_close(turn(eye, weights, turns, back=True), Q.T, rtol=0, atol=1e-14)
    there = hessian_products(stages, k, square_loss, BATCHES, turn(eye, weights, turns, back=True))
    expected = Q.T @ exact_hessian(stages, k) @ Q
    torch.testing.assert_close(turn(there, weights, turns), expected, rtol=0, atol=1e-13)


def test_estimates_are_the_exact_numbers_within_their_error():
    stages, optimizers = trained_small("paper")
    draws = 501
    found = misalignment(stages, square_loss, BATCHES, optimizers, draws=draws, seed=0)
    for k, stage in enumerate(stages):
        H, Q = exact_hessian(stages, k), exact_turn(stage, optimizers[k])
        assert found[k].original == pytest.approx(exact(H), rel=3 * sigma(draws))
        assert found[k].rotated == pytest.approx(exact(Q.T @ H @ Q), rel=3 * sigma(draws))
        assert found[k].ratio == found[k].rotated / found[k].original
    assert found[1].rotated == found[1].original  # a vector is not rotated
    assert found[2].rotated != found[2].original


def test_eigenvectors_make_the_hessian_diagonal():
    """Of tr(A W B W^T) / 2, whose Hessian is A kron B: known in closed form."""
    torch.manual_seed(0)
    curvatures = [torch.tensor([5.0, 1.0, 0.2]).double(), torch.tensor([2.0, 0.5]).double()]
    turned = [torch.linalg.qr(torch.randn(len(c), len(c)).double()).Q for c in curvatures]
    A, B = (Q * c @ Q.T for Q, c in zip(turned, curvatures, strict=True))
    stage = nn.Linear(2, 3, bias=False).double()
    optimizer = BasisRotation(stage.parameters())
    stage.weight.grad = torch.ones_like(stage.weight)
    optimizer.step()
    for side, Q in zip(("left", "right"), turned, strict=True):
        optimizer.state[stage.weight][f"{side}_basis"].copy_(Q)

    def quadratic(output, targets):
        return torch.trace(A @ output.T @ B @ output) / 2

    batches = [(torch.eye(2).double(), torch.empty(0))]
    draws = 4001
    (found,) = misalignment([stage], quadratic, batches, [optimizer], draws=draws, seed=1)
    diagonal = torch.outer(*curvatures)
    assert found.rotated == pytest.approx(exact(diagonal), rel=3 * sigma(draws))
    assert found.original == pytest.approx(exact(torch.kron(A, B)), rel=3 * sigma(draws))
    assert found.ratio < 0.7


def test_identity_bases_give_the_same_number():
    stages, optimizers = trained_small("paper")
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for name in ("left_basis", "right_basis"):
                if name in state:
                    state[name].copy_(torch.eye(state[name].shape[-1]))
    for found in misalignment(stages, square_loss, BATCHES, optimizers, draws=11, seed=0):
        assert found.rotated == found.original > 0


@pytest.mark.parametrize("preset", ["adamw", "nesterov", None])
def test_without_bases_both_are_one_number(preset):
    stages, optimizers = trained_small(preset or "adamw")
    given = None if preset is None else optimizers
    for found in misalignment(stages, square_loss, BATCHES, given, draws=5, seed=0):
        assert found.rotated == found.original > 0 and found.ratio == 1


def test_before_the_first_step_nothing_is_rotated():
    stages = small_stages()
    optimizers = [BasisRotation(stage.parameters()) for stage in stages]
    for found in misalignment(stages, square_loss, BATCHES, optimizers, draws=5, seed=0):
        assert found.rotated == found.original > 0


def test_one_side_alone_is_rotated():
    stages, _ = trained_small("adamw")
    optimizers = [BasisRotation(stage.parameters(), geometry="unilateral") for stage in stages]
    for stage, optimizer in zip(stages, optimizers, strict=True):
        x = BATCHES[0][0]
        for each in stages:
            x = each(x)
        square_loss(x, BATCHES[0][1]).backward()
        optimizer.step()
        weights = trained(stage)
        eye = unit_vectors(stage)
        turns = bases_of(weights, optimizer)
        there = turn(eye, weights, turns)
        torch.testing.assert_close(turn(there, weights, turns, back=True), eye)
        assert torch.equal(there, eye) == (len(weights) == 1)


def test_seeds_are_all_that_is_random():
    stages, optimizers = trained_small("ours")
    settings = {"draws": 5, "seed": 3}
    first = misalignment(stages, square_loss, BATCHES, optimizers, **settings)
    assert first == misalignment(stages, square_loss, BATCHES, optimizers, **settings)
    settings["seed"] = 4
    assert first != misalignment(stages, square_loss, BATCHES, optimizers, **settings)


def test_a_zero_hessian_has_none():
    """Linear in the weights of either stage; of the first, with a gradient that has a graph."""
    stages = [nn.Linear(2, 3, bias=False), nn.Linear(3, 2, bias=False)]

    def linear(output, targets):
        return output.sum()

    found = misalignment(stages, linear, [(torch.ones(4, 2), torch.empty(0))], draws=5, seed=0)
    assert all(math.isnan(value) for each in found for value in (each.original, each.ratio))


def test_a_stage_that_is_frozen_has_none():
    stages = small_stages()
    plain = misalignment(stages, square_loss, BATCHES, draws=5, seed=0)
    stages[1].requires_grad_(False)
    first, frozen, last = misalignment(stages, square_loss, BATCHES, draws=5, seed=0)
    assert math.isnan(frozen.original) and math.isnan(frozen.ratio)
    assert (first, last) == (plain[0], plain[2])


class Cast(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, x):
        return x.to(self.dtype)


@pytest.mark.parametrize("geometry", ["unilateral", "bilateral"])
@pytest.mark.parametrize("dtype, exact", [(torch.bfloat16, 0.06), (torch.float16, 0.01)])
def test_narrow_weights_have_the_numbers_of_wide_ones(dtype, exact, geometry):
    """Of the same values, with the same bases and draws; also beside a norm in float32."""
    stages = [each.to(dtype) for each in small_stages()]
    stages[1] = nn.Sequential(Cast(torch.float32), stages[1].float(), Cast(dtype))
    stages[2].insert(0, nn.LayerNorm(3, bias=False).to(dtype))
    mixed = nn.Sequential(nn.Linear(2, 3, dtype=dtype), Cast(torch.float32), nn.LayerNorm(3))
    stages.append(mixed)
    batches = [tuple(each.to(dtype) for each in pair) for pair in BATCHES]
    optimizers = [BasisRotation(stage.parameters(), geometry=geometry) for stage in stages]
    x = batches[0][0]
    for stage in stages:
        x = stage(x)
    x.square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()

    def loss(output, targets):
        return output.float().square().mean() + output.float().sin().sum()

    wide = copy.deepcopy(stages)
    for stage in wide:
        stage.float()
        for module in stage.modules():
            if isinstance(module, Cast):
                module.dtype = torch.float32
    others = [BasisRotation(stage.parameters(), geometry=geometry) for stage in wide]
    for ours, theirs in zip(others, optimizers, strict=True):
        ours.load_state_dict(theirs.state_dict())
    given = {"draws": 21, "seed": 1}
    found = misalignment(stages, loss, batches, optimizers, **given)
    pairs = [tuple(each.float() for each in pair) for pair in batches]
    expected = misalignment(wide, loss, pairs, others, **given)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.original == pytest.approx(theirs.original, rel=exact, abs=0)
        assert ours.rotated == pytest.approx(theirs.rotated, rel=exact, abs=0)
    assert [each.rotated == each.original for each in found] == [False, True, False, False]


def test_draws_that_float16_cannot_hold_do_not_overflow():
    stage = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Tanh())
    products = []
    for dtype in (torch.float16, torch.float32):
        batches = [(torch.ones(4, 2, dtype=dtype), torch.zeros(4, 3, dtype=dtype))]
        vectors = torch.tensor([[1e6, -2e5, 3.0, 70000.0, 0.0, 1.0], [3.0] * 6])
        products.append(
            hessian_products([stage.half().to(dtype)], 0, square_loss, batches, vectors)
        )
    assert products[0].isfinite().all()
    for ours, theirs in zip(*products, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0.01 * theirs.abs().max().item())


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3_moe"])
def test_decoders_with_fused_attention(family):
    """As with eager attention; the model is left as it was."""
    batches = [pipelines.batch(0)]
    products = []
    for attention in ("sdpa", "eager"):
        model = pipelines.model_of(family, 2)
        model.set_attn_implementation(attention)
        stages = cut(model, [1, 1])
        before = pipelines.weights_of(model)
        sizes = [sum(weight.numel() for weight in trained(stage)) for stage in stages]
        for k, size in enumerate(sizes):
            v = torch.randn(1, size, generator=torch.Generator().manual_seed(k))
            products.append(hessian_products(stages, k, pipelines.token_loss, batches, v))
        assert model.config._attn_implementation == attention
        assert torch.backends.cuda.flash_sdp_enabled()
        for name, weight in model.named_parameters():
            assert weight.grad is None and torch.equal(weight, before[name])
    for fused, eager in zip(products[:2], products[2:], strict=True):
        torch.testing.assert_close(fused, eager, rtol=0, atol=1e-4 * eager.abs().max().item())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draws": 4}, "^draws: must be odd, not 4"),
        ({"draws": -1}, "^draws: must be odd, not -1"),
        ({"batches": []}, "^batches: "),
        ({"optimizers": []}, "^optimizers: 0 for 3 stages"),
    ],
)
def test_what_cannot_be_is_refused(changes, message):
    settings = {"batches": BATCHES, "draws": 5, "seed": 0} | changes
    with pytest.raises(InputError, match=message):
        misalignment(small_stages(), square_loss, **settings)
