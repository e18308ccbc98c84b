"""What the released code of basis rotation gets wrong, where an optimizer can."""

import logging

import pytest
import torch
from torch import nn

from algorithms.async_pipeline import basis_rotation
from algorithms.async_pipeline.basis_rotation import BasisRotation
from algorithms.common.errors import InputError
from algorithms.common.memory import optimizer_bytes

KINDS = [(s, g) for s in ("first", "second") for g in ("unilateral", "bilateral")]
every_kind = pytest.mark.parametrize("source, geometry", KINDS)


def gradient(shape: tuple[int, ...], step: int, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def train(optimizer: BasisRotation, weights: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        for place, weight in enumerate(weights):
            weight.grad = gradient(weight.shape, 10 * step + place, weight.dtype)
        optimizer.step()


@pytest.mark.parametrize("shape", [(4, 4), (6, 4), (4, 6)])
@every_kind
def test_bases_change_every_f_steps_and_in_no_other(shape, source, geometry):
    weight = nn.Parameter(gradient(shape, 0))
    optimizer = BasisRotation([weight], source=source, geometry=geometry, refresh_every=5)
    names = [name for name in optimizer.state[weight] if name.endswith("basis")]
    assert names
    for name in names:
        changes, before = [], torch.zeros(())
        for step in range(1, 21):
            train(optimizer, [weight], range(step, step + 1))
            after = optimizer.state[weight][name].clone()
            if not torch.equal(before, after):
                changes.append(step)
            before = after
        assert changes == [1, 5, 10, 15, 20]
        optimizer = BasisRotation([weight], source=source, geometry=geometry, refresh_every=5)


def test_one_sided_momentum_basis_follows_the_singular_vectors():
    """And v is sorted along the side that is rotated, so the step goes on as it was."""
    generator = torch.Generator().manual_seed(0)
    turned = torch.linalg.qr(torch.randn(4, 4, generator=generator, dtype=torch.float64)).Q
    rows = torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=torch.float64)
    weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.float64))
    optimizer = BasisRotation([weight], source="first", geometry="unilateral", refresh_every=1)
    for _ in range(30):
        weight.grad = rows[:, None] * turned
        optimizer.step()
    basis = optimizer.state[weight]["right_basis"]
    torch.testing.assert_close((turned @ basis).abs(), torch.eye(4).double().flip(0))
    energies = optimizer.state[weight]["exp_avg_sq"].sum(0)  # of columns: of singular vectors
    assert (energies.diff() < 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@every_kind
def test_other_dtypes_step_and_refresh(dtype, source, geometry):
    weights = [nn.Parameter(gradient(s, 0, dtype)) for s in ((8, 8), (3, 4, 6), (5,))]
    before = [each.detach().clone() for each in weights]
    options = {"source": source, "geometry": geometry, "refresh_every": 2}
    optimizer = BasisRotation(weights, 0.1, **options)
    train(optimizer, weights, range(1, 6))
    kept = torch.float64 if dtype == torch.float64 else torch.float32
    for weight, old in zip(weights, before, strict=True):
        assert weight.dtype == dtype and weight.isfinite().all() and not torch.equal(weight, old)
        assert {each.dtype for n, each in optimizer.state[weight].items() if n != "step"} == {kept}
    # Resuming must not round the state to the weights' dtype.
    copies = [nn.Parameter(each.detach().clone()) for each in weights]
    resumed = BasisRotation(copies, **options)
    resumed.load_state_dict(optimizer.state_dict())
    train(optimizer, weights, range(6, 10))
    train(resumed, copies, range(6, 10))
    assert all(torch.equal(a, b) for a, b in zip(weights, copies, strict=True))


def test_weights_of_any_shape_move_and_experts_each_on_their_own():
    shapes = [(), (5,), (4, 6), (3, 4, 6), (2, 3, 4, 6)]
    weights = [nn.Parameter(gradient(shape, 0, torch.float64)) for shape in shapes]
    before = [each.detach().clone() for each in weights]
    train(BasisRotation(weights), weights, range(1, 3))
    assert all((a != b).all() for a, b in zip(weights, before, strict=True))
    stacked = nn.Parameter(gradient((3, 4, 4), 1, torch.float64))
    alone = [nn.Parameter(each.detach().clone()) for each in stacked]
    together, apart = (BasisRotation(w, refresh_every=2) for w in ([stacked], alone))
    for step in range(1, 6):
        stacked.grad = gradient((3, 4, 4), step, torch.float64)
        for expert, given in zip(alone, stacked.grad, strict=True):
            expert.grad = given.clone()
        together.step()
        apart.step()
    for expert, other in zip(alone, stacked, strict=True):
        torch.testing.assert_close(expert.detach(), other.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
@every_kind
def test_the_first_step_is_no_noise(scale, source, geometry):
    """The first gradient is diagonal in its own bases: what rounding leaves beside it must not
    become steps of full size. So float32 must do what float64 does."""
    found = []
    for dtype in (torch.float32, torch.float64):
        weight = nn.Parameter(torch.zeros(64, 48, dtype=dtype))
        weight.grad = (scale * gradient((64, 48), 1)).to(dtype)
        optimizer = BasisRotation([weight], 1.0, weight_decay=0.0, source=source, geometry=geometry)
        optimizer.step()
        found.append(weight.detach().double())
    assert (found[0] - found[1]).square().mean().sqrt() < 0.01
    assert found[1].abs().max() < 5


def test_directions_without_gradient_stand_still():
    """A null space that all gradients share: what rounding leaves in it is no step either."""
    turned = torch.linalg.qr(gradient((32, 32), 0)).Q
    weight = nn.Parameter(torch.zeros(32, 16))
    optimizer = BasisRotation([weight], 1.0, weight_decay=0.0, refresh_every=2)
    for step in range(1, 12):
        weight.grad = turned[:, :20] @ gradient((20, 16), step)
        optimizer.step()
    moved = (turned.T @ weight.detach()).square().mean(dim=1).sqrt()
    assert moved[20:].max() < 0.1 < moved[:20].min()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("when", [1, 4])
@every_kind
def test_a_gradient_that_is_not_finite_changes_nothing_of_its_weight(
    bad, when, source, geometry, caplog
):
    """Nor does one whose square is not. The others step, and all go on as if it had not been."""
    shapes = [(4, 6), (4, 6), (4, 4), (3, 4, 4), (5,)]
    options = {"source": source, "geometry": geometry, "refresh_every": 3}
    weights, others = (
        [nn.Parameter(gradient(shape, place)) for place, shape in enumerate(shapes)]
        for _ in range(2)
    )
    optimizer, twin = BasisRotation(weights, **options), BasisRotation(others, **options)
    for step in range(1, 9):
        for place, (weight, other) in enumerate(zip(weights, others, strict=True)):
            weight.grad = gradient(weight.shape, 10 * step + place)
            other.grad = weight.grad.clone()
            if step in (when, when + 1) and place in (1, 3, 4):
                weight.grad.view(-1)[2] = bad
                other.grad = None
        before = [each.detach().clone() for each in weights]
        with caplog.at_level(logging.WARNING):
            optimizer.step()
        twin.step()
        assert weights[1].grad is not None
        stood = [torch.equal(a, b) for a, b in zip(weights, before, strict=True)]
        assert stood == [place in (1, 3, 4) and step in (when, when + 1) for place in range(5)]
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))
    assert len(caplog.records) == 1
    assert "3 weights of shape (3, 4, 4), (4, 6), (5,)" in caplog.records[0].message


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@every_kind
def test_a_finite_gradient_is_taken_whatever_its_norm(dtype, source, geometry, caplog):
    """That of a matrix of float16 may be above all that float16 holds."""
    weight = nn.Parameter(torch.ones(64, 64, dtype=dtype))
    optimizer = BasisRotation([weight], 0.1, source=source, geometry=geometry)
    weight.grad = gradient((64, 64), 1, dtype).sign() * 3000
    optimizer.step()
    assert not caplog.records
    assert not torch.equal(weight, torch.ones_like(weight))


