"""Muon and LowRankMuon against loops over single matrices in float64."""

import copy
import io
import logging

import pytest
import torch
from torch import Tensor, nn

from algorithms.common.errors import InputError
from algorithms.common.matrix_optimizer import MatrixOptimizer
from algorithms.common.memory import optimizer_bytes
from algorithms.lordo.config import LowRankConfig, SyncConfig
from algorithms.lordo.muon import LowRankMuon, Muon
from algorithms.lordo.muon_reference import AdamWReference, MatrixReference
from algorithms.lordo.sync import Sync
from algorithms.lordo.wire import Reduced

LR, BETAS, EPS, DECAY = 0.02, (0.8, 0.99), 1e-8, 0.1
MATRICES = [(16, 24), (24, 16), (16, 24), (16, 16), (3, 8, 24), (16, 8)]
DENSE = [(10, 8), (8,), ()]
Shapes = list[tuple[int, ...]]

KINDS = {
    "muon": (Muon, {"matrices": True}),
    "muon grad": (Muon, {"matrices": True, "momentum": "grad"}),
    "muon int8": (Muon, {"matrices": True, "momentum": "int8"}),
    "muon int4": (Muon, {"matrices": True, "momentum": "int4"}),
    "low rank": (LowRankMuon, {"rank": 4}),
    "low rank bf16": (LowRankMuon, {"rank": 4, "momentum": "bf16"}),
    "low rank carried": (LowRankMuon, {"rank": 4, "carry": 0.6}),
}
every_kind = pytest.mark.parametrize("kind", KINDS)
CARRIED = ("muon grad", "low rank carried")
exact_kinds = pytest.mark.parametrize("kind", ["muon", "low rank", *CARRIED])


def drawn(shapes: Shapes, seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(each, generator=generator, dtype=torch.float64).to(dtype) for each in shapes
    ]


def made(
    kind: str, shapes: Shapes = MATRICES, dtype: torch.dtype = torch.float32
) -> tuple[MatrixOptimizer, list[nn.Parameter]]:
    weights = [nn.Parameter(each) for each in drawn([*shapes, *DENSE], 0, dtype)]
    cls, own = KINDS[kind]
    groups = [{"params": weights[: len(shapes)], **own}, {"params": weights[len(shapes) :]}]
    return cls(groups, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY), weights


def give_gradients(weights: list[nn.Parameter], step: int, absent: bool = False) -> None:
    """Added as by a backward pass; functions of the step alone. With `absent` some weights get none
    every third time."""
    gradients = drawn([each.shape for each in weights], 100 + step, weights[0].dtype)
    for place, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
        if absent and step % 3 == 0 and place in (0, 4, 7):
            continue
        if weight.grad is None:
            weight.grad = gradient
        else:
            weight.grad += gradient


def run(
    optimizer: MatrixOptimizer, weights: list[nn.Parameter], steps: range, absent: bool = False
) -> None:
    for step in steps:
        give_gradients(weights, step, absent)
        optimizer.step()
        optimizer.zero_grad()


