"""Basis rotation against its slow twin, torch's AdamW, and what torch.optim promises."""

import copy
import io
import itertools
import logging
import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from algorithms.async_pipeline.basis_reference import RotatedMatrix
from algorithms.async_pipeline.basis_rotation import DELTA, BasisRotation
from algorithms.common.errors import InputError
from algorithms.common.memory import optimizer_bytes

SHAPES = [(6, 6), (6, 6), (4, 7), (7, 4), (1, 3), (3, 1), (1, 1), (2, 5, 3), (2, 2, 3, 4)]
REST = [(5,), (), (3,)]
LR, BETAS, EPS, DECAY = 0.02, (0.9, 0.99), 1e-8, 0.1
KINDS = list(itertools.product(["first", "second"], ["unilateral", "bilateral"]))
every_kind = pytest.mark.parametrize("source, geometry", KINDS)


def drawn(shapes: list, seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Columns and rows of unlike size, so that there are directions to find."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for shape in shapes:
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        for side in range(1, min(len(shape), 2) + 1):
            values = values.transpose(-1, -side)
            values = values * torch.linspace(0.3, 1.5, values.shape[-1], dtype=torch.float64)
            values = values.transpose(-1, -side)
        found.append(values.to(dtype))
    return found


def made(dtype: torch.dtype = torch.float64, shapes: list = SHAPES, **options):
    """An optimizer of these matrices, and of other weights in the same group."""
    weights = [nn.Parameter(each) for each in drawn([*shapes, *REST], 0, dtype)]
    settings = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY, "refresh_every": 3}
    return BasisRotation(weights, **(settings | options)), weights


def give_gradients(weights: list[nn.Parameter], step: int, scale: float = 1.0) -> None:
    gradients = drawn([each.shape for each in weights], 100 + step, weights[0].dtype)
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient * scale


