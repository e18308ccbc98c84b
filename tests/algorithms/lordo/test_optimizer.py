"""LoRDO's local step: against the slow reference, torch's AdamW, and what torch.optim promises."""

from __future__ import annotations

import copy
import io
import logging
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from algorithms.common.errors import InputError
from algorithms.lordo.config import LowRankConfig, SyncConfig
from algorithms.lordo.optimizer import LoRDO
from tests.local_workers import DENSE, LOW_RANK, OPTIMIZER, RANK, gradients, reference, weights

OPTIONS: dict[str, dict[str, Any]] = {
    "full rank, column": {},
    "scalar": {"scaling": "scalar"},
    "energy": {"scaling": "energy", "mu": 2.0},
    "lift": {"scaling": "lift", "omega": 0.3},
    "none": {"qhm": "none"},
    "low rank": {"qhm": "low_rank"},
    "error feedback": {"error_feedback": True},
    "low rank with error feedback": {"qhm": "low_rank", "error_feedback": True},
}


def named_weights(dtype: torch.dtype = torch.float64) -> dict[str, Parameter]:
    return {name: Parameter(weight) for name, weight in weights(dtype).items()}


def groups(named: dict[str, Parameter], rank: int = RANK) -> list[dict[str, Any]]:
    return [
        {"params": [named[name] for name in LOW_RANK], "rank": rank},
        {"params": [named[name] for name in DENSE]},
    ]


def settings(**changes: Any) -> dict[str, Any]:
    return {
        "lr": OPTIMIZER.lr,
        "betas": (OPTIMIZER.beta1, OPTIMIZER.beta2),
        "eps": OPTIMIZER.eps,
        "weight_decay": OPTIMIZER.weight_decay,
        **changes,
    }


