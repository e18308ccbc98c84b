"""The gradient of many query rows alone, from keys that get none and that every row sees whole.

What `blocks.backward` computes, for one case that is worth its own loop on a CPU: a branch on a
constant prefix. Rows carry their minus log-sum-exp, and those of the output's gradient their minus
delta, as one more column, which meets a column of ones behind keys and values: so the products
alone give what is exponentiated. Products are of matrices, one group at a time, into two buffers.
Keys are the outer loop, so that a block of them is laid out once.

Source: the backward of FlashAttention-2 (Dao 2023), of whose five products these are three.
"""

import torch
from torch import Tensor

from kernels.shared_prefix_attention.blocks import KEYS, ROWS
from kernels.shared_prefix_attention.prefix import accumulation_dtype


def query_grad(
    query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor, lse: Tensor, delta: Tensor
) -> Tensor:
    """The gradient of the scaled query `[groups, rows, head_dim]` in `accumulation_dtype`.

    key and value `[groups, keys, dim]`, grad_out `[groups, rows, value_dim]`; lse is the
    log-sum-exp over all keys of a row, delta = sum(grad_out * out) `[groups, rows, 1]`.
    """
    dtype = accumulation_dtype(query.dtype)
    rows, keys = min(ROWS, query.shape[1]), min(KEYS, key.shape[1])
    key_ones = key.new_ones(keys, key.shape[2] + 1, dtype=dtype)
    value_ones = value.new_ones(keys, value.shape[2] + 1, dtype=dtype)
    scores, slopes = (query.new_empty(rows * keys, dtype=dtype) for _ in range(2))

    grad = query.new_zeros(query.shape, dtype=dtype)
    for group in range(query.shape[0]):
        biased_query = torch.cat([query[group].to(dtype), lse[group].neg()], dim=1)
        biased_grad = torch.cat([grad_out[group].to(dtype), delta[group].neg()], dim=1)
        blocks = [torch.split(x, rows) for x in (biased_query, biased_grad, grad[group])]
        for k, v in zip(*(torch.split(x[group], keys) for x in (key, value)), strict=True):
            k, at = k.to(dtype), len(k)
            key_ones[:at, :-1], value_ones[:at, :-1] = k, v
            key_t, value_t = key_ones[:at].t(), value_ones[:at].t()
            for q, do, total in zip(*blocks, strict=True):
                shape, size = (len(q), at), len(q) * at
                weights = torch.mm(q, key_t, out=scores[:size].view(shape)).exp_()
                slope = torch.mm(do, value_t, out=slopes[:size].view(shape)).mul_(weights)
                total.addmm_(slope, k)
    return grad
