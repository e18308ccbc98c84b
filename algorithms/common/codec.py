"""How a flat buffer is written for the wire, and how it is read.

Sources: blocks with their own scale as in 8-bit optimizers (arXiv 2110.02861), here linear and
symmetric; top-k with 2-bit values as in SparseLoCo (arXiv 2508.15706), whose blocks are 64 x 64
tiles of matrices; 2 bits at the levels of the best quantiser of a normal variable (J. Max, 1960);
signs with their mean magnitude as in 1-bit SGD and signSGD (arXiv 1802.04434). These codecs see a
flat buffer: their blocks are runs of it.

Bits per value: bf16 16, int8 8.25, int4 4.25, int2 2.25, sign 1.25, top_k 0.445 (whole blocks).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding


class Codec(Protocol):
    """A code for flat buffers. What it loses is the caller's to keep (error feedback).

    Blocks of `block` values are written one after the other, each on its own and in equally many
    bytes; the last one is filled up with zeros. So a buffer that is cut between blocks has the
    concatenation of its parts' codes as its code.
    """

    @property
    def block(self) -> int: ...

    def encode(self, flat: Tensor) -> Tensor:
        """Bytes (uint8 [size]) of `flat` [numel]; `size` may depend on its numel and dtype only,
        because every rank must send equally much. Does not change `flat`."""
        ...

    def decode(self, encoded: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Values [numel] of `dtype`, a new tensor; the same bits wherever the same bytes are
        decoded. A block that held inf or NaN holds inf or NaN again, perhaps at other places."""
        ...


