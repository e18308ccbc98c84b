"""State taken apart and put together again is what it was, types and bits included."""

import math

import pytest
import torch

from algorithms.common.nested import flatten, restore


def same(a, b):
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    else:
        assert a == b


@pytest.mark.parametrize(
    "state",
    [
        {},
        {0: {"step": torch.tensor(3.0)}, "0": None},
        {"betas": (0.9, 0.95), "lists": [[], [1, (2,)]], "on": True, "$tensor": "text"},
        {"bytes": torch.tensor([1, 2], dtype=torch.uint8), "half": torch.ones(2, 0).bfloat16()},
        {"tiny": 5e-324, "third": 1 / 3, "large": 2**70, "rate": math.inf},
    ],
)
def test_round_trip(state):
    tensors, text = flatten(state)
    assert all(isinstance(each, torch.Tensor) for each in tensors.values())
    same(restore(tensors, text), state)


def test_a_real_optimizer_state_survives():
    weight = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    weight.sum().backward()
    optimizer.step()
    same(restore(*flatten(optimizer.state_dict())), optimizer.state_dict())


def test_what_is_not_plain_is_refused():
    with pytest.raises(TypeError, match="state holds a set"):
        flatten({"names": {"a"}})