def test_cohorts_are_laid_out_anew_only_when_who_has_gradients_changes(monkeypatch):
    """After a gradient was left out ages differ for good; that must not cost every step."""
    weights = [nn.Parameter(gradient((4, 4), place)) for place in range(3)]
    optimizer = BasisRotation(weights)
    train(optimizer, weights, range(1, 3))
    count = 0
    original = BasisRotation._lay_out

    def counted(self):
        nonlocal count
        count += 1
        original(self)

    monkeypatch.setattr(BasisRotation, "_lay_out", counted)
    weights[0].grad = None
    optimizer.step()
    train(optimizer, weights, range(4, 12))
    assert count == 2


def test_other_directions_of_the_longer_side_are_kept():
    """With bases of the momentum the longer side has more directions than there are singular
    vectors: v along them means something only as long as they do not jump."""
    weight = nn.Parameter(torch.zeros(3, 8, dtype=torch.float64))
    optimizer = BasisRotation([weight], source="first", refresh_every=1)
    row = gradient((3, 8), 1, torch.float64)
    for step in range(2, 6):
        weight.grad = row + 0.01 * gradient((3, 8), step, torch.float64)
        before = optimizer.state[weight]["right_basis"][:, 3:].clone()
        optimizer.step()
        if step > 2:
            after = optimizer.state[weight]["right_basis"][:, 3:]
            assert (before * after).sum(0).abs().min() > 0.99


CHANGES = [
    ({}, {"geometry": "none"}),
    ({}, {"geometry": "unilateral"}),
    ({}, {"source": "first"}),
    ({}, {"max_side": 5}),
    ({"geometry": "unilateral"}, {"geometry": "bilateral"}),
    ({"geometry": "none"}, {"geometry": "bilateral"}),
    ({"source": "first"}, {"source": "second"}),
    ({"source": "first", "max_side": 5}, {"source": "second", "max_side": 8}),
]


