"""What all optimizers of matrices have in common, each of them."""

import pytest
import torch
from torch import nn
from torch.optim import Adam, AdamW

from algorithms.async_pipeline.basis_rotation import BasisRotation
from algorithms.common.errors import InputError
from algorithms.lordo.muon import LowRankMuon, Muon
from algorithms.lordo.optimizer import LoRDO

KINDS = {
    "rotation": (BasisRotation, {}),
    "rotation none": (BasisRotation, {"geometry": "none"}),
    "lordo": (LoRDO, {"rank": 2}),
    "muon": (Muon, {"matrices": True}),
    "muon grad": (Muon, {"matrices": True, "momentum": "grad"}),
    "muon int8": (Muon, {"matrices": True, "momentum": "int8"}),
    "low rank muon": (LowRankMuon, {"rank": 2}),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def trained(kind, shape, dense=(3,), make=None):
    """After a step over a matrix, and a vector in a group of its own."""
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(each)) for each in (shape, dense)]
    cls, own = KINDS[kind]
    groups = [{"params": weights[:1], **({} if make else own)}, {"params": weights[1:]}]
    optimizer = (make or cls)(groups, lr=0.1)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("other", [((1, 8), (3,)), ((4, 1), (3,)), ((4, 8), (1,)), ((5, 8), (3,))])
@every_kind
def test_the_state_of_weights_of_another_shape_is_refused(kind, other):
    """Not spread over what is there, as torch copies."""
    optimizer = trained(kind, (4, 8))
    with pytest.raises(InputError, match=r"^state_dict: holds no \w+ of shape \("):
        optimizer.load_state_dict(trained(kind, *other).state_dict())


@pytest.mark.parametrize("make", [Adam, AdamW])
@every_kind
def test_the_state_of_another_optimizer_is_refused(kind, make):
    optimizer = trained(kind, (4, 8))
    with pytest.raises(InputError, match=r"^state_dict: a group has no \w+: it is another"):
        optimizer.load_state_dict(trained(kind, (4, 8), make=make).state_dict())


@pytest.mark.parametrize("bad", [{"lr": -1.0}, {"betas": (0.9, 1.0)}, {"betas": None}, "own"])
@every_kind
def test_a_group_that_is_refused_is_not_added(kind, bad):
    """The others go on, and it can be added once it is right."""
    optimizer, twin = trained(kind, (4, 8)), trained(kind, (4, 8))
    cls, own = KINDS[kind]
    if bad == "own":
        name = {LoRDO: "rank", LowRankMuon: "rank", Muon: "momentum"}.get(cls, "refresh_every")
        bad = {name: -1}
    later = [nn.Parameter(torch.full((3, 5), 0.5)) for _ in range(2)]
    kept = len(optimizer.state)
    with pytest.raises((InputError, TypeError)):
        optimizer.add_param_group({"params": later[:1]} | own | bad)
    assert len(optimizer.param_groups) == 2 and len(optimizer.state) == kept
    for each, weight in zip((optimizer, twin), later, strict=True):
        each.step()
        each.add_param_group({"params": [weight]} | own)
        weight.grad = torch.ones_like(weight)
        each.step()
    for ours, other in zip(optimizer.param_groups, twin.param_groups, strict=True):
        assert all(map(torch.equal, ours["params"], other["params"]))
    assert not torch.equal(later[0], torch.full((3, 5), 0.5))


OTHERWISE = {
    "rotation": {"geometry": "none"},
    "rotation none": {"geometry": "bilateral"},
    "lordo": {"rank": 0},
    "muon": {"momentum": "grad"},
    "muon grad": {"momentum": "fp32"},
    "muon int8": {"matrices": False},
    "low rank muon": {"carry": 0.5},
}


@every_kind
def test_an_option_that_asks_for_other_state_is_refused_when_cohorts_change(kind):
    """Not at the cost of what is there: with the option as it was all goes on."""
    optimizer, twin = trained(kind, (4, 8)), trained(kind, (4, 8))
    group = optimizer.param_groups[0]
    before = {name: group[name] for name in OTHERWISE[kind]}
    state = {name: each.clone() for name, each in optimizer.state[group["params"][0]].items()}
    group.update(OTHERWISE[kind])
    with pytest.raises(
        InputError, match=r"does not go with the state of weights \(4, 8\), for its"
    ):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 3))]})
    found = optimizer.state[group["params"][0]]
    assert found.keys() == state.keys()
    assert all(torch.equal(each, found[name]) for name, each in state.items())
    group.update(before)
    for each in (optimizer, twin):
        each.step()
    assert torch.equal(group["params"][0], twin.param_groups[0]["params"][0])