def train(named: dict[str, Parameter], optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        for name, gradient in gradients(named, 0, step).items():
            named[name].grad = gradient
        optimizer.step()


def assert_equal(ours: dict[str, Parameter], theirs: dict[str, Parameter]) -> None:
    for name, parameter in ours.items():
        assert torch.equal(parameter, theirs[name]), name


# Values


@pytest.mark.parametrize("option", OPTIONS)
def test_steps_are_those_of_the_reference(option: str) -> None:
    """Under fixed random projections; following ones are in test_sync.py."""
    method = LowRankConfig(rank=RANK, projection="random", **OPTIONS[option])
    twin = reference(1, SyncConfig(every=1000), method)
    named = named_weights()
    optimizer = LoRDO(groups(named), **settings(**OPTIONS[option]))
    for name in LOW_RANK:
        basis = optimizer.state[named[name]]["projection"]
        given = [moments.Q for moments in twin.workers[0].moments[name]]
        basis.copy_(torch.stack([Q for Q in given if Q is not None]).view_as(basis))
    for step in range(1, 7):
        twin.step([gradients(twin.workers[0].x, 0, step)], OPTIMIZER.lr)
        train(named, optimizer, range(step, step + 1))
        for name, parameter in named.items():
            torch.testing.assert_close(parameter.data, twin.workers[0].x[name], atol=1e-12, rtol=0)
    for name in LOW_RANK:
        moments, state = twin.workers[0].moments[name], optimizer.state[named[name]]
        for key, attribute in {"exp_avg": "u", "exp_avg_sq": "v", "error": "E"}.items():
            if key in state:
                expected = torch.stack([getattr(each, attribute) for each in moments])
                found = state[key].view(len(moments), *state[key].shape[-2:])
                if key == "error" and named[name].shape[-2] > named[name].shape[-1]:
                    found = found.mT
                torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


def test_local_projections_are_those_of_the_reference() -> None:
    method = LowRankConfig(rank=RANK, projection="local", error_feedback=True)
    twin = reference(1, SyncConfig(every=1000), method)
    named = named_weights()
    optimizer = LoRDO(groups(named), **settings(error_feedback=True, local=True))
    for step in range(1, 9):
        twin.step([gradients(twin.workers[0].x, 0, step)], OPTIMIZER.lr)
        train(named, optimizer, range(step, step + 1))
    for name, parameter in named.items():
        torch.testing.assert_close(parameter.data, twin.workers[0].x[name], atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_groups_without_a_rank_are_those_of_adamw(dtype: torch.dtype) -> None:
    ours, theirs = named_weights(dtype), named_weights(dtype)
    optimizer = LoRDO(ours.values(), **settings())
    train(ours, optimizer, range(1, 6))
    train(theirs, torch.optim.AdamW(theirs.values(), fused=True, **settings()), range(1, 6))
    assert_equal(ours, theirs)


def test_at_full_rank_with_momentum_alone_it_is_adam_in_a_turned_basis() -> None:
    """Q of the whole space, set to the identity: plain AdamW."""
    ours, theirs = (Parameter(weights()["0.attn.in"]) for _ in range(2))
    optimizer = LoRDO([{"params": [ours], "rank": 6}], **settings(qhm="none"))
    optimizer.state[ours]["projection"].copy_(torch.eye(6))
    train({"0.attn.in": ours}, optimizer, range(1, 6))
    train({"0.attn.in": theirs}, torch.optim.AdamW([theirs], **settings()), range(1, 6))
    torch.testing.assert_close(ours, theirs, atol=1e-13, rtol=0)


def test_without_full_rank_term_a_step_stays_in_the_projection() -> None:
    for qhm in ("none", "low_rank", "full_rank"):
        parameter = Parameter(weights()["0.mlp.up"])  # tall: its second side is projected
        optimizer = LoRDO([{"params": [parameter], "rank": 2}], lr=0.1, qhm=qhm)
        before = parameter.detach().clone()
        train({"0.mlp.up": parameter}, optimizer, range(1, 4))
        moved = (parameter - before).detach()
        Q = optimizer.state[parameter]["projection"]
        outside = (moved.T - Q @ (Q.T @ moved.T)).norm() / moved.norm()
        assert (outside < 1e-12) == (qhm != "full_rank")


def test_equal_shapes_are_stepped_as_one_by_one() -> None:
    together, single = named_weights(), named_weights()
    train(together, LoRDO(groups(together), **settings()), range(1, 4))
    each: list[Optimizer] = [
        LoRDO([{"params": [parameter], "rank": RANK if name in LOW_RANK else 0}], **settings())
        for name, parameter in single.items()
    ]
    for step in range(1, 4):
        for name, gradient in gradients(single, 0, step).items():
            single[name].grad = gradient
        for optimizer in each:
            optimizer.step()
    for name, parameter in together.items():
        if name != "1.mlp.experts":  # several matrices of one shape draw unlike projections
            torch.testing.assert_close(parameter, single[name], atol=1e-12, rtol=0)


def test_accumulated_gradients_count_once() -> None:
    one, four = named_weights(), named_weights()
    optimizer = LoRDO(groups(one), **settings())
    train(one, optimizer, range(1, 2))
    parts = gradients(four, 0, 1)
    for parameter, gradient in zip(four.values(), parts.values(), strict=True):
        parameter.grad = torch.zeros_like(parameter)
        for _ in range(4):
            parameter.grad += gradient / 4
    LoRDO(groups(four), **settings()).step()
    assert_equal(one, four)


# torch.optim's ways


def test_gradients_are_left_as_they_are_and_a_closure_is_called() -> None:
    named = named_weights()
    optimizer = LoRDO(groups(named), **settings(error_feedback=True))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = torch.stack([parameter.square().sum() for parameter in named.values()]).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    expected = 2 * torch.cat([parameter.detach().flatten() for parameter in named.values()])
    loss = optimizer.step(closure)
    assert loss.item() == pytest.approx((expected / 2).square().sum().item())
    found = torch.cat([parameter.grad.flatten() for parameter in named.values()])
    assert torch.equal(found, expected)


@pytest.mark.parametrize("option", ["full rank, column", "error feedback", "local"])
def test_state_survives_a_file_without_pickles_and_goes_on_bit_for_bit(option: str) -> None:
    changes = OPTIONS.get(option, {"local": True})
    whole = named_weights(torch.float32)
    optimizer = LoRDO(groups(whole), **settings(**changes))
    train(whole, optimizer, range(1, 4))
    optimizer.param_groups[0]["lr"] = 0.003  # a schedule has been at work
    file = io.BytesIO()
    torch.save([optimizer.state_dict(), whole], file)
    file.seek(0)
    state, loaded = torch.load(file, weights_only=True)
    resumed = {name: Parameter(weight.detach()) for name, weight in loaded.items()}
    other = LoRDO(groups(resumed), **settings())
    other.load_state_dict(state)
    assert other.param_groups[0]["lr"] == 0.003
    train(whole, optimizer, range(4, 7))
    train(resumed, other, range(4, 7))
    assert_equal(whole, resumed)


def test_a_copy_goes_on_by_itself() -> None:
    named = named_weights()
    optimizer = LoRDO(groups(named), **settings())
    train(named, optimizer, range(1, 3))
    held, copied = copy.deepcopy((named, optimizer))
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    train(held, copied, range(3, 5))
    assert all(torch.equal(named[name], weight) for name, weight in before.items())
    train(named, optimizer, range(3, 5))
    assert_equal(named, held)


def test_state_is_shaped_as_the_docstring_says() -> None:
    named = named_weights()
    optimizer = LoRDO(iter(groups(named)), **settings(error_feedback=True))
    shapes = {
        name: {key: tuple(value.shape) for key, value in optimizer.state[parameter].items()}
        for name, parameter in named.items()
    }
    assert shapes["0.mlp.up"] == {
        "step": (),
        "projection": (6, 3),
        "exp_avg": (3, 12),
        "exp_avg_sq": (3, 12),
        "error": (12, 6),
    }
    assert shapes["1.mlp.experts"]["projection"] == (3, 4, 3)
    assert shapes["1.mlp.experts"]["exp_avg"] == (3, 3, 7)
    assert shapes["norm"] == {"step": (), "exp_avg": (6,), "exp_avg_sq": (6,)}


def test_weights_without_a_gradient_are_left_out() -> None:
    some, alone = named_weights(), named_weights()
    optimizer = LoRDO(groups(some), **settings())
    single = LoRDO([{"params": [alone["0.attn.out"]], "rank": RANK}], **settings())
    single.state[alone["0.attn.out"]]["projection"].copy_(
        optimizer.state[some["0.attn.out"]]["projection"]
    )
    before = some["0.attn.in"].detach().clone()
    for step in range(1, 5):
        for name, gradient in gradients(some, 0, step).items():
            some[name].grad = gradient
        alone["0.attn.out"].grad = some["0.attn.out"].grad
        if step < 3:
            some["0.attn.in"].grad = None
        optimizer.step()
        single.step()
        if step < 3:
            assert torch.equal(some["0.attn.in"], before)
    assert optimizer.state[some["0.attn.in"]]["step"] == 2
    torch.testing.assert_close(some["0.attn.out"], alone["0.attn.out"], atol=1e-13, rtol=0)


def test_dense_weights_without_a_gradient_are_left_out_as_by_adamw() -> None:
    ours, theirs = named_weights(), named_weights()
    optimizers = [
        (ours, LoRDO(ours.values(), **settings())),
        (theirs, torch.optim.AdamW(theirs.values(), fused=True, **settings())),
    ]
    for step in range(1, 5):
        for named, optimizer in optimizers:
            for name, gradient in gradients(named, 0, step).items():
                named[name].grad = None if name == "emb" and step < 3 else gradient
            optimizer.step()
    assert_equal(ours, theirs)


# Odd parameters and values


def test_vectors_scalars_and_empty_ones_of_a_low_rank_group_get_adamw() -> None:
    ours, theirs = named_weights(), named_weights()
    odd = ["norm", "scale", "none"]
    optimizer = LoRDO([{"params": [ours[name] for name in odd], "rank": 4}], **settings())
    train({n: ours[n] for n in odd}, optimizer, range(1, 4))
    adamw = torch.optim.AdamW([theirs[n] for n in odd], fused=True, **settings())
    train({n: theirs[n] for n in odd}, adamw, range(1, 4))
    assert_equal(ours, theirs)


def test_a_rank_above_the_short_side_is_cut_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    wide, square = Parameter(torch.zeros(2, 6)), Parameter(torch.zeros(5, 5))
    with caplog.at_level(logging.WARNING):
        optimizer = LoRDO([{"params": [wide, square], "rank": 4}])
    assert [r.message for r in caplog.records] == ["rank 4 is cut to 2 for weights (2, 6)"]
    assert optimizer.state[wide]["projection"].shape == (2, 2)
    assert optimizer.state[square]["projection"].shape == (5, 4)


@pytest.mark.parametrize("local", [False, True])
def test_zero_gradients_move_nothing(local: bool) -> None:
    named = named_weights()
    optimizer = LoRDO(groups(named), **settings(weight_decay=0.0, local=local))
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    for _ in range(3):
        for parameter in named.values():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    assert all(torch.equal(named[name], weight) for name, weight in before.items())
    train(named, optimizer, range(1, 3))
    assert all(parameter.isfinite().all() for parameter in named.values())


def test_bfloat16_weights_have_bfloat16_moments_and_train() -> None:
    for local in (False, True):
        named = named_weights(torch.bfloat16)
        optimizer = LoRDO(groups(named), **settings(local=local))
        train(named, optimizer, range(1, 4))
        assert all(parameter.isfinite().all() for parameter in named.values())
        assert optimizer.state[named["0.mlp.up"]]["exp_avg"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", -1.0),
        ("betas", (0.9, 1.0)),
        ("eps", 0.0),
        ("weight_decay", -0.1),
        ("rank", -1),
        ("qhm", "some"),
        ("omega", 1.5),
        ("mu", 0.0),
        ("scaling", "columns"),
        ("rho", -0.1),
    ],
)
def test_values_out_of_range_are_named(name: str, value: object) -> None:
    with pytest.raises(InputError, match=f"^{name}: is .*, out of range$"):
        LoRDO([Parameter(torch.zeros(3, 3))], **{name: value})
