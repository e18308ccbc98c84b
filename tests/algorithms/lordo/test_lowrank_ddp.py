"""Low-rank DDP against itself written out with whole gradients, its bytes, and real ranks."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from algorithms.common.comm import Comm
from algorithms.common.errors import InputError
from algorithms.lordo.lowrank_ddp import LowRankDdp
from algorithms.lordo.projection import oriented
from algorithms.lordo.wire import Reducer, reduce_stacked
from tests.distributed import RankPool
from tests.local_workers import DENSE, LOW_RANK, OPTIMIZER, RANK, gradients, weights

RHO = 0.9
B1, B2, LR = OPTIMIZER.beta1, OPTIMIZER.beta2, OPTIMIZER.lr


def worker(
    dtype: torch.dtype = torch.float64, **changes: Any
) -> tuple[dict[str, Parameter], LowRankDdp]:
    named = {name: Parameter(weight) for name, weight in weights(dtype).items()}
    optimizer = LowRankDdp(
        [
            {"params": [named[name] for name in LOW_RANK], "rank": RANK},
            {"params": [named[name] for name in DENSE]},
        ],
        lr=LR,
        betas=(B1, B2),
        eps=OPTIMIZER.eps,
        weight_decay=OPTIMIZER.weight_decay,
        rho=RHO,
        **changes,
    )
    return named, optimizer


def train(workers: list[tuple[dict[str, Parameter], LowRankDdp]], step: int) -> None:
    flats = []
    for index, (named, optimizer) in enumerate(workers):
        for name, gradient in gradients(named, index, step).items():
            named[name].grad = gradient
        flats.append(optimizer.contribution())
    mean, _ = reduce_stacked(flats, None)
    for _, optimizer in workers:
        optimizer.apply(mean)


class Written:
    """One matrix `[m, n]` of M workers, with the mean of whole gradients at hand."""

    def __init__(self, x: Tensor, Q: Tensor, V: Tensor, workers: int, feedback: bool) -> None:
        self.x, self.Q, self.V, self.feedback = x, Q, V, feedback
        self.u = x.new_zeros(Q.shape[1], x.shape[1])
        self.v = self.u.clone()
        self.E = [torch.zeros_like(x) for _ in range(workers)]
        self.t = 0

    def step(self, given: list[Tensor]) -> None:
        self.t += 1
        Q, V, c1, c2 = self.Q, self.V, 1 - B1**self.t, 1 - B2**self.t
        seen = [G + E if self.feedback else G for G, E in zip(given, self.E, strict=True)]
        mean = torch.stack(seen).mean(0)
        g = Q.T @ mean
        self.u = B1 * self.u + (1 - B1) * g
        self.v = B2 * self.v + (1 - B2) * g * g
        step = Q @ (self.u / c1 / ((self.v / c2).sqrt() + OPTIMIZER.eps))
        self.x = self.x - LR * (step + OPTIMIZER.weight_decay * self.x)
        b = RHO * Q @ (self.u / c1) + (1 - RHO) * mean if self.t > 1 else mean
        self.Q, self.V = torch.linalg.qr(b @ V).Q, torch.linalg.qr(b.T @ Q).Q
        R, old = self.Q.T @ Q, self.u
        uh, vh = self.u / c1, self.v / c2
        self.u = R @ self.u
        self.v = c2 * ((R * R) @ (vh - uh * uh) + (R @ uh) ** 2).abs()
        lost = B1 / (1 - B1) * (Q @ old - self.Q @ self.u)
        self.E = [A - Q @ (Q.T @ A) + lost for A in seen]


def apart(tensor: Tensor) -> list[Tensor]:
    return list(oriented(tensor.detach()).reshape(-1, *oriented(tensor).shape[-2:]).clone())


@pytest.mark.parametrize("feedback", [False, True])
def test_thin_factors_give_what_whole_gradients_would(feedback: bool) -> None:
    workers = [worker(error_feedback=feedback) for _ in range(3)]
    named, optimizer = workers[0]
    twins = {}
    for name in LOW_RANK:
        state = optimizer.state[named[name]]
        Q, V = (
            state[key].reshape(-1, *state[key].shape[-2:]).clone()
            for key in ("projection", "right")
        )
        each = zip(apart(named[name]), Q, V, strict=True)
        twins[name] = [Written(*given, workers=3, feedback=feedback) for given in each]
    for step in range(1, 9):
        given = [gradients(named, index, step) for index in range(3)]
        train(workers, step)
        for name, matrices in twins.items():
            parts = [apart(each[name]) for each in given]
            for index, twin in enumerate(matrices):
                twin.step([each[index] for each in parts])
                found = apart(named[name])[index]
                torch.testing.assert_close(found, twin.x, atol=1e-11, rtol=0)
    if feedback:
        for index, (own, each) in enumerate(workers):
            found = apart(each.state[own["0.mlp.up"]]["error"])[0]
            torch.testing.assert_close(found, twins["0.mlp.up"][0].E[index], atol=1e-10, rtol=0)


def test_other_weights_are_those_of_adamw_on_mean_gradients() -> None:
    workers = [worker(torch.float64) for _ in range(2)]
    plain = {name: Parameter(weights()[name]) for name in DENSE}
    adamw = torch.optim.AdamW(
        plain.values(), lr=LR, betas=(B1, B2), eps=1e-8, weight_decay=0.1, fused=True
    )
    for step in range(1, 5):
        both = [gradients(named, index, step) for index, (named, _) in enumerate(workers)]
        for name, parameter in plain.items():
            parameter.grad = (both[0][name] + both[1][name]) / 2
        train(workers, step)
        adamw.step()
    for name, parameter in plain.items():
        assert torch.equal(parameter, workers[1][0][name])


def test_projections_find_the_leading_directions_of_the_gradients() -> None:
    """Of one gradient again and again: of rank r at once, of full rank step by step."""
    generator = torch.Generator().manual_seed(0)
    left = torch.linalg.qr(torch.randn(8, 8, generator=generator, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(20, 8, generator=generator, dtype=torch.float64)).Q.T
    for rest in (0.0, 0.5):
        strengths = torch.tensor([1, 0.9] + [rest] * 6, dtype=torch.float64)
        parameter = Parameter(torch.zeros(8, 20, dtype=torch.float64))
        optimizer = LowRankDdp([{"params": [parameter], "rank": 2}])
        found = []
        for _ in range(60):
            parameter.grad = left * strengths @ right
            optimizer.step()
            Q = optimizer.state[parameter]["projection"]
            found.append((Q.T @ left[:, :2]).square().sum().item() / 2)
        assert (found[0] > 1 - 1e-12) == (rest == 0)
        assert found[-1] > 0.99, found


# Bytes and ranks


def on_a_rank(comm: Comm, feedback: bool) -> tuple[list[Tensor], int]:
    named, optimizer = worker(torch.float32, error_feedback=feedback)
    reducer = Reducer(comm, "thin", None)
    for step in range(1, 6):
        for name, gradient in gradients(named, comm.rank, step).items():
            named[name].grad = gradient
        optimizer.apply(reducer(optimizer.contribution()).mean)
    return [p.detach() for p in named.values()], comm.counters["thin"].payload_bytes


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("feedback", [False, True])
def test_real_ranks_equal_stacked_ones_and_send_what_the_formula_says(
    ranks: RankPool, feedback: bool, world_size: int
) -> None:
    results = ranks.run(on_a_rank, feedback, world_size=world_size)
    workers = [worker(torch.float32, error_feedback=feedback) for _ in range(world_size)]
    for step in range(1, 6):
        train(workers, step)
    D = sum(p.numel() for name, p in workers[0][0].items() if name in DENSE)
    W = P = 0
    for *lead, rows, cols in LOW_RANK.values():
        rank = min(RANK, rows, cols)
        W += (lead or [1])[0] * rank * max(rows, cols)
        P += (lead or [1])[0] * rank * min(rows, cols)
    padded = -(-(D + W + P) // world_size) * world_size  # to equal parts
    for (found, payload), (named, optimizer) in zip(results, workers, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, named.values(), strict=True))
        assert optimizer.contribution().numel() == D + W + P
        assert payload == 5 * 4 * padded


def test_one_worker_may_just_step() -> None:
    first, second = worker(), worker()
    for step in range(1, 4):
        train([first], step)
        for name, gradient in gradients(second[0], 0, step).items():
            second[0][name].grad = gradient
        second[1].step()
    for name, parameter in first[0].items():
        assert torch.equal(parameter, second[0][name])


# Odd cases


def test_a_missing_gradient_is_sent_as_zeros() -> None:
    first, second = worker(), worker()
    for (named, _), hidden in ((first, True), (second, False)):
        for name, gradient in gradients(named, 0, 1).items():
            zero = name in ("0.attn.in", "emb")
            named[name].grad = gradient if not zero else None if hidden else 0 * gradient
    assert torch.equal(first[1].contribution(), second[1].contribution())


def test_zero_gradients_keep_the_factors() -> None:
    named, optimizer = worker(error_feedback=True)
    before = {key: value.clone() for key, value in optimizer.state[named["0.mlp.up"]].items()}
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    after = optimizer.state[named["0.mlp.up"]]
    assert all(torch.equal(after[key], old) for key, old in before.items() if key != "step")


def test_state_survives_a_file_without_pickles_and_goes_on_bit_for_bit() -> None:
    workers = [worker(torch.float32, error_feedback=True) for _ in range(2)]
    for step in (1, 2, 3):
        train(workers, step)
    file = io.BytesIO()
    torch.save([(optimizer.state_dict(), named) for named, optimizer in workers], file)
    file.seek(0)
    resumed = [worker(torch.float32, error_feedback=True) for _ in range(2)]
    for (named, optimizer), (state, held) in zip(
        resumed, torch.load(file, weights_only=True), strict=True
    ):
        optimizer.load_state_dict(state)
        with torch.no_grad():
            for name, value in held.items():
                named[name].copy_(value)
    for step in (4, 5):
        train(workers, step)
        train(resumed, step)
    for (named, _), (other, _) in zip(workers, resumed, strict=True):
        assert all(torch.equal(named[name], other[name]) for name in named)


@pytest.mark.parametrize(("name", "value"), [("rank", -1), ("rho", 1.5), ("eps", 0.0)])
def test_values_out_of_range_are_named(name: str, value: float) -> None:
    with pytest.raises(InputError, match=f"^{name}: is .*, out of range$"):
        LowRankDdp([Parameter(torch.zeros(3, 3))], **{name: value})  # type: ignore[arg-type]
