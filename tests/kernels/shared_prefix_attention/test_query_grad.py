"""The loop for the query's gradient alone against the blocks that compute everything."""

import pytest
import torch

from kernels.shared_prefix_attention import blocks, cpu
from kernels.shared_prefix_attention.query_grad import query_grad
from tests.kernels.shared_prefix_attention.cases import Case, errors, relative, run, tensors

SIZES = [  # groups, rows, keys, head_dim, value_dim
    (1, 1, 1, 1, 1),
    (2, 256, 512, 8, 8),
    (3, 257, 513, 16, 16),
    (2, 600, 100, 24, 40),
    (1, 30, 1300, 13, 5),
]


def given(groups, rows, keys, head_dim, value_dim, dtype):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape, dtype=dtype):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    query, key = normal(groups, rows, head_dim), normal(groups, keys, head_dim)
    value, grad_out = normal(groups, keys, value_dim), normal(groups, rows, value_dim)
    wide = torch.promote_types(dtype, torch.float32)
    lse = (query.to(wide) @ key.to(wide).mT).logsumexp(-1, keepdim=True)
    return query, key, value, grad_out, lse, normal(groups, rows, 1, dtype=wide)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 1e-6)]
)
def test_equals_the_blocks(size, dtype, tolerance):
    inputs = given(*size, dtype)
    got = query_grad(*inputs)
    assert got.dtype == torch.promote_types(dtype, torch.float32)
    truth = blocks.backward(*(x.double() for x in inputs), band=None)
    assert relative(got, truth) <= tolerance


def test_keys_that_are_views_into_buffers_are_left_alone():
    query, key, value, grad_out, lse, delta = given(2, 300, 70, 8, 8, torch.float64)
    buffers = [torch.full((2, 90, 8), 7.0, dtype=torch.float64) for _ in range(2)]
    views = [buffer[:, 5:75] for buffer in buffers]
    views[0].copy_(key)
    views[1].copy_(value)
    before = [buffer.clone() for buffer in buffers]
    got = query_grad(query, *views, grad_out, lse, delta)
    assert torch.equal(got, query_grad(query, key, value, grad_out, lse, delta))
    assert all(torch.equal(a, b) for a, b in zip(buffers, before, strict=True))


MANY = Case(tokens=65)  # 260 rows on each key head


@pytest.mark.parametrize(
    ("case", "prefix_grad", "runs"),
    [
        (MANY, False, True),
        (MANY, True, False),
        (Case(), False, False),  # few rows
        (Case(tokens=65, softcap=1.5), False, False),
        (Case(tokens=65, window=20), False, False),  # every key is behind some row's window
        (Case(prefix=200, tokens=65, window=120), False, True),  # those near the end are not
    ],
    ids=str,
)
def test_runs_for_many_rows_that_see_all_of_a_constant_prefix(case, prefix_grad, runs, monkeypatch):
    calls = []

    def counted(*args):
        calls.append(args)
        return query_grad(*args)

    monkeypatch.setattr(cpu, "query_grad", counted)
    for twin in ("cpu", "blocks"):
        calls.clear()
        run(case, twin, tensors(case, torch.float64), prefix_grad)
        assert bool(calls) == runs
        found = errors(case, twin, torch.float64, prefix_grad)
        assert max(found.values()) <= 1e-13
