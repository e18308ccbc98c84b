"""Values and all gradients of the two CPU twins against the reference."""

from itertools import product

import pytest
import torch

from kernels import dispatch
from kernels.shared_prefix_attention import OP, Prefix, attention, blocks, cpu
from tests.kernels.shared_prefix_attention.cases import Case, errors, run, tensors, too_large

TWINS = ["cpu", "blocks"]

ODD_CASES = [
    Case(head_dim=8, value_dim=8),
    Case(head_dim=64, value_dim=64),
    Case(head_dim=64, value_dim=64, tokens=65),  # enough rows for the flash backward
    Case(head_dim=24, value_dim=40),
    Case(head_dim=40, value_dim=24, sinks=True),
    Case(head_dim=13, value_dim=13, kv_heads=3, group=1),
    Case(sinks=True),
    Case(sinks=True, prefix=0, tokens=1),
    Case(softcap=0.8),
    Case(softcap=5.0, window=9, sinks=True, group=3),
    Case(window=10, head_dim=24, value_dim=8, sinks=True),
]


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("tokens", [1, 2, 7, 65])
@pytest.mark.parametrize("prefix", [0, 1, 5, 33, 130])
def test_exact_in_float64_for_every_batch_and_group(prefix, tokens, twin):
    for batch, group in product([1, 2, 3], [1, 2, 3, 4]):
        case = Case(prefix, tokens, batch, group=group)
        assert not too_large(errors(case, twin, torch.float64), torch.float64), case


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ODD_CASES, ids=str)
def test_odd_cases_in_every_dtype(case, dtype, twin):
    assert not too_large(errors(case, twin, dtype), dtype)


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("window", [1, 2, 6, 7, 8, 33, 34, 39, 40, 1000])
@pytest.mark.parametrize("tokens", [1, 7, 65])
def test_windows_smaller_and_larger_than_everything(tokens, window, twin):
    for prefix in (0, 1, 33):
        case = Case(prefix, tokens, window=window, group=3)
        assert not too_large(errors(case, twin, torch.float64), torch.float64), case


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("case", [Case(), Case(tokens=65, head_dim=64, value_dim=64)], ids=str)
def test_without_prefix_gradients_the_others_are_the_same(case, twin):
    for dtype in (torch.float64, torch.float32):
        assert not too_large(errors(case, twin, dtype, prefix_grad=False), dtype)


@pytest.mark.parametrize("window", [None, 11, 50])
def test_many_blocks_and_runs_of_keys_give_the_same(window, monkeypatch):
    """Large sizes by small blocks: rows, keys and heads all fall into several."""
    monkeypatch.setattr(blocks, "ROWS", 6)
    monkeypatch.setattr(blocks, "KEYS", 10)
    monkeypatch.setattr(blocks, "CPU_SCORES", 120)
    monkeypatch.setattr(cpu, "FLASH_KEYS", 32)
    for twin, softcap in product(TWINS, [None, 1.5]):
        case = Case(130, 21, 3, 3, 2, window=window, softcap=softcap)
        assert not too_large(errors(case, twin, torch.float64), torch.float64)
        assert not too_large(errors(case, twin, torch.float64, False), torch.float64)


def test_extreme_scores_neither_overflow_nor_vanish():
    case = Case(sinks=True)
    inputs = tensors(case, torch.float32)
    for scale in (1e4, 1e-4):
        large = inputs | {"query": inputs["query"] * scale}
        truth = run(case, "reference", {k: x.double() for k, x in large.items()})
        for twin in TWINS:
            got = run(case, twin, large)
            assert all(x.isfinite().all() for x in got.values())
            torch.testing.assert_close(got["out"].double(), truth["out"], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "case", [Case(prefix=5), Case(5, window=4, softcap=2.0, sinks=True)], ids=str
)
@pytest.mark.parametrize("twin", TWINS)
def test_gradcheck(case, twin):
    inputs = tensors(case, torch.float64)
    prefix = Prefix(inputs["prefix_key"], inputs["prefix_value"])
    leaves = [inputs[name].requires_grad_() for name in ("query", "key", "value")]
    sinks = [inputs["sinks"].requires_grad_()] if case.sinks else []

    def run_twin(query, key, value, *sinks):
        options = {"window": case.window, "softcap": case.softcap}
        with dispatch.override(OP, twin):
            return attention(
                query, key, value, prefix, scale=0.3, sinks=sinks[0] if sinks else None, **options
            )

    assert torch.autograd.gradcheck(run_twin, (*leaves, *sinks), fast_mode=True)


def test_the_flash_operators_are_those_that_we_call():
    """They are private to torch: a change must be met here before it reaches a user."""
    for name, schema in cpu.FLASH_SCHEMAS.items():
        assert str(getattr(torch.ops.aten, name).default._schema) == f"aten::{name}{schema}"


def test_a_changed_flash_operator_is_refused_with_the_reason(monkeypatch):
    name = next(iter(cpu.FLASH_SCHEMAS))
    monkeypatch.setitem(cpu.FLASH_SCHEMAS, name, "(Tensor query) -> Tensor")
    query = torch.zeros(1, 1, 1, 8)
    assert cpu.refuses(query, query) == f"torch {torch.__version__} changed aten::{name}"


@pytest.mark.parametrize("window", [None, 1, 3, 8, 40])
@pytest.mark.parametrize("first", [0, 4, 20])
def test_bands_agree_with_every_single_pair(first, window):
    band = blocks.Band(first, repeat=3, window=window)
    rows, keys = range(4, 25), range(2, 17)

    def sees(row, key):
        at = first + row // 3
        return key <= at and (window is None or key > at - window)

    pairs = torch.tensor([[sees(row, key) for key in keys] for row in rows])
    assert band.meets(rows, keys) or not pairs.any()
    mask = band.mask(rows, keys, torch.device("cpu"))
    assert pairs.all() if mask is None else mask.logical_not().equal(pairs)