@pytest.mark.parametrize("relayout", [False, True])
@pytest.mark.parametrize("options, changes", CHANGES)
def test_an_option_changed_later_that_asks_for_other_state_is_named(options, changes, relayout):
    """In the next step, which changes nothing; with the option as it was all goes on."""
    runs = []
    for _ in range(2):
        weights = [nn.Parameter(gradient((4, 6), place)) for place in range(2)]
        runs.append((weights, BasisRotation(weights, **options)))
        train(runs[-1][1], weights, range(1, 3))
    (weights, optimizer), (others, twin) = runs
    (group,) = optimizer.param_groups
    before = {name: group[name] for name in changes}
    group.update(changes)
    for each in (weights, others):
        each[0].grad = gradient((4, 6), 50)
        each[1].grad = None if relayout else gradient((4, 6), 51)
    with pytest.raises(InputError, match=rf"^{', '.join(changes)}: does not go with the state"):
        optimizer.step()
    group.update(before)
    optimizer.step()
    twin.step()
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))
    for weight, other in zip(weights, others, strict=True):
        assert optimizer.state[weight].keys() == twin.state[other].keys()


def test_an_option_changed_later_that_asks_for_the_same_state_counts():
    weight, other = (nn.Parameter(gradient((4, 6), 0)) for _ in range(2))
    optimizer, twin = BasisRotation([weight], max_side=6), BasisRotation([other])
    train(optimizer, [weight], range(1, 3))
    train(twin, [other], range(1, 3))
    for each in (optimizer, twin):
        each.param_groups[0].update(max_side=100, refresh_every=3, nu=0.5)
    train(optimizer, [weight], range(3, 8))
    train(twin, [other], range(3, 8))
    assert torch.equal(weight, other)


@every_kind
def test_frozen_weights_have_no_state_until_they_have_a_gradient(source, geometry):
    """As in torch's optimizers: nor in a state dict; unfrozen later they begin as new ones do, and
    what was trained before it was frozen keeps its state."""
    options = {"source": source, "geometry": geometry, "refresh_every": 3}

    def made():
        weights = [nn.Parameter(gradient(s, i)) for i, s in enumerate([(4, 6), (4, 6), (5,), (5,)])]
        for each in weights[1::2]:
            each.requires_grad_(False)
        return weights, BasisRotation(weights, **options)

    def step(weights, optimizer, at):
        for place, each in enumerate(weights):
            each.grad = gradient(each.shape, 10 * at + place) if each.requires_grad else None
        optimizer.step()

    weights, optimizer = made()
    for at in range(1, 5):
        step(weights, optimizer, at)
    assert set(optimizer.state) == set(weights[::2])
    assert sorted(optimizer.state_dict()["state"]) == [0, 2]
    alone = BasisRotation([nn.Parameter(each.detach().clone()) for each in weights[::2]], **options)
    assert optimizer_bytes(optimizer) == optimizer_bytes(alone)
    fresh = [nn.Parameter(each.detach().clone()) for each in weights[1::2]]
    expected = BasisRotation(fresh, **options)
    trained = weights[0].detach().clone()
    for each in weights:
        each.requires_grad_(each.dim() == 1 or each is weights[1])
    others, resumed = made()
    for ours, theirs in zip(others, weights, strict=True):
        ours.data.copy_(theirs)
        ours.requires_grad_(theirs.requires_grad)
    resumed.load_state_dict(optimizer.state_dict())
    for at in range(5, 12):
        step(weights, optimizer, at)
        step(others, resumed, at)
        for place, each in enumerate(fresh):
            each.grad = gradient(each.shape, 10 * at + 2 * place + 1)
        expected.step()
    assert all(torch.equal(a, b) for a, b in zip(weights[1::2], fresh, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))
    assert torch.equal(weights[0], trained) and optimizer.state[weights[0]]["step"] == 4
    assert sorted(optimizer.state_dict()["state"]) == [0, 1, 2, 3]


def test_a_loaded_state_is_used_and_rates_set_later_count():
    weight = nn.Parameter(gradient((4, 4), 0))
    optimizer = BasisRotation([weight], 0.1)
    train(optimizer, [weight], range(1, 4))
    other = nn.Parameter(weight.detach().clone())
    loaded = BasisRotation([other], 0.1)
    loaded.load_state_dict(optimizer.state_dict())
    for group in (*optimizer.param_groups, *loaded.param_groups):
        group["lr"] = 0.003
    train(optimizer, [weight], range(4, 6))
    train(loaded, [other], range(4, 6))
    assert torch.equal(weight, other)
    assert loaded.state[other]["step"] == 5


def test_the_floor_is_the_reason(monkeypatch):
    """Without delta the first step is noise: the tests above can fail."""
    monkeypatch.setattr(basis_rotation, "DELTA", 0.0)
    with pytest.raises(AssertionError):
        test_the_first_step_is_no_noise(1.0, "second", "bilateral")
    with pytest.raises(AssertionError):
        test_directions_without_gradient_stand_still()
