"""Shared-prefix attention as a few runs of keys whose results are merged by their log-sum-exp.

Groups and branches are folded into the query rows of one call on the single prefix: no repeated
keys, no copy of the prefix, no mask. Runs that every row sees whole, and the causal run of own
keys, go through torch's CPU flash kernel; the rest through `blocks.py`. The flash backward is fed
with the merged output and log-sum-exp, so that each run gives its share of the exact gradient, and
the prefix's share is added in place, in float32, to buffers of the caller: nothing of the prefix's
size is kept per branch. Without such buffers the backward needs three of its five products.

Source: the online softmax over parts of FlashAttention (Dao 2022) and of cascade inference (Ye et
al. 2024), here with a backward. `attention(..., flash=False)` is the same in plain torch.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.shared_prefix_attention import blocks
from kernels.shared_prefix_attention.prefix import Prefix, Saved
from kernels.shared_prefix_attention.query_grad import query_grad
from kernels.shared_prefix_attention.runs import Fold, Run, own_run, prefix_runs

# These operators are private to torch, so we check that they are still what we call.
FLASH_SCHEMAS = {
    "_scaled_dot_product_flash_attention_for_cpu": (
        "(Tensor query, Tensor key, Tensor value, float dropout_p=0., bool is_causal=False, *,"
        " Tensor? attn_mask=None, float? scale=None) -> (Tensor output, Tensor logsumexp)"
    ),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp,"
        " float dropout_p, bool is_causal, *, Tensor? attn_mask=None, float? scale=None)"
        " -> (Tensor grad_query, Tensor grad_key, Tensor grad_value)"
    ),
}
FLASH_KEYS = 4096  # keys per backward call: bounds its gradients, which are added to ours
FLASH_ROWS = 256  # with fewer rows of 64 or more, blocks that add in place are faster
QUERY_ROWS = 256  # with as many, the query's gradient alone is faster in its own loop


def refuses(query: Tensor, value: Tensor) -> str | None:
    """Why this twin cannot run here, or None."""
    if query.device.type != "cpu":
        return f"tensors are on {query.device.type}"
    for name, schema in FLASH_SCHEMAS.items():
        operator = getattr(torch.ops.aten, name, None)
        if operator is None or str(operator.default._schema) != f"aten::{name}{schema}":
            return f"torch {torch.__version__} changed aten::{name}"
    return None


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prefix: Prefix,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    saved: Saved | None = None,
    flash: bool = True,
) -> Tensor:
    """The same as the package's `attention`; without flash in plain torch on any device."""
    batch, heads, tokens, head_dim = query.shape
    fold = Fold(batch, heads, tokens, key.shape[1])
    # The flash kernel wants equal sizes; padding to them would copy the prefix.
    flash = flash and softcap is None and head_dim == value.shape[3]
    out: Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
        query, key, value, sinks, prefix, _Options(fold, scale, window, softcap, flash), saved
    )
    return out


@dataclass(frozen=True)
class _Options:
    fold: Fold
    scale: float
    window: int | None
    softcap: float | None
    flash: bool

    def flashes(self, run: Run) -> bool:
        """Whether the flash kernel knows what rows see of a run: all of it, or a causal square."""
        return self.flash and (run.band is None or run.band.window is None)


class _Rows(NamedTuple):
    """What a backward reads of the queries, folded to rows `[groups, rows, dim]` or not."""

    query: Tensor
    grad_out: Tensor
    out: Tensor
    lse: Tensor  # over all keys, [..., 1]
    delta: Tensor  # sum(grad_out * out), [..., 1]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        prefix: Prefix,
        options: _Options,
        saved: Saved | None,
    ) -> Tensor:
        if saved is None:
            saved = Saved()
        if saved.out is None:
            saved.out, saved.lse = _merged(query, key, value, sinks, prefix, options)
        assert saved.lse is not None
        out = saved.out.detach()  # not the very tensor: autograd marks what is returned
        ctx.save_for_backward(query, key, value, sinks, out, saved.lse.unsqueeze(-1))
        ctx.prefix, ctx.options = prefix, options
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        options: _Options = ctx.options
        fold = options.fold
        delta = (grad_out.to(lse.dtype) * out).sum(-1, keepdim=True)
        rows = _Rows(query, grad_out, out, lse, delta)

        grads = (
            key.new_zeros(key.flatten(0, 1).shape, dtype=lse.dtype),
            value.new_zeros(value.flatten(0, 1).shape, dtype=lse.dtype),
        )
        own = own_run(key, value, fold, options.window, grads)
        own_rows = _Rows(*map(fold.own, rows))
        grad_query = fold.unfold_own(_backward(own_rows, own, options))
        if runs := prefix_runs(ctx.prefix, fold, options.window):
            # Of a single sequence the rows are the same.
            shared = own_rows if fold.batch == 1 else _Rows(*map(fold.shared, rows))
            for run in runs:
                grad_query = grad_query + fold.unfold_shared(_backward(shared, run, options))

        sinks_grad = None
        if sinks is not None:
            mass = (_logits(sinks, fold, lse.dtype).flatten(1, 2) - lse).exp_()
            sinks_grad = mass.mul_(delta).sum((0, 2, 3)).neg_().to(sinks.dtype)
        return (
            grad_query.flatten(1, 2).to(query.dtype),
            grads[0].view(key.shape).to(key.dtype),
            grads[1].view(value.shape).to(value.dtype),
            sinks_grad,
            None,
            None,
            None,
        )


