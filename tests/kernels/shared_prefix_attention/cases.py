"""Random inputs of a size, what a twin makes of them, and how far that is from float64."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import dispatch
from kernels.shared_prefix_attention import OP, Prefix, accumulation_dtype, attention

# Largest relative L2 error of outputs and gradients; sinks' gradients are sums that cancel.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
SINKS_TOLERANCE = {name: 10 * tolerance for name, tolerance in TOLERANCE.items()}


@dataclass(frozen=True)
class Case:
    prefix: int = 33
    tokens: int = 7
    batch: int = 2
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 16
    value_dim: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    def __str__(self):
        default = Case.__dataclass_fields__
        parts = [f"{k}={v}" for k, v in vars(self).items() if v != default[k].default]
        return ",".join(parts) or "plain"


def tensors(case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    """The inputs and the output's cotangent, the same numbers for a case and dtype every time."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    heads, kv_heads, batch, tokens = (
        case.kv_heads * case.group,
        case.kv_heads,
        case.batch,
        case.tokens,
    )
    made = {
        "query": normal(batch, heads, tokens, case.head_dim),
        "key": normal(batch, kv_heads, tokens, case.head_dim),
        "value": normal(batch, kv_heads, tokens, case.value_dim),
        "prefix_key": normal(kv_heads, case.prefix, case.head_dim),
        "prefix_value": normal(kv_heads, case.prefix, case.value_dim),
        "grad_out": normal(batch, heads, tokens, case.value_dim),
    }
    return made | ({"sinks": normal(heads)} if case.sinks else {})


def run(
    case: Case, twin: str, inputs: dict[str, Tensor], prefix_grad=True, passes=1, saved=None
) -> dict[str, Tensor]:
    """Output and all gradients of one twin, by name, after a number of backward passes."""
    given = {name: x.detach().clone() for name, x in inputs.items()}
    prefix = Prefix(given["prefix_key"], given["prefix_value"])
    if prefix_grad:
        dtype = accumulation_dtype(prefix.key.dtype)
        prefix.key_grad = torch.zeros_like(prefix.key, dtype=dtype)
        prefix.value_grad = torch.zeros_like(prefix.value, dtype=dtype)
    leaves = {
        name: given[name].requires_grad_()
        for name in ("query", "key", "value", "sinks")
        if name in given
    }
    with dispatch.override(OP, twin):
        out = attention(
            leaves["query"],
            leaves["key"],
            leaves["value"],
            prefix,
            scale=case.head_dim**-0.5,
            window=case.window,
            softcap=case.softcap,
            sinks=leaves.get("sinks"),
            saved=saved,
        )
    for _ in range(passes):
        out.backward(given["grad_out"], retain_graph=True)
    results = {"out": out.detach()} | {name: leaf.grad for name, leaf in leaves.items()}
    if prefix_grad:
        results |= {"prefix_key": prefix.key_grad, "prefix_value": prefix.value_grad}
    return results


def errors(case: Case, twin: str, dtype: torch.dtype, prefix_grad=True) -> dict[str, float]:
    """Relative L2 errors of a twin against the reference in float64 on the same numbers."""
    inputs = tensors(case, dtype)
    got = run(case, twin, inputs, prefix_grad)
    truth = run(case, "reference", {name: x.double() for name, x in inputs.items()}, prefix_grad)
    return {name: relative(got[name], truth[name]) for name in truth}


def relative(got: Tensor, truth: Tensor) -> float:
    """|got - truth| / |truth|; where the truth vanishes, against numbers of size one."""
    assert got.shape == truth.shape
    unit = truth.numel() ** 0.5
    size = truth.norm().item()
    size = size if size > 1e-6 * unit else unit
    return (got.double() - truth).norm().item() / max(size, 1e-300)


def too_large(found: dict[str, float], dtype: torch.dtype) -> dict[str, float]:
    """The errors past the tolerance of a dtype; NaN is past every one."""
    limit, sinks = TOLERANCE[dtype], SINKS_TOLERANCE[dtype]
    return {k: e for k, e in found.items() if not e <= (sinks if k == "sinks" else limit)}
