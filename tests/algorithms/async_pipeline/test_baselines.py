"""The optimizer of a stage: which it is, at which rate, and how often it refreshes."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.optim import AdamW, NAdam

from algorithms.async_pipeline.baselines import build, rate, refresh_interval
from algorithms.async_pipeline.basis_rotation import BasisRotation
from algorithms.async_pipeline.config import PRESETS, RotationConfig
from algorithms.common.errors import InputError

NAMES = {
    "model.embed_tokens.weight": (20, 8),
    "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "model.layers.0.mlp.experts.down_proj": (2, 8, 12),
    "model.layers.0.input_layernorm.weight": (8,),
    "lm_head.weight": (20, 8),
}


def named(dtype: torch.dtype = torch.float64) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        for name, shape in NAMES.items()
    }


def train(weights: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for weight in weights.values():
            weight.grad = torch.randn(weight.shape, generator=generator, dtype=torch.float64).to(
                weight.dtype
            )
        optimizer.step()


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_steps_all_weights_of_a_stage(name):
    for stage in (0, 3):
        weights = named()
        before = {key: each.detach().clone() for key, each in weights.items()}
        optimizer = build(weights.items(), PRESETS[name], stage=stage, stages=4)
        train(weights, optimizer, 3)
        for key, weight in weights.items():
            assert (weight != before[key]).all()
        expected = rate(PRESETS[name], PRESETS[name].optimizer.lr, delay=3 - stage, update=0)
        assert {group["lr"] for group in optimizer.param_groups} == {expected}


@pytest.mark.parametrize("name, cls", [("adamw", AdamW), ("nesterov", NAdam)])
def test_baselines_are_torchs(name, cls):
    ours, theirs = named(), named()
    train(ours, build(ours.items(), PRESETS[name], stage=0, stages=4), 5)
    settings = {"lr": 1e-3, "weight_decay": 0.01}
    if cls is NAdam:
        settings |= {"betas": (0.99, 0.999), "decoupled_weight_decay": True}
    norm = theirs["model.layers.0.input_layernorm.weight"]
    rest = [each for each in theirs.values() if each is not norm]
    train(theirs, cls([{"params": rest}, {"params": [norm], "weight_decay": 0}], **settings), 5)
    for key, weight in ours.items():
        torch.testing.assert_close(weight, theirs[key], rtol=0, atol=1e-13)


def test_the_vocabulary_is_under_adamw_or_rotated_on_its_short_side():
    sides = {}
    for preset in ("paper", "ours"):
        weights = named()
        optimizer = build(weights.items(), PRESETS[preset], stage=0, stages=1)
        sides[preset] = {
            name: sorted(key for key in optimizer.state[each] if key.endswith("basis"))
            for name, each in weights.items()
        }
    both, vocabulary = ["left_basis", "right_basis"], ["embed_tokens", "lm_head"]
    for preset, short in (("paper", []), ("ours", ["right_basis"])):
        for name, found in sides[preset].items():
            if "norm" in name:
                assert found == []
            else:
                assert found == (short if any(v in name for v in vocabulary) else both), name


def test_names_are_compared_as_a_whole():
    """A module that is only called alike is no vocabulary."""
    weights = {"layers.0.lm_head_mlp.weight": nn.Parameter(torch.randn(4, 6))}
    optimizer = build(weights.items(), PRESETS["paper"], stage=0, stages=1)
    (weight,) = weights.values()
    assert "left_basis" in optimizer.state[weight]


def test_weight_decay_goes_to_matrices_only():
    for name, preset in PRESETS.items():
        weights = named()
        optimizer = build(weights.items(), preset, stage=0, stages=2)
        for group in optimizer.param_groups:
            expected = 0.01 if group["params"][0].dim() >= 2 else 0.0
            assert group["weight_decay"] == expected, name


def test_rates_of_stages():
    plain, power = PRESETS["adamw"], PRESETS["ours"]
    assert rate(plain, 0.1, delay=7, update=0) == 0.1
    assert rate(power, 0.1, delay=7, update=5) == pytest.approx(0.1 / 8**0.75)
    assert rate(power, 0.1, delay=0, update=5) == 0.1
    strengthened = dataclasses.replace(PRESETS["nesterov"], rate_power=1.0)
    assert rate(strengthened, 0.1, delay=4, update=9) == pytest.approx(0.02)


def test_pipedream_lr_starts_at_lr_over_tau_and_ends_at_lr():
    config = dataclasses.replace(PRESETS["pipedream_lr"], correction_steps=10)
    rates = [rate(config, 1.0, delay=4, update=update) for update in (0, 5, 10, 100)]
    assert rates == pytest.approx([1 / 4, 1 / 2, 1, 1])
    assert [rate(config, 1.0, delay=tau, update=0) for tau in (0, 1)] == [1, 1]
    both = dataclasses.replace(config, rate_power=1.0)
    assert rate(both, 1.0, delay=4, update=0) == pytest.approx(1 / 20)


def test_refresh_budgets_share_the_same_number_of_refreshes():
    delays = range(7, -1, -1)
    intervals = {
        budget: [
            refresh_interval(
                RotationConfig(refresh_every=50, refresh_budget=budget), stage=k, delays=delays
            )
            for k in range(8)
        ]
        for budget in ("uniform", "stage_aware", "reversed")
    }
    assert intervals["uniform"] == [50] * 8
    assert intervals["stage_aware"] == [27, 31, 36, 44, 57, 80, 133, 400]
    assert intervals["reversed"] == intervals["stage_aware"][::-1]
    for found in intervals.values():
        assert sum(1 / f for f in found) == pytest.approx(8 / 50, rel=0.01)


def test_intervals_are_at_least_one_and_reach_the_optimizer():
    rotation = RotationConfig(refresh_every=1, refresh_budget="stage_aware")
    assert refresh_interval(rotation, stage=0, delays=[3, 2, 1, 0]) == 1
    assert refresh_interval(rotation, stage=0, delays=[0]) == 1
    config = dataclasses.replace(
        PRESETS["ours"], rotation=dataclasses.replace(rotation, refresh_every=10)
    )
    weights = named()
    optimizer = build(weights.items(), config, stage=3, stages=4, delays=[28, 20, 10, 4])
    assert isinstance(optimizer, BasisRotation)
    expected = round(10 * 64 / (4 * 4.5))
    assert {group["refresh_every"] for group in optimizer.param_groups} == {expected}
    assert optimizer.param_groups[0]["lr"] == pytest.approx(4e-3 / 5**0.75)


def test_a_delay_of_nothing_is_plain_training():
    """P=1: rates, refreshes and steps are those of the optimizer alone."""
    ours, theirs = named(), named()
    train(ours, build(ours.items(), PRESETS["paper"], stage=0, stages=1), 12)
    plain = BasisRotation(
        [
            {
                "params": [
                    each for key, each in theirs.items() if "layers" in key and each.dim() > 1
                ]
            },
            {
                "params": [theirs["model.embed_tokens.weight"], theirs["lm_head.weight"]],
                "geometry": "none",
            },
            {"params": [theirs["model.layers.0.input_layernorm.weight"]], "weight_decay": 0.0},
        ]
    )
    train(theirs, plain, 12)
    for key, weight in ours.items():
        assert torch.equal(weight, theirs[key]), key


@pytest.mark.parametrize("stage", [-1, 4])
def test_a_stage_that_is_not_there_is_refused(stage):
    with pytest.raises(InputError, match=f"^stage: is {stage}, out of range$"):
        build([], PRESETS["ours"], stage=stage, stages=4)