class Bf16Codec:
    """Two bytes per value: rounded to bfloat16, to nearest even."""

    block = 1

    def encode(self, flat: Tensor) -> Tensor:
        return flat.to(torch.bfloat16).view(torch.uint8)

    def decode(self, encoded: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        return encoded.view(torch.bfloat16)[:numel].to(dtype, copy=True)


class Int8Codec:
    """64 int8 in [-127, 127], then their scale absmax / 127 in bfloat16: 66 bytes a block."""

    block = 64

    def encode(self, flat: Tensor) -> Tensor:
        levels, scale = _quantized(_in_blocks(flat, self.block), 127)
        return torch.cat([levels.view(torch.uint8), scale], dim=1).view(-1)

    def decode(self, encoded: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        rows = encoded.view(-1, self.block + 2)
        levels = rows[:, : self.block].view(torch.int8)
        return _scaled(levels, rows[:, self.block :], numel, dtype)


class Int4Codec:
    """64 integers in [-7, 7], then their scale absmax / 7 in bfloat16: 34 bytes a block.

    Byte i of a block holds value i in its low half and value 32 + i in its high half, plus 8.
    """

    block = 64

    def encode(self, flat: Tensor) -> Tensor:
        levels, scale = _quantized(_in_blocks(flat, self.block), 7)
        low, high = levels.add_(8).view(torch.uint8).view(-1, 2, 32).unbind(1)
        return torch.cat([high * 16 + low, scale], dim=1).view(-1)

    def decode(self, encoded: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        rows = encoded.view(-1, self.block // 2 + 2)
        pairs = rows[:, :32].contiguous()  # whose shift is six times as fast
        levels = torch.cat([pairs & 15, pairs >> 4], dim=1).view(torch.int8).sub_(8)
        return _scaled(levels, rows[:, 32:], numel, dtype)


class Int2Codec:
    """2 bits for each of 64 values, then their root mean square in bfloat16: 18 bytes a block.

    Value 4 i + j is in bits 2 j of byte i. The levels, -1.510, -0.4528, 0.4528 and 1.510 times the
    scale, lose least of a normal variable: 12 % of its variance. Squares are of the input's type:
    in float32 blocks below 1e-23 read as 0, and those above 1e19 as not finite.
    """

    block = 64

    def encode(self, flat: Tensor) -> Tensor:
        blocks = _in_blocks(flat, self.block)
        scale = (torch.linalg.vector_norm(blocks, dim=1) / 8).to(torch.bfloat16)
        # Half the way between the levels; times a float32, so that every dtype has one threshold.
        threshold = (scale.to(torch.float32) * 0.9816).to(blocks.dtype)
        # The other thresholds are its negative and 0: all are multiples. Divisions by 0 as in
        # `_quantized`.
        levels = (blocks / threshold.unsqueeze(1)).floor_().clamp_(-2, 1).nan_to_num_(0.0)
        return _packed(levels.to(torch.int8).add_(2), 2, scale)

    def decode(self, encoded: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        return _looked_up(encoded, _FOUR_LEVELS, numel, dtype)


class SignCodec:
    """A bit for each of 64 values, 1 for negative ones, then their mean magnitude in bfloat16: 10
    bytes a block. Value 8 i + j is in bit j of byte i; 0 counts as positive."""

    block = 64

    def encode(self, flat: Tensor) -> Tensor:
        blocks = _in_blocks(flat, self.block)
        scale = blocks.abs().mean(dim=1).to(torch.bfloat16)
        codes = blocks.sign().clamp_(max=0).to(torch.int8).neg_()  # comparisons take longer
        return _packed(codes, 1, scale)

    def decode(self, encoded: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        return _looked_up(encoded, _TWO_LEVELS, numel, dtype)


class TopKCodec:
    """The 128 largest magnitudes of 4096 values, each with 12 bits of place and 2 of value.

    The 2 bits are a sign and one of two levels: the mean magnitude of those kept values that lie
    above the mean of all kept ones, and of the others. 192 bytes of places, 32 of values, 4 of
    levels in bfloat16: 228 bytes a block.
    """

    block = 4096
    kept = 128

    def encode(self, flat: Tensor) -> Tensor:
        values = _in_blocks(flat, self.block)
        places = values.abs().topk(self.kept, dim=1, sorted=False).indices
        values = values.gather(1, places)
        magnitudes = values.abs()
        large = magnitudes > magnitudes.mean(dim=1, keepdim=True)
        count = large.sum(dim=1)
        upper = (magnitudes * large).sum(dim=1) / count.clamp(min=1)
        lower = torch.where(large, 0, magnitudes).sum(dim=1) / (self.kept - count).clamp(min=1)
        levels = torch.stack([lower, upper], dim=1).to(torch.bfloat16).view(torch.uint8)

        first, second = places.view(-1, 2, self.kept // 2).unbind(1)
        triples = [first & 255, (first >> 8) + (second & 15) * 16, second >> 4]
        crumbs = (values.signbit() * 2 + large).view(-1, 4, self.kept // 4)
        shifts = torch.tensor([1, 4, 16, 64], device=flat.device).view(4, 1)
        packed = torch.cat([*triples, (crumbs * shifts).sum(dim=1)], dim=1).to(torch.uint8)
        return torch.cat([packed, levels], dim=1).view(-1)

    def decode(self, encoded: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        rows = encoded.view(-1, 228)
        low, middle, high = rows[:, :192].to(torch.int64).view(-1, 3, 64).unbind(1)
        places = torch.cat([low + (middle & 15) * 256, (middle >> 4) + high * 16], dim=1)
        packed = rows[:, 192:224]
        crumbs = torch.cat([(packed >> shift) & 3 for shift in (0, 2, 4, 6)], dim=1).to(torch.int64)
        levels = _as_bf16(rows[:, 224:]).to(dtype)
        values = torch.cat([levels, -levels], dim=1).gather(1, crumbs)
        blocks = torch.zeros(len(rows), self.block, dtype=dtype, device=encoded.device)
        return blocks.scatter_(1, places, values).view(-1)[:numel]


CODECS: dict[str, Codec] = {
    "bf16": Bf16Codec(),
    "int8": Int8Codec(),
    "int4": Int4Codec(),
    "int2": Int2Codec(),
    "sign": SignCodec(),
    "top_k": TopKCodec(),
}
"""By the name that a config uses."""


def _table(levels: list[float], bits: int) -> Tensor:
    """Byte -> the levels of the codes in it, the one in its lowest bits first."""
    places = torch.arange(0, 8, bits)
    return torch.tensor(levels)[(torch.arange(256)[:, None] >> places) % len(levels)]


_FOUR_LEVELS = _table([-1.510, -0.4528, 0.4528, 1.510], 2)
_TWO_LEVELS = _table([1.0, -1.0], 1)


def _in_blocks(flat: Tensor, block: int) -> Tensor:
    """`flat` [numel] as [blocks, block] in float32 (float64 stays), the last block filled up."""
    if flat.dtype != torch.float64:
        flat = flat.to(torch.float32)
    if missing := -flat.numel() % block:
        flat = torch.nn.functional.pad(flat, (0, missing))
    return flat.view(-1, block)


def _quantized(blocks: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Integers (int8 [blocks, block]) in [-top, top] and the scales' bytes (uint8 [blocks, 2])."""
    largest = torch.maximum(blocks.amax(dim=1), -blocks.amin(dim=1))
    scale = (largest / top).to(torch.bfloat16)
    levels = (blocks / scale.to(blocks.dtype).unsqueeze(1)).round_()
    # The rounded scale may be too small for the largest, or 0: all of the block then reads as 0.
    # A cast of NaN is undefined; where a scale is not finite, it alone tells the reader.
    levels = levels.clamp_(-top, top).nan_to_num_(0.0)
    return levels.to(torch.int8), scale.view(torch.uint8).view(-1, 2)


def _scaled(levels: Tensor, scale: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """The first `numel` products. Exact in float32: 7 bits times 8."""
    return (levels * _as_bf16(scale).to(torch.float32)).view(-1)[:numel].to(dtype)


def _packed(codes: Tensor, bits: int, scale: Tensor) -> Tensor:
    """Rows of bytes: codes of 1 or 2 bits, int8 [blocks, 64], side by side, the first lowest; then
    the scale, bfloat16 [blocks]."""
    word, factor = {1: (torch.int64, 0x0102040810204080), 2: (torch.int32, 0x01041040)}[bits]
    # A word holds the codes of one byte; the product adds up copies of it, each shifted so that in
    # the word's highest byte every code is at its place. What runs over is not wanted.
    packed = (codes.view(word) * factor >> 8 * (word.itemsize - 1)).to(torch.uint8)
    return torch.cat([packed, scale.view(torch.uint8).view(-1, 2)], dim=1).view(-1)


def _looked_up(encoded: Tensor, table: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """The first `numel` values of rows of bytes with their scale behind them, in float32."""
    rows = encoded.view(-1, 64 // table.shape[1] + 2)
    levels = embedding(rows[:, :-2].to(torch.int32), table.to(encoded.device))
    return levels.view(-1, 64).mul_(_as_bf16(rows[:, -2:])).view(-1)[:numel].to(dtype)


def _as_bf16(columns: Tensor) -> Tensor:
    """uint8 [blocks, 2 * n] as bfloat16 [blocks, n]; a copy, since columns may lie unaligned."""
    return columns.contiguous().view(torch.bfloat16)