def equal(left: list[nn.Parameter], right: list[nn.Parameter]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("absent", [False, True])
@exact_kinds
def test_equals_the_loop_over_single_matrices(kind, absent):
    optimizer, weights = made(kind, dtype=torch.float64)
    twins, expected = [], [each.detach().clone() for each in weights]
    for place, weight in enumerate(weights):
        if place >= len(MATRICES):
            twins.append([AdamWReference(BETAS, EPS)])
        elif kind.startswith("muon"):
            momenta = (
                {"beta": 0.0, "carry": BETAS[0]} if kind == "muon grad" else {"beta": BETAS[0]}
            )
            twins.append([MatrixReference(**momenta) for _ in weight.view(-1, *weight.shape[-2:])])
        else:
            basis = optimizer.state[weight]["projection"]
            bases = basis.reshape(-1, *basis.shape[-2:]).clone()
            carry = KINDS[kind][1].get("carry", 0.0)
            twins.append([MatrixReference(BETAS[0], carry, each) for each in bases])
    for step in range(1, 8):
        fresh = [nn.Parameter(each) for each in expected]
        give_gradients(fresh, step, absent)
        run(optimizer, weights, range(step, step + 1), absent)
        for place, (given, members) in enumerate(zip(fresh, twins, strict=True)):
            gradient = given.grad
            if gradient is None and not (kind in CARRIED and place < len(MATRICES)):
                continue
            gradient = torch.zeros_like(given) if gradient is None else gradient
            parts, gradients = expected[place][None], gradient[None]
            if place < len(MATRICES):
                parts, gradients = (
                    each.reshape(-1, *each.shape[-2:]) for each in (parts, gradients)
                )
            new = [
                m.step(W, G, LR, DECAY) for m, W, G in zip(members, parts, gradients, strict=True)
            ]
            expected[place] = torch.stack(new).view(given.shape)
        for found, wanted in zip(weights, expected, strict=True):
            torch.testing.assert_close(found.detach(), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("momentum, error", [("int8", 0.02), ("int4", 0.3)])
def test_coded_momentum_is_the_momentum_up_to_the_code(momentum, error):
    full, weights = made("muon")
    coded, others = made(f"muon {momentum}")
    run(full, weights, range(1, 2))
    run(coded, others, range(1, 2))
    assert equal(weights, others)  # the step is taken before the momentum is written
    run(full, weights, range(2, 6))
    run(coded, others, range(2, 6))
    moved = torch.cat(
        [(w - f).flatten() for w, f in zip(weights, drawn(MATRICES, 0), strict=False)]
    )
    apart = torch.cat([(w - o).flatten() for w, o in zip(weights, others, strict=True)])
    assert 0 < apart.norm() < error * moved.norm()


@pytest.mark.parametrize("kind", [each for each in KINDS if each not in CARRIED])
def test_rank_above_the_short_side_and_one_by_one(kind, caplog):
    """Low rank with all directions is the full momentum."""
    shapes = [(3, 9), (1, 1), (5, 1)]
    with caplog.at_level(logging.WARNING):
        optimizer, weights = made(kind, shapes)
    if kind.startswith("low rank"):
        assert sorted(r.message.split(" for")[0] for r in caplog.records) == [
            "rank 4 is cut to 1",
            "rank 4 is cut to 1",
            "rank 4 is cut to 3",
        ]
    elif "int" in kind:
        assert [r.message for r in caplog.records] == [
            "3 weights do not fill blocks of 64: momentum uncoded"
        ]
    else:
        assert caplog.records == []
    full, others = made("muon", shapes)
    run(optimizer, weights, range(1, 5))
    run(full, others, range(1, 5))
    for found, wanted in zip(weights, others, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-2 if "bf16" in kind else 1e-4)


@every_kind
def test_state_takes_the_bytes_of_the_formula(kind):
    optimizer, weights = made(kind)
    sizes = [each.numel() for each in weights[: len(MATRICES)]]
    sides = [sorted(each[-2:]) for each in MATRICES]
    low = sum(
        4 * (m + n) * size // (m * n) for (m, n), size in zip(sides, sizes, strict=True)
    )  # r (m + n) for each matrix
    expected = {
        "muon": 4 * sum(sizes),
        "muon int8": sum(sizes) + 2 * sum(sizes) // 64,
        "muon int4": sum(sizes) // 2 + 2 * sum(sizes) // 64,
        "low rank": 4 * low,
        "low rank bf16": 2 * low,
        "muon grad": 4 * sum(sizes),
        "low rank carried": 4 * low + 4 * sum(sizes),
    }[kind]
    dense = 8 * sum(each.numel() for each in weights[len(MATRICES) :])
    run(optimizer, weights, range(1, 3))
    assert optimizer_bytes(optimizer) == expected + dense + 4 * len(weights)  # and the steps
    if kind in CARRIED:  # no memory of its own
        for weight in weights[: len(MATRICES)]:
            assert weight.grad is optimizer.state[weight]["carried"]


@pytest.mark.parametrize("absent", [False, True])
@every_kind
def test_a_saved_and_loaded_optimizer_continues_bit_for_bit(kind, absent):
    optimizer, weights = made(kind)
    run(optimizer, weights, range(1, 5), absent)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed, others = made(kind)
    with torch.no_grad():
        for other, weight in zip(others, weights, strict=True):
            other.copy_(weight)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    kinds = [
        {name: (value.dtype, value.shape) for name, value in state.items()}
        for state in (optimizer.state[weights[0]], resumed.state[others[0]])
    ]
    assert kinds[0] == kinds[1]
    run(optimizer, weights, range(5, 11), absent)
    run(resumed, others, range(5, 11), absent)
    assert equal(weights, others)


@every_kind
def test_a_copy_and_its_original_do_not_share_state(kind):
    optimizer, weights = made(kind)
    run(optimizer, weights, range(1, 3))
    others, copied = copy.deepcopy((weights, optimizer))
    run(copied, others, range(3, 5))
    assert not equal(weights, others)
    run(optimizer, weights, range(3, 5))
    assert equal(weights, others)


def test_what_is_written_into_the_state_counts():
    """A sync sets projections and averages moments in place."""
    optimizer, weights = made("low rank")
    other, others = made("low rank")
    run(optimizer, weights, range(1, 2))
    run(other, others, range(1, 2))
    for weight in others[: len(MATRICES)]:
        other.state[weight]["projection"].mul_(-1)
        other.state[weight]["exp_avg"].mul_(-1)
    run(optimizer, weights, range(2, 4))
    run(other, others, range(2, 4))
    for found, wanted in zip(weights, others, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    other.state[others[0]]["exp_avg"].zero_()
    run(optimizer, weights, range(4, 5))
    run(other, others, range(4, 5))
    assert float((weights[0] - others[0]).detach().abs().max()) > 1e-3


@every_kind
def test_zero_gradients_move_nothing_but_decay(kind):
    optimizer, weights = made(kind)
    before = [each.detach().clone() for each in weights]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    for found, start in zip(weights, before, strict=True):
        torch.testing.assert_close(found.detach(), start * (1 - LR * DECAY), rtol=1e-6, atol=0)


@pytest.mark.parametrize("set_to_none", [False, True])
def test_zero_grad_leaves_only_what_is_carried(set_to_none):
    optimizer, weights = made("muon grad")
    give_gradients(weights, 0)
    optimizer.zero_grad(set_to_none)  # before the first step nothing is carried
    assert all(each.grad is None if set_to_none else not each.grad.any() for each in weights)
    give_gradients(weights, 1)
    expected = [BETAS[0] * each.grad for each in weights[: len(MATRICES)]]
    optimizer.step()
    optimizer.zero_grad(set_to_none)
    for weight, carried in zip(weights, expected, strict=False):
        assert torch.equal(weight.grad, carried)
    dense = [each.grad for each in weights[len(MATRICES) :]]
    assert all(each is None if set_to_none else not each.any() for each in dense)


def test_gradients_are_left_as_they_are_unless_carried():
    for kind in KINDS:
        optimizer, weights = made(kind)
        give_gradients(weights, 1)
        before = [each.grad.clone() for each in weights]
        optimizer.step()
        same = [torch.equal(each.grad, old) for each, old in zip(weights, before, strict=True)]
        assert same == [kind not in CARRIED] * len(MATRICES) + [True] * len(DENSE)


def test_one_portion_and_many_are_equal(monkeypatch):
    together, weights = made("muon", dtype=torch.float64)
    monkeypatch.setattr("algorithms.common.cohort.ELEMENTS", 500)
    apart, others = made("muon", dtype=torch.float64)
    assert len(together._cohorts) == 1 and len(apart._cohorts) > 3
    run(together, weights, range(1, 4))
    run(apart, others, range(1, 4))
    for found, wanted in zip(weights, others, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-13)


def test_vectors_in_a_group_of_matrices_get_adamw():
    weights = [nn.Parameter(each) for each in drawn([(4, 6), (6,), (0, 3)], 0)]
    optimizer = Muon([{"params": weights, "matrices": True}], lr=LR, betas=BETAS)
    run(optimizer, weights, range(1, 3))
    assert [sorted(optimizer.state[each]) for each in weights] == [
        ["exp_avg", "step"],
        ["exp_avg", "exp_avg_sq", "step"],
        ["exp_avg", "exp_avg_sq", "step"],
    ]


def test_closure_and_scheduler_as_in_torch():
    optimizer, weights = made("muon")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.0)

    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        give_gradients(weights, 1)
        return torch.ones(())

    before = [each.detach().clone() for each in weights]
    assert float(optimizer.step(closure)) == 1
    schedule.step()
    assert equal(weights, before)  # the rate is 0 from the start


@pytest.mark.parametrize("kind", ["muon", "low rank"])
@pytest.mark.parametrize(
    "key, value",
    [("lr", -1), ("betas", (1, 0.9)), ("eps", 0), ("weight_decay", -1), ("momentum", "int2")],
)
def test_values_out_of_range(kind, key, value):
    cls, own = KINDS[kind]
    group = {"params": [nn.Parameter(torch.ones(2, 3))], **own, key: value}
    with pytest.raises(InputError, match=f"^{key}: is "):
        cls([group])


def test_momentum_in_grad_of_which_nothing_stays_is_refused():
    weight = nn.Parameter(torch.ones(2, 3))
    with pytest.raises(InputError, match="^betas: is "):
        Muon([{"params": [weight], "matrices": True}], betas=(0.0, 0.99), momentum="grad")


@pytest.mark.parametrize("momentum, error", [("fp32", 1e-5), ("bf16", 1e-2)])
def test_a_sync_gives_all_workers_the_projection_of_the_averaged_first_gradient(momentum, error):
    shapes = [(16, 24), (24, 16)]
    gradients = [drawn(shapes, seed) for seed in (1, 2)]
    low_rank = LowRankConfig(rank=4, projection="frozen", qhm="none")
    workers = []
    for own in gradients:
        weights = [nn.Parameter(each) for each in drawn(shapes, 0)]
        optimizer = LowRankMuon([{"params": weights, "rank": 4}], momentum=momentum, carry=0.6)
        named = [(str(place), weight) for place, weight in enumerate(weights)]
        sync = Sync(named, optimizer, SyncConfig(every=2), low_rank, world_size=2)
        for weight, gradient in zip(weights, own, strict=True):
            weight.grad = gradient
        workers.append((weights, optimizer, sync))
    flats = [sync.first_gradient()["projection"] for _, _, sync in workers]
    mean = (flats[0] + flats[1]) / 2
    for (weights, optimizer, sync), flat in zip(workers, flats, strict=True):
        sync.apply(1, {"projection": Reduced(mean, flat)})
        optimizer.step()
        for place, weight in enumerate(weights):
            basis = optimizer.state[weight]["projection"]
            assert torch.equal(basis, workers[0][1].state[workers[0][0][place]]["projection"])
            both = gradients[0][place] + gradients[1][place]
            leading = torch.linalg.svd(both if place == 0 else both.T).U[:, :4]
            found = (leading.T @ basis.float()).square().sum() / 4
            torch.testing.assert_close(found, torch.ones(()), rtol=0, atol=error)
            assert optimizer.state[weight]["exp_avg"].any()
