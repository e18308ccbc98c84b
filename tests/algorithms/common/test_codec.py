"""Codecs against slow ones that take value by value."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from algorithms.common.codec import CODECS, Bf16Codec
from tests.reductions import values

NAMES = pytest.mark.parametrize("name", list(CODECS))
BLOCK_BYTES = {
    "bf16": 2,
    "int8": 64 + 2,
    "int4": 32 + 2,
    "int2": 16 + 2,
    "sign": 8 + 2,
    "top_k": 192 + 32 + 4,
}
TOPS = {"int8": 127, "int4": 7}


def test_bf16_codec_rounds_to_nearest_even_and_keeps_its_input() -> None:
    held = torch.tensor([1.0, 1 + 2**-8, 1 + 3 * 2**-8, -3e38, float("inf"), 0.0])
    before = held.clone()
    encoded = Bf16Codec().encode(held)
    assert encoded.dtype == torch.uint8 and encoded.shape == (12,)
    decoded = Bf16Codec().decode(encoded, 6, torch.float32)
    assert decoded.tolist()[:3] == [1.0, 1.0, 1 + 2**-6]
    assert torch.equal(held, before)


def coded(name: str, flat: Tensor) -> Tensor:
    before = flat.clone()
    codec = CODECS[name]
    encoded = codec.encode(flat)
    assert encoded.dtype == torch.uint8
    blocks = -(-flat.numel() // codec.block)
    assert encoded.shape == (BLOCK_BYTES[name] * blocks,)
    decoded = codec.decode(encoded, flat.numel(), flat.dtype)
    assert torch.equal(flat.view(torch.uint8), before.view(torch.uint8))
    assert decoded.shape == flat.shape and decoded.dtype == flat.dtype
    written = encoded.clone()
    decoded.zero_()  # a new tensor: changes neither
    assert torch.equal(encoded, written)
    assert torch.equal(flat.view(torch.uint8), before.view(torch.uint8))
    return codec.decode(encoded, flat.numel(), flat.dtype)


def slow_integers(flat: Tensor, top: int) -> Tensor:
    """Block by block and value by value, in the arithmetic of float32."""
    result = []
    for block in torch.split(flat, 64):
        scale = float((block.abs().max() / top).to(torch.bfloat16))
        for value in block:
            level = 0 if scale == 0 else round(float(value / torch.tensor(scale)))
            result.append(max(-top, min(top, level)) * scale)
    return torch.tensor(result)


@pytest.mark.parametrize("name", list(TOPS))
@pytest.mark.parametrize("n", [1, 63, 64, 65, 1000])
@pytest.mark.parametrize("size", [1e-44, 1e-40, 1e-6, 1.0, 1e34])
def test_integer_codecs_equal_a_slow_one(name: str, n: int, size: float) -> None:
    flat = values(n, n, dtype=torch.float32) * size
    found = coded(name, flat)
    assert torch.equal(found, slow_integers(flat, TOPS[name]))
    if size >= 1e-6:  # else the scale is subnormal and has fewer bits
        assert torch.equal(coded(name, found), found)
        assert ((found - flat).abs() <= 0.51 * flat.abs().max() / TOPS[name]).all()


def slow_int2(block: list[float]) -> list[float]:
    """Of 64 values: the nearest of four levels times their root mean square."""
    scale = float(torch.tensor(math.sqrt(sum(x * x for x in block) / 64)).bfloat16())
    levels = [-1.510, -0.4528, 0.4528, 1.510]
    return [scale * levels[sum(x >= scale * t for t in (-0.9816, 0, 0.9816))] for x in block]


def slow_sign(block: list[float]) -> list[float]:
    scale = float(torch.tensor(sum(abs(x) for x in block) / 64).bfloat16())
    return [-scale if x < 0 else scale for x in block]


@pytest.mark.parametrize("slow", [slow_int2, slow_sign])
@pytest.mark.parametrize("n", [1, 63, 64, 65, 1000])
@pytest.mark.parametrize("size", [1e-15, 1.0, 1e15])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_codes_of_few_bits_equal_slow_ones(
    slow: Callable[[list[float]], list[float]], n: int, size: float, dtype: torch.dtype
) -> None:
    flat = values(n, n, dtype=dtype) * size
    flat[n // 2] = 0.0
    padded = [*flat.tolist(), *[0.0] * (-n % 64)]
    expected = sum((slow(padded[start : start + 64]) for start in range(0, n, 64)), [])[:n]
    found = coded(slow.__name__.removeprefix("slow_"), flat)
    torch.testing.assert_close(found.tolist(), expected, rtol=1e-6, atol=0)


def test_what_codes_of_few_bits_lose_of_a_normal_variable() -> None:
    flat = torch.randn(64_000, generator=torch.Generator().manual_seed(0))
    lost = {name: float((coded(name, flat) - flat).square().mean()) for name in ("int2", "sign")}
    assert lost["int2"] == pytest.approx(0.1175, rel=0.05)  # 4 levels, table I of Max (1960)
    assert lost["sign"] == pytest.approx(1 - 2 / math.pi, rel=0.05)


def test_int2_of_squares_beyond_float32() -> None:
    assert not coded("int2", torch.full((64,), 1e-24)).any()
    assert coded("int2", torch.full((64,), 1e20)).isinf().all()
    for size in (1e-24, 1e20):
        found = coded("int2", torch.full((64,), size, dtype=torch.float64))
        torch.testing.assert_close(found / size, torch.full_like(found, 1.51), rtol=2**-8, atol=0)


def slow_top_k(block: Tensor) -> Tensor:
    """One block of 4096: keep 128 values, each as one of two mean magnitudes."""
    kept = block.abs().argsort(descending=True)[:128].tolist()
    mean = sum(abs(float(block[i])) for i in kept) / 128
    upper = [abs(float(block[i])) for i in kept if abs(float(block[i])) > mean]
    lower = [abs(float(block[i])) for i in kept if abs(float(block[i])) <= mean]
    result = torch.zeros(4096, dtype=torch.float64)
    for i in kept:
        group = upper if abs(float(block[i])) > mean else lower
        result[i] = sum(group) / len(group) * (1 if block[i] > 0 else -1)
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_top_k_equals_a_slow_one(dtype: torch.dtype) -> None:
    flat = values(0, 3 * 4096 + 500, dtype=dtype) ** 3  # heavy tails
    found = coded("top_k", flat)
    padded = torch.cat([flat, flat.new_zeros(4096 - 500)])
    expected = torch.cat([slow_top_k(block) for block in torch.split(padded, 4096)])[: len(flat)]
    assert torch.equal(found != 0, expected != 0)
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=0)
    assert [int((part != 0).sum()) for part in torch.split(found, 4096)] == [128] * 4


def test_top_k_of_few_values_keeps_them_all() -> None:
    flat = torch.zeros(5000)
    flat[[0, 17, 4095, 4096, 4999]] = torch.tensor([2.0, -2.0, 2.0, -3.0, -0.5])
    expected = flat.clone()
    expected[[4096, 4999]] = torch.tensor([-1.75, -1.75])  # two values, both above their mean
    assert torch.equal(coded("top_k", flat), expected)


def test_top_k_of_equal_values_keeps_128_of_them() -> None:
    found = coded("top_k", torch.full((4096,), 0.1))
    assert (found == torch.tensor(0.1).bfloat16()).sum() == 128
    assert (found == 0).sum() == 4096 - 128


@NAMES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_zeros_and_dtypes(name: str, dtype: torch.dtype) -> None:
    assert coded(name, torch.zeros(0, dtype=dtype)).shape == (0,)
    assert not coded(name, torch.zeros(100, dtype=dtype)).any()
    flat = values(0, 300, dtype=dtype)
    assert coded(name, flat).any()
    wide = CODECS[name].encode(flat.to(torch.float64))
    assert torch.equal(CODECS[name].encode(flat), wide) or name == "top_k"  # sums of another dtype
    read = CODECS[name].decode(wide, 300, torch.float64).to(dtype)
    assert torch.equal(CODECS[name].decode(wide, 300, dtype), read)


@NAMES
def test_blocks_are_written_each_on_its_own(name: str) -> None:
    codec = CODECS[name]
    flat = values(0, 5 * codec.block + 3, dtype=torch.float32)
    parts = [codec.encode(part) for part in torch.split(flat, 2 * codec.block)]
    assert torch.equal(codec.encode(flat), torch.cat(parts))
    assert torch.equal(codec.encode(flat), codec.encode(flat.clone()))


@NAMES
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 1, -1])
def test_what_is_not_finite_comes_back_so(name: str, bad: float, place: int) -> None:
    codec = CODECS[name]
    flat = values(0, 2 * codec.block + codec.block // 2 + 1, dtype=torch.float32)
    flat[place] = bad
    encoded = codec.encode(flat)
    assert torch.equal(encoded, codec.encode(flat))
    decoded = codec.decode(encoded, len(flat), torch.float32)
    assert not decoded[place].isfinite()
    clean = torch.ones(len(flat), dtype=torch.bool)
    block = place % len(flat) // codec.block
    clean[block * codec.block : (block + 1) * codec.block] = False
    assert decoded[clean].isfinite().all() and clean.any()


@NAMES
def test_subnormal_and_largest_numbers(name: str) -> None:
    tiny = torch.tensor([1e-45, -1e-42, 1e-39, 0.0])
    assert (coded(name, tiny) - tiny).abs().max() <= 1e-39
    if name in ("int2", "sign"):  # which read the zeros behind them as numbers of their size
        return
    huge = torch.tensor([1e36, -1e36])
    torch.testing.assert_close(coded(name, huge), huge, rtol=2**-8, atol=0)
