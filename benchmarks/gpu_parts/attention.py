"""The Triton twin of attention: how exact it is, and how fast against SDPA."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu import SHAPES
from benchmarks.gpu_parts.part import Part
from kernels import dispatch
from kernels.shared_prefix_attention import OP, Prefix, accumulation_dtype, attention

LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Largest relative L2 error against float64; float32 products are three of TF32 on a GPU."""


@dataclass(frozen=True)
class Case:
    """Sizes of one attention call."""

    batch: int
    tokens: int
    prefix: int
    kv_heads: int = 8
    group: int = 2
    head_dim: int = 128
    value_dim: int = 128
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


CASES = {
    "plain": Case(4, 128, 4096, kv_heads=4),
    "odd sizes": Case(3, 65, 1001, kv_heads=4),
    "one token without a prefix": Case(2, 1, 0, kv_heads=4),
    "window, cap and sinks": Case(2, 100, 777, 2, 4, 64, 64, window=300, softcap=20.0, sinks=True),
    "unequal head sizes": Case(2, 100, 777, 4, 1, 192, 128),
    "heads of 256": Case(2, 100, 777, 2, 2, 256, 256),
}
TOY_CASES = {
    "plain": Case(2, 5, 20, 2, 2, 16, 16),
    "window, cap and sinks": Case(1, 5, 20, 1, 3, 24, 8, window=9, softcap=2.0, sinks=True),
}
SPEEDS = dict(
    zip(
        SHAPES,
        (Case(8, 256, 2**14), Case(8, 256, 2**16), Case(1, 2048, 63488), Case(1, 32, 2**16)),
        strict=True,
    )
)
TOY_SPEED = Case(2, 5, 20, 1, 2, 16, 16)


def accuracy(part: Part) -> None:
    """Values and gradients of the Triton twin against the reference in float64."""
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        worst = {"value": 0.0, "gradient": 0.0}
        for label, case in (TOY_CASES if part.dry else CASES).items():
            what = f"{name} {label}"
            errors = part.attempt(what, partial(_errors, case, dtype, part.device), 5)
            if errors is None:
                continue
            part.say(f"{what}: {', '.join(f'{k} {e:.1e}' for k, e in errors.items())}")
            # The gradient of sinks is a sum that cancels.
            scaled = {key: e / 10 if key == "sinks" else e for key, e in errors.items()}
            if not all(e <= LIMITS[dtype] for e in scaled.values()):
                part.failed.append(f"{what}: past {LIMITS[dtype]:g}")
            for key, error in scaled.items():
                kind = "value" if key == "out" else "gradient"
                worst[kind] = max(worst[kind], math.inf if math.isnan(error) else error)
        for kind, error in worst.items():
            part.figure(f"triton_{name}_{kind}_error", error or None)


