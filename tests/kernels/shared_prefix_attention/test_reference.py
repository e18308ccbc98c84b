"""The dense twin against torch's own attention and against a loop over single scores."""

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels.shared_prefix_attention import Prefix, reference
from tests.kernels.shared_prefix_attention.cases import Case, run, tensors


def looped(inputs, case):
    """Attention of one query at a time, in Python's own floats."""
    query = inputs["query"]
    out = torch.zeros(*query.shape[:3], case.value_dim, dtype=torch.float64)
    for row in range(case.batch):
        for head in range(case.kv_heads * case.group):
            kv = head // case.group
            keys = torch.cat([inputs["prefix_key"][kv], inputs["key"][row, kv]])
            values = torch.cat([inputs["prefix_value"][kv], inputs["value"][row, kv]])
            for token in range(case.tokens):
                position = case.prefix + token
                first = 0 if case.window is None else max(0, position - case.window + 1)
                scores = []
                for at in range(first, position + 1):
                    score = float(query[row, head, token] @ keys[at]) * case.head_dim**-0.5
                    if case.softcap is not None:
                        score = case.softcap * math.tanh(score / case.softcap)
                    scores.append(score)
                weights = [math.exp(score) for score in scores]
                total = sum(weights)
                if case.sinks:
                    total += math.exp(float(inputs["sinks"][head]))
                for at, weight in enumerate(weights, start=first):
                    out[row, head, token] += weight / total * values[at]
    return out


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(prefix=0),
        Case(tokens=1, prefix=1, group=3),
        Case(head_dim=8, value_dim=12),
        Case(window=5),
        Case(window=1),
        Case(window=36),
        Case(softcap=0.7),
        Case(sinks=True),
        Case(window=9, softcap=1.5, sinks=True),
    ],
    ids=str,
)
def test_reference_is_attention_score_by_score(case):
    inputs = tensors(case, torch.float64)
    out = run(case, "reference", inputs)["out"]
    torch.testing.assert_close(out, looped(inputs, case), rtol=1e-12, atol=1e-12)


def test_reference_and_its_gradients_are_those_of_the_copied_prefix():
    case = Case(batch=3, group=4)
    inputs = tensors(case, torch.float64)
    got = run(case, "reference", inputs)
    leaves = {k: x.clone().requires_grad_() for k, x in inputs.items() if k != "grad_out"}
    keys = torch.cat([leaves["prefix_key"].expand(3, -1, -1, -1), leaves["key"]], 2)
    values = torch.cat([leaves["prefix_value"].expand(3, -1, -1, -1), leaves["value"]], 2)
    mask = torch.ones(case.tokens, case.prefix + case.tokens).tril(case.prefix).bool()
    out = scaled_dot_product_attention(
        leaves["query"], keys, values, attn_mask=mask, enable_gqa=True
    )
    out.backward(inputs["grad_out"])
    torch.testing.assert_close(got["out"], out.detach(), rtol=1e-12, atol=1e-12)
    for name, leaf in leaves.items():
        torch.testing.assert_close(got[name], leaf.grad, rtol=1e-11, atol=1e-12)


def test_half_precision_is_computed_in_float32():
    case = Case()
    inputs = tensors(case, torch.bfloat16)
    out = reference.attention(
        inputs["query"],
        inputs["key"],
        inputs["value"],
        Prefix(inputs["prefix_key"], inputs["prefix_value"]),
        scale=0.25,
    )
    exact = run(case, "reference", {k: x.double() for k, x in inputs.items()})["out"]
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, exact.to(torch.bfloat16), rtol=8e-3, atol=1e-6)
