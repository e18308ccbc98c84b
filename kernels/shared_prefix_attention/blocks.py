"""Attention of rows over one run of keys in plain torch blocks, on any device and in any dtype.

What the flash kernels cannot do is done here: windows, soft caps, unequal head and value sizes, a
backward that computes the query's gradient only, and one that adds the key and value gradients in
place. Blocks out of the band of visible keys are skipped, only blocks that cross its edge are
masked. Half precision is computed in float32. Forward is the online softmax of Milakov and
Gimelshein (2018), backward the one of FlashAttention-2 (Dao 2023) with the log-sum-exp as input:
fed with that of several runs of keys merged, it gives this run's share of the exact gradient.

Shapes: query `[groups, rows, head_dim]` (already scaled), key and value `[groups, keys, dim]`,
log-sum-exp `[groups, rows, 1]`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.shared_prefix_attention.prefix import accumulation_dtype

ROWS, KEYS = 256, 512  # a block's scores and their gradient fit the second-level cache of a core
CPU_SCORES = ROWS * KEYS  # heads with few rows and keys share a block up to this many scores
GPU_SCORES = 128 * CPU_SCORES


@dataclass(frozen=True)
class Band:
    """Which keys a row sees: those up to its position, with a window the last `window` of them.

    Row r is at position `first + r // repeat`, counted from the first key.
    """

    first: int
    repeat: int
    window: int | None = None

    def mask(self, rows: range, keys: range, device: torch.device) -> Tensor | None:
        """True where a block's key is hidden `[rows, keys]`; None where all of them are seen."""
        low, high = self._position(rows[0]), self._position(rows[-1])
        if keys[-1] <= low and (self.window is None or keys[0] > high - self.window):
            return None
        at = self.first + torch.arange(rows.start, rows.stop, device=device)[:, None] // self.repeat
        key = torch.arange(keys.start, keys.stop, device=device)
        hidden = key > at
        return hidden if self.window is None else hidden | (key <= at - self.window)

    def meets(self, rows: range, keys: range) -> bool:
        """Whether any row of a block sees any of its keys."""
        low, high = self._position(rows[0]), self._position(rows[-1])
        return keys[0] <= high and (self.window is None or keys[-1] > low - self.window)

    def _position(self, row: int) -> int:
        return self.first + row // self.repeat


def forward(
    query: Tensor, key: Tensor, value: Tensor, band: Band | None, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Output `[groups, rows, value_dim]` and log-sum-exp, both in `accumulation_dtype`.

    A row that sees no key gets output 0 and log-sum-exp -inf.
    """
    dtype = accumulation_dtype(query.dtype)
    groups, rows, _ = query.shape
    out = query.new_zeros(groups, rows, value.shape[2], dtype=dtype)
    lse = query.new_full((groups, rows, 1), -torch.inf, dtype=dtype)
    for some in _head_runs(query, key):
        for row in _runs(rows, ROWS):
            q = query[some, _slice(row)].to(dtype)
            # Not -inf: a row whose keys so far are all hidden must not compute inf - inf.
            top = q.new_full((*q.shape[:2], 1), torch.finfo(dtype).min)
            total = torch.zeros_like(top)
            acc = out[some, _slice(row)]
            for keys in _runs(key.shape[1], KEYS):
                if band is not None and not band.meets(row, keys):
                    continue
                scores = torch.bmm(q, key[some, _slice(keys)].to(dtype).mT)
                if softcap is not None:
                    scores.div_(softcap).tanh_().mul_(softcap)
                _hide(scores, band, row, keys)
                new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
                weights = scores.sub_(new_top).exp_()
                decay = (top - new_top).exp_()
                total = total.mul_(decay).add_(weights.sum(-1, keepdim=True))
                acc.mul_(decay).baddbmm_(weights, value[some, _slice(keys)].to(dtype))
                top = new_top
            acc.div_(total.clamp_min(torch.finfo(dtype).tiny))
            lse[some, _slice(row)] = top + total.log()
    return out, lse


def backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    band: Band | None,
    softcap: float | None = None,
    grads: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The gradient of the scaled query in `accumulation_dtype`; adds key's and value's to grads.

    lse is the log-sum-exp over all keys of a row, delta = sum(grad_out * out) `[groups, rows, 1]`.
    """
    dtype = accumulation_dtype(query.dtype)
    grad = query.new_zeros(query.shape, dtype=dtype)
    for some in _head_runs(query, key):
        for row in _runs(query.shape[1], ROWS):
            at = _slice(row)
            q, do = query[some, at].to(dtype), grad_out[some, at].to(dtype)
            minus_lse, minus_delta = lse[some, at].neg(), delta[some, at].neg()
            acc = grad[some, at]
            for keys in _runs(key.shape[1], KEYS):
                if band is not None and not band.meets(row, keys):
                    continue
                k, v = key[some, _slice(keys)].to(dtype), value[some, _slice(keys)].to(dtype)
                slope = None
                if softcap is None:
                    scores = torch.baddbmm(minus_lse, q, k.mT)
                else:
                    tanh = torch.bmm(q, k.mT).div_(softcap).tanh_()
                    scores = torch.add(minus_lse, tanh, alpha=softcap)
                    slope = tanh.square_().neg_().add_(1)
                _hide(scores, band, row, keys)
                weights = scores.exp_()
                if grads is not None:
                    grads[1][some, _slice(keys)].baddbmm_(weights.mT, do)
                scores_grad = weights.mul_(torch.baddbmm(minus_delta, do, v.mT))
                if slope is not None:
                    scores_grad.mul_(slope)
                acc.baddbmm_(scores_grad, k)
                if grads is not None:
                    grads[0][some, _slice(keys)].baddbmm_(scores_grad.mT, q)
    return grad


def _hide(scores: Tensor, band: Band | None, rows: range, keys: range) -> None:
    hidden = None if band is None else band.mask(rows, keys, scores.device)
    if hidden is not None:
        scores.masked_fill_(hidden, -torch.inf)


def _head_runs(query: Tensor, key: Tensor) -> Iterator[slice]:
    scores = min(ROWS, query.shape[1]) * min(KEYS, key.shape[1])
    limit = CPU_SCORES if query.device.type == "cpu" else GPU_SCORES
    return (_slice(run) for run in _runs(query.shape[0], max(1, limit // max(1, scores))))


def _runs(total: int, size: int) -> Iterator[range]:
    return (range(start, min(start + size, total)) for start in range(0, total, size))


def _slice(run: range) -> slice:
    return slice(run.start, run.stop)