def _merged(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    prefix: Prefix,
    options: _Options,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp over the prefix, the own keys and the sinks."""
    fold = options.fold
    own = own_run(key, value, fold, options.window)
    parts = [tuple(map(fold.unfold_own, _forward(fold.own(query), own, options)))]
    if runs := prefix_runs(prefix, fold, options.window):
        rows = fold.shared(query)
        for run in runs:
            parts.append(tuple(map(fold.unfold_shared, _forward(rows, run, options))))

    total = parts[0][1]
    for _, lse in parts[1:]:
        total = torch.logaddexp(total, lse)
    if sinks is not None:
        total = torch.logaddexp(total, _logits(sinks, fold, total.dtype))
    # In memory [batch, tokens, heads, dim], as the projection after attention reads it.
    sizes = fold.batch, fold.tokens, fold.kv_heads, fold.group, value.shape[3]
    merged = torch.zeros(sizes, dtype=total.dtype, device=query.device).permute(0, 2, 3, 1, 4)
    for out, lse in parts:
        merged.addcmul_(out, lse.sub(total).exp_())
    return merged.flatten(1, 2).to(query.dtype), total.flatten(1, 2).squeeze(-1)


def _logits(sinks: Tensor, fold: Fold, dtype: torch.dtype) -> Tensor:
    return sinks.to(dtype).view(1, fold.kv_heads, fold.group, 1, 1)


def _forward(rows: Tensor, run: Run, options: _Options) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of rows over one run of keys."""
    if not options.flashes(run):
        return blocks.forward(
            rows * options.scale, run.key, run.value, run.band, softcap=options.softcap
        )
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        _heads(rows, run),
        _keys(run.key, run),
        _keys(run.value, run),
        0.0,
        run.band is not None,
        scale=options.scale,
    )
    return _rows(out), _rows(lse.unsqueeze(-1))


def _backward(rows: _Rows, run: Run, options: _Options) -> Tensor:
    """A run's share of the query's gradient; its keys' and values' gradients are added in place."""
    _, count, dim = rows.query.shape
    many = count >= QUERY_ROWS and rows.query.device.type == "cpu"
    if many and run.grads is None and run.band is None and options.softcap is None:
        scaled = rows.query * options.scale
        grad = query_grad(scaled, run.key, run.value, rows.grad_out, rows.lse, rows.delta)
        return grad.mul_(options.scale)
    few = run.band is None and count < FLASH_ROWS and dim >= 64
    if run.grads is None or few or not options.flashes(run):
        grad = blocks.backward(
            rows.query * options.scale,
            run.key,
            run.value,
            rows.grad_out,
            rows.lse,
            rows.delta,
            run.band,
            softcap=options.softcap,
            grads=run.grads,
        )
        return grad.mul_(options.scale)
    heads = _Rows(*(_heads(x, run) for x in rows))
    step = FLASH_KEYS if run.band is None else len(run)
    total = _flash_backward(heads, run.cut(0, step, run.band), options.scale)
    total = total.to(rows.lse.dtype)
    for start in range(step, len(run), step):
        total += _flash_backward(heads, run.cut(start, start + step, run.band), options.scale)
    return total


def _flash_backward(heads: _Rows, run: Run, scale: float) -> Tensor:
    grad, *key_value_grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        heads.grad_out,
        heads.query,
        _keys(run.key, run),
        _keys(run.value, run),
        heads.out,
        heads.lse.squeeze(-1),
        0.0,
        run.band is not None,
        scale=scale,
    )
    for total, by_head in zip(run.grads or (), key_value_grads, strict=True):
        for share in by_head.unbind(1):
            total += share
    return _rows(grad)


def _heads(rows: Tensor, run: Run) -> Tensor:
    """Rows `[groups, tokens * repeat, dim]` as heads `[groups, repeat, tokens, dim]`."""
    groups, _, dim = rows.shape
    return rows.view(groups, -1, _repeat(run), dim).transpose(1, 2)


def _rows(heads: Tensor) -> Tensor:
    return heads.transpose(1, 2).flatten(1, 2)


def _keys(keys: Tensor, run: Run) -> Tensor:
    """Keys or values `[groups, keys, dim]` for every head, without a copy."""
    if keys.stride(2) != 1:
        keys = keys.contiguous()
    return keys.unsqueeze(1).expand(-1, _repeat(run), -1, -1)


def _repeat(run: Run) -> int:
    return run.band.repeat if run.band else 1