def run(optimizer: BasisRotation, weights: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        give_gradients(weights, step)
        optimizer.step()


def equal(left: list[nn.Parameter], right: list[nn.Parameter]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def as_matrices(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, *tensor.shape[-2:])


# Values


@pytest.mark.parametrize("refresh_every, nu", [(3, 1.0), (1, 0.5), (7, 0.5)])
@every_kind
def test_steps_are_those_of_the_twin(source, geometry, refresh_every, nu):
    steps = 25
    options = {"source": source, "geometry": geometry, "refresh_every": refresh_every, "nu": nu}
    optimizer, weights = made(**options)
    expected = [each.detach().clone() for each in weights[: len(SHAPES)]]
    twins: list[list[RotatedMatrix]] = []
    for weight in weights[: len(SHAPES)]:
        rows, cols = weight.shape[-2:]
        sides = {
            "left": geometry == "bilateral" or rows < cols,
            "right": geometry == "bilateral" or rows >= cols,
        }
        twins.append(
            [
                RotatedMatrix(*BETAS, EPS, nu, DELTA, source, refresh_every, **sides)
                for _ in as_matrices(weight)
            ]
        )
    for step in range(1, steps + 1):
        give_gradients(weights, step)
        optimizer.step()
        for place, members in enumerate(twins):
            state = optimizer.state[weights[place]]
            given = [
                as_matrices(state[name].clone()) if name in state else [None] * len(members)
                for name in ("left_basis", "right_basis")
            ]
            old, gradients = as_matrices(expected[place]), as_matrices(weights[place].grad)
            new = [
                twin.step(W, G, LR, DECAY, (U, Vr))
                for twin, W, G, U, Vr in zip(members, old, gradients, *given, strict=True)
            ]
            expected[place] = torch.stack(new).view(weights[place].shape)
            torch.testing.assert_close(weights[place].detach(), expected[place], rtol=0, atol=1e-9)


@every_kind
def test_first_bases_are_those_of_the_twin(source, geometry):
    """Where they are determined: of square matrices, up to signs."""
    optimizer, weights = made(source=source, geometry=geometry)
    run(optimizer, weights, range(1, 2))
    twin = RotatedMatrix(
        *BETAS, EPS, 1.0, DELTA, source, 3, left=geometry == "bilateral", right=True
    )
    twin.step(torch.zeros(6, 6, dtype=torch.float64), weights[0].grad, LR, DECAY)
    state = optimizer.state[weights[0]]
    for name, expected in (("left_basis", twin.U), ("right_basis", twin.Vr)):
        assert (name in state) == (expected is not None)
        if expected is not None:
            torch.testing.assert_close(state[name].abs(), expected.abs(), rtol=0, atol=1e-9)


def test_what_is_not_a_matrix_and_groups_without_geometry_are_under_adamw():
    optimizer, weights = made()
    others = [nn.Parameter(each.detach().clone()) for each in weights]
    matrices = [nn.Parameter(each.detach().clone()) for each in weights[: len(SHAPES)]]
    plain = BasisRotation(
        [{"params": matrices, "geometry": "none"}], LR, BETAS, EPS, weight_decay=DECAY
    )
    theirs = torch.optim.AdamW(others, LR, BETAS, EPS, weight_decay=DECAY)
    for step in range(1, 9):
        for each, chosen in ((weights, optimizer), (others, theirs), (matrices, plain)):
            give_gradients(each, step)
            chosen.step()
    for ours, other in zip(weights[len(SHAPES) :], others[len(SHAPES) :], strict=True):
        torch.testing.assert_close(ours, other, rtol=0, atol=1e-13)
    for ours, other in zip(matrices, others[: len(SHAPES)], strict=True):
        torch.testing.assert_close(ours, other, rtol=0, atol=1e-13)
    assert not torch.allclose(weights[0], others[0])


def test_nu_mixes_gradient_and_momentum():
    """For vectors too: with nu 0 the step is that of Adam without momentum."""
    optimizer, weights = made(nu=0.0, geometry="none")
    others = [nn.Parameter(each.detach().clone()) for each in weights]
    theirs = torch.optim.AdamW(others, LR, (0.0, BETAS[1]), EPS, weight_decay=DECAY)
    run(optimizer, weights, range(1, 6))
    run(theirs, others, range(1, 6))
    for ours, other in zip(weights, others, strict=True):
        torch.testing.assert_close(ours, other, rtol=0, atol=1e-13)


def test_equal_shapes_are_stepped_as_one_by_one():
    together, weights = made()
    others = [nn.Parameter(each.detach().clone()) for each in weights]
    alone = [
        BasisRotation([each], LR, BETAS, EPS, weight_decay=DECAY, refresh_every=3)
        for each in others
    ]
    for step in range(1, 6):
        give_gradients(weights, step)
        give_gradients(others, step)
        together.step()
        for each in alone:
            each.step()
    for left, right, shape in zip(weights, others, [*SHAPES, *REST], strict=True):
        if len(shape) < 2 or shape[-2] == shape[-1]:  # else a first basis is partly arbitrary
            torch.testing.assert_close(left, right, rtol=0, atol=1e-11)


@pytest.mark.parametrize("blocks", [3, 6, 12, 50])
def test_blocks_find_the_eigenvectors_too(blocks):
    """With a gradient of one covariance, block by block; all directions meet each other."""
    generator = torch.Generator().manual_seed(3)
    turned = torch.linalg.qr(torch.randn(12, 12, generator=generator, dtype=torch.float64)).Q
    sizes = torch.logspace(0, -1.5, 12, dtype=torch.float64)
    weight = nn.Parameter(torch.zeros(200, 12, dtype=torch.float64))
    optimizer = BasisRotation(
        [weight], 1e-3, BETAS, geometry="unilateral", refresh_every=1, refresh_blocks=blocks
    )
    for _ in range(300):
        noise = torch.randn(200, 12, generator=generator, dtype=torch.float64)
        weight.grad = noise * sizes @ turned.T
        optimizer.step()
    overlap = (turned.T @ optimizer.state[weight]["right_basis"]).abs()
    assert overlap.max(dim=0).values.min() > 0.95


# What torch.optim promises


@every_kind
def test_resumes_bit_for_bit_from_a_file(source, geometry):
    kind = {"source": source, "geometry": geometry, "nu": 0.5}
    whole, weights = made(torch.float32, **kind)
    run(whole, weights, range(1, 5))
    file = io.BytesIO()
    torch.save(whole.state_dict(), file)
    file.seek(0)
    resumed, others = made(torch.float32, **kind)
    for ours, theirs in zip(others, weights, strict=True):
        ours.data.copy_(theirs)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    run(whole, weights, range(5, 12))
    run(resumed, others, range(5, 12))
    assert equal(weights, others)


def test_a_rate_set_after_loading_counts():
    optimizer, weights = made()
    run(optimizer, weights, range(1, 3))
    optimizer.load_state_dict(optimizer.state_dict())
    before = [each.detach().clone() for each in weights]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    run(optimizer, weights, range(3, 5))
    assert equal(weights, before)
    for group in optimizer.param_groups:
        group["lr"] = LR
    run(optimizer, weights, range(5, 6))
    assert not equal(weights, before)


def test_a_deep_copy_goes_the_same_way_and_apart():
    weights = nn.ParameterList(made()[1])
    optimizer = BasisRotation(weights, LR, BETAS, refresh_every=3)
    run(optimizer, list(weights), range(1, 5))
    other, others = copy.deepcopy((optimizer, weights))
    run(optimizer, list(weights), range(5, 9))
    assert not equal(list(weights), list(others))
    run(other, list(others), range(5, 9))
    assert equal(list(weights), list(others))


def test_closure_frozen_and_empty_weights_and_gradients_that_are_not_contiguous():
    used = nn.Parameter(torch.randn(3, 4, dtype=torch.float64))
    twin = nn.Parameter(used.detach().clone())
    unused, empty = nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.zeros(0, 4))
    optimizer = BasisRotation([used, unused, empty], LR)

    def closure():
        optimizer.zero_grad()
        loss = used.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == pytest.approx(twin.square().sum().item())
    assert torch.equal(unused, torch.ones(3, 4)) and not torch.equal(used, twin)
    other = BasisRotation([twin], LR)
    twin.grad = (2 * twin.detach()).T.contiguous().T
    assert not twin.grad.is_contiguous()
    other.step()
    torch.testing.assert_close(used, twin)


def test_gradients_are_left_as_they_are():
    optimizer, weights = made()
    give_gradients(weights, 1)
    before = [each.grad.clone() for each in weights]
    optimizer.step()
    assert all(torch.equal(each.grad, old) for each, old in zip(weights, before, strict=True))


@pytest.mark.parametrize(
    "key, value",
    [
        ("source", "third"),
        ("geometry", "trilateral"),
        ("refresh_every", 0),
        ("refresh_blocks", 0),
        ("nu", 1.1),
        ("max_side", 0),
        ("lr", -1.0),
        ("betas", (0.9, 1.0)),
    ],
)
def test_bad_options_are_named(key, value):
    with pytest.raises(InputError, match=f"^{key}: is"):
        made(**{key: value})
    with pytest.raises(InputError, match="^refresh_blocks: is 2"):
        made(source="first", refresh_blocks=2)


# Memory


def extra(rows: int, cols: int, source: str, geometry: str) -> int:
    """Numbers kept beside Adam's, by the table of docs/async_pipeline.md."""
    short = min(rows, cols)
    squares = rows**2 + cols**2 if geometry == "bilateral" else short**2
    return squares * (2 if source == "second" else 1)


@every_kind
def test_memory_is_that_of_the_formula(source, geometry):
    optimizer, weights = made(torch.float32, source=source, geometry=geometry)
    run(optimizer, weights, range(1, 5))
    numbers = 0
    for weight in weights:
        numbers += 2 * weight.numel() + 1  # and the step
        if weight.dim() >= 2:
            rows, cols = weight.shape[-2:]
            numbers += math.prod(weight.shape[:-2]) * extra(rows, cols, source, geometry)
    assert optimizer_bytes(optimizer) == 4 * numbers


def test_long_sides_are_not_rotated_and_the_log_says_so(caplog):
    with caplog.at_level(logging.WARNING):
        optimizer, weights = made(shapes=[(4, 7), (4, 4)], max_side=5)
    assert [record.message for record in caplog.records] == [
        "sides above 5 are not rotated: weights (4, 7)"
    ]
    run(optimizer, weights, range(1, 5))
    kept = [{n for n in optimizer.state[each] if n.endswith("basis")} for each in weights[:2]]
    assert kept == [{"left_basis"}, {"left_basis", "right_basis"}]


class Largest(TorchDispatchMode):
    """Notes how many numbers the largest tensor had that was made inside."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        sizes = [each.numel() for each in tree_leaves(made) if isinstance(each, Tensor)]
        self.numbers = max(self.numbers, *sizes, 0)
        return made


@pytest.mark.parametrize("max_side", [20, 8192])
@pytest.mark.parametrize("shape", [(71, 3), (3, 71), (2, 53, 5), (2, 5, 53), (9, 9), (31, 31)])
@every_kind
def test_no_step_makes_a_square_of_a_side_that_is_not_rotated(source, geometry, shape, max_side):
    """Neither the first nor a refresh: nothing has more numbers than all weights, or a basis."""
    optimizer, weights = made(
        torch.float32, shapes=[shape], source=source, geometry=geometry, max_side=max_side
    )
    state = optimizer.state[weights[0]]
    squares = [each.numel() for name, each in state.items() if name.endswith("basis")]
    for step in range(1, 5):
        give_gradients(weights, step)
        with Largest() as largest:
            optimizer.step()
        assert 0 < largest.numbers <= max(sum(each.numel() for each in weights), *squares, 0)