def _errors(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    inputs = _inputs(case, dtype, device)
    with dispatch.override(OP, "triton"):
        got = _results(case, inputs)
    with dispatch.override(OP, "reference"):
        truth = _results(case, {name: x.double() for name, x in inputs.items()})
    return {name: _relative(got[name], truth[name]) for name in truth if truth[name].numel()}


def _inputs(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    heads = case.kv_heads * case.group
    made = {
        "query": normal(case.batch, heads, case.tokens, case.head_dim),
        "key": normal(case.batch, case.kv_heads, case.tokens, case.head_dim),
        "value": normal(case.batch, case.kv_heads, case.tokens, case.value_dim),
        "prefix_key": normal(case.kv_heads, case.prefix, case.head_dim),
        "prefix_value": normal(case.kv_heads, case.prefix, case.value_dim),
        "grad_out": normal(case.batch, heads, case.tokens, case.value_dim),
    }
    return made | ({"sinks": normal(heads)} if case.sinks else {})


def _prefix(inputs: dict[str, Tensor]) -> Prefix:
    key, value = inputs["prefix_key"], inputs["prefix_value"]
    dtype = accumulation_dtype(key.dtype)
    return Prefix(
        key, value, torch.zeros_like(key, dtype=dtype), torch.zeros_like(value, dtype=dtype)
    )


def _results(case: Case, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Output and all gradients, by name."""
    prefix = _prefix(inputs)
    names = [name for name in ("query", "key", "value", "sinks") if name in inputs]
    leaves = {name: inputs[name].detach().clone().requires_grad_() for name in names}
    out = attention(
        leaves["query"],
        leaves["key"],
        leaves["value"],
        prefix,
        scale=case.head_dim**-0.5,
        window=case.window,
        softcap=case.softcap,
        sinks=leaves.get("sinks"),
    )
    out.backward(inputs["grad_out"])  # type: ignore[no-untyped-call]
    found = {name: leaf.grad for name, leaf in leaves.items()} | {
        "prefix_key": prefix.key_grad,
        "prefix_value": prefix.value_grad,
    }
    return {"out": out.detach()} | {k: x for k, x in found.items() if x is not None}


def _relative(got: Tensor, truth: Tensor) -> float:
    apart = (got.double() - truth.double()).norm()
    return float(apart / truth.double().norm())


def speed(part: Part) -> None:
    """TFLOP/s of useful work in bf16, against SDPA on copies of the prefix made beforehand."""
    for shape, full in SPEEDS.items():
        case = TOY_SPEED if part.dry else full
        inputs = part.attempt(shape, partial(_inputs, case, torch.bfloat16, part.device), 3)
        if inputs is None:
            continue
        results = {}
        for name, contestant in (("triton", _ours), ("sdpa", _copied)):
            found = part.attempt(
                f"{name} {shape}", partial(_speeds, part, case, inputs, contestant), 3
            )
            if found is None:
                continue
            out, *rates = found
            results[name] = out
            for direction, rate in zip(("forward", "backward"), rates, strict=True):
                part.figure(f"{name}_{shape}_{direction}_tflops", rate / 1e12)
        if len(results) == 2 and not _relative(*results.values()) <= 2 * LIMITS[torch.bfloat16]:
            part.failed.append(shape)
            part.say(f"{shape}: the two did not compute the same")


Contestant = Callable[[Case, dict[str, Tensor]], tuple[Callable[[], Tensor], list[Tensor]]]


def _ours(case: Case, inputs: dict[str, Tensor]) -> tuple[Callable[[], Tensor], list[Tensor]]:
    query, key, value = (inputs[k].clone().requires_grad_() for k in ("query", "key", "value"))
    prefix, scale = _prefix(inputs), case.head_dim**-0.5

    def run() -> Tensor:
        with dispatch.override(OP, "triton"):
            return attention(query, key, value, prefix, scale=scale)

    return run, [query, key, value]


def _copied(case: Case, inputs: dict[str, Tensor]) -> tuple[Callable[[], Tensor], list[Tensor]]:
    def copied(name: str) -> Tensor:
        copies = inputs[f"prefix_{name}"].expand(case.batch, -1, -1, -1)
        return torch.cat([copies, inputs[name]], dim=2).requires_grad_()

    query, key, value = inputs["query"].clone().requires_grad_(), copied("key"), copied("value")
    bias = causal_lower_right(case.tokens, case.prefix + case.tokens)

    def run() -> Tensor:
        return scaled_dot_product_attention(query, key, value, attn_mask=bias, enable_gqa=True)

    return run, [query, key, value]


def _speeds(
    part: Part, case: Case, inputs: dict[str, Tensor], contestant: Contestant
) -> tuple[Tensor, float, float]:
    """Output, and FLOP/s forward (4 head_dim for a pair of query and key) and backward (10)."""
    run, leaves = contestant(case, inputs)
    heads = case.batch * case.kv_heads * case.group
    pairs = heads * case.tokens * (case.prefix + (case.tokens + 1) / 2)
    out = run()

    def backward() -> object:
        return torch.autograd.grad([out], leaves, [inputs["grad_out"]], retain_graph=True)

    work = pairs * case.head_dim
    return out.detach(), 4 * work / _seconds(part, run), 10 * work / _seconds(part, backward)


def _seconds(part: Part, call: Callable[[], object]) -> float:
    """Of one call, on average over 0.2 s, after a call that does not count."""

    def timed(calls: int) -> float:
        part.wait()
        begun = time.perf_counter()
        for _ in range(calls):
            call()
        part.wait()
        return (time.perf_counter() - begun) / calls

    timed(1)
    return timed(1) if part.dry else timed(max(1, min(100, int(0.2 / timed(1)))))
