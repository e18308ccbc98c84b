# mypy: ignore-errors
# (Triton's language is not typed Python.)
"""The device code of `triton.py`: one forward and three backward kernels.

A program owns a block of rows (forward, query gradient) or of keys (key and value gradients), so
nothing needs atomics. Rows are the query heads of one key head folded position by position: row r
is at token `r // GROUP`, head `kv_head * GROUP + r % GROUP`. Forward and the query gradient go over
the prefix and then over the row's own keys in one online softmax. Scores are kept in units of
log 2. Sizes that are no power of two are padded: `WIDTH` is the true size of a head, `PADDED` the
block's.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1.0e30)  # not -inf: a row that has seen no key yet must not give inf - inf


@triton.jit
def _load(base, offsets, valid, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Rows at `offsets` as a block `[rows, PADDED]`, zero where not valid or past WIDTH."""
    cols = tl.arange(0, PADDED)
    mask = valid[:, None]
    if WIDTH != PADDED:
        mask = mask & (cols < WIDTH)[None, :]
    return tl.load(base + offsets[:, None] + cols[None, :], mask=mask, other=0.0)


@triton.jit
def _store(base, offsets, valid, block, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    cols = tl.arange(0, PADDED)
    mask = valid[:, None] & (cols < WIDTH)[None, :]
    tl.store(base + offsets[:, None] + cols[None, :], block.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a @ b in float32."""
    if PRECISION == "interpreter":  # whose product does not know bfloat16
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def _scores(products, scale, softcap, CAPPED: tl.constexpr):
    """Scores in units of log 2, and the derivative of the cap (1 without one)."""
    if CAPPED:
        # tanh(x) = 1 - 2 / (e^2x + 1)
        tanh = 1.0 - 2.0 / (tl.exp2(products * (2.0 * LOG2E * scale / softcap)) + 1.0)
        return tanh * (softcap * LOG2E), 1.0 - tanh * tanh
    else:
        return products * (scale * LOG2E), 1.0


@triton.jit
def _seen(at, keys, count, window, WINDOWED: tl.constexpr):
    """Which keys `keys` the rows at positions `at` see; the two broadcast against each other."""
    seen = (keys <= at) & (keys < count)
    if WINDOWED:
        seen = seen & (keys > at - window)
    return seen


@triton.jit
def _attend(
    acc, top, total, q, at, key, value, key_stride, value_stride, start, stop, window, scale,
    softcap, WIDTH: tl.constexpr, PADDED: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    VALUE_PADDED: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr, WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The online softmax over keys start..stop-1; not MASKED: whole blocks that all rows see."""
    for block in range(start, stop, KEYS):
        cols = block + tl.arange(0, KEYS)
        valid = cols < stop
        k = _load(key, cols.to(tl.int64) * key_stride, valid, WIDTH, PADDED)
        v = _load(value, cols.to(tl.int64) * value_stride, valid, VALUE_WIDTH, VALUE_PADDED)
        products = _dot(q, tl.trans(k), None, PRECISION)
        scores, _ = _scores(products, scale, softcap, CAPPED)
        if MASKED:
            seen = _seen(at[:, None], cols[None, :], stop, window, WINDOWED)
            scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        decay = tl.exp2(top - new_top)
        total = total * decay + tl.sum(weights, 1)
        acc = _dot(weights.to(v.dtype), v, acc * decay[:, None], PRECISION)
        top = new_top
    return acc, top, total


@triton.jit
def _query_grad(
    acc, q, do, lse, delta, at, key, value, key_stride, value_stride, start, stop, window, scale,
    softcap, WIDTH: tl.constexpr, PADDED: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    VALUE_PADDED: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr, WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds what keys start..stop-1 give to the gradient of the rows' queries."""
    for block in range(start, stop, KEYS):
        cols = block + tl.arange(0, KEYS)
        valid = cols < stop
        k = _load(key, cols.to(tl.int64) * key_stride, valid, WIDTH, PADDED)
        v = _load(value, cols.to(tl.int64) * value_stride, valid, VALUE_WIDTH, VALUE_PADDED)
        products = _dot(q, tl.trans(k), None, PRECISION)
        scores, slope = _scores(products, scale, softcap, CAPPED)
        weights = tl.exp2(scores - lse[:, None])
        if MASKED:
            seen = _seen(at[:, None], cols[None, :], stop, window, WINDOWED)
            weights = tl.where(seen, weights, 0.0)
        weights_grad = _dot(do, tl.trans(v), None, PRECISION)
        scores_grad = weights * (weights_grad - delta[:, None]) * slope
        acc = _dot(scores_grad.to(k.dtype), k, acc, PRECISION)
    return acc


@triton.jit
def _key_grads(
    dk, dv, k, v, keys, query, grad_out, lse, delta, query_head, query_token, grad_head, grad_token,
    first, start, stop, tokens, kv_head, window, scale, softcap, GROUP: tl.constexpr,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    VALUE_PADDED: tl.constexpr, ROWS: tl.constexpr, MASKED: tl.constexpr, WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds what rows start..stop-1 of one row of the batch give to the gradients of some keys."""
    for block in range(start, stop, ROWS):
        rows = block + tl.arange(0, ROWS)
        valid = rows < stop
        token = rows // GROUP
        head = (kv_head * GROUP + rows % GROUP).to(tl.int64)
        q = _load(query, head * query_head + token * query_token, valid, WIDTH, PADDED)
        do = _load(
            grad_out, head * grad_head + token * grad_token, valid, VALUE_WIDTH, VALUE_PADDED
        )
        row_lse = tl.load(lse + head * tokens + token, mask=valid, other=0.0) * LOG2E
        row_delta = tl.load(delta + head * tokens + token, mask=valid, other=0.0)
        products = _dot(k, tl.trans(q), None, PRECISION)
        scores, slope = _scores(products, scale, softcap, CAPPED)
        # Rows past the end have q, do, lse and delta 0: their weights 1 meet a gradient of 0.
        weights = tl.exp2(scores - row_lse[None, :])
        if MASKED:
            at = (first + token)[None, :]
            seen = _seen(at, keys[:, None], first + tokens, window, WINDOWED)
            weights = tl.where(seen, weights, 0.0)
        dv = _dot(weights.to(do.dtype), do, dv, PRECISION)
        weights_grad = _dot(v, tl.trans(do), None, PRECISION)
        scores_grad = weights * (weights_grad - row_delta[None, :]) * slope
        dk = _dot(scores_grad.to(q.dtype), q, dk, PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["tokens", "prefix", "window"])
def forward(
    query, key, value, prefix_key, prefix_value, sinks, out, lse,
    query_batch, query_head, query_token, key_batch, key_head, key_token,
    value_batch, value_head, value_token, prefix_key_head, prefix_key_token,
    prefix_value_head, prefix_value_token, out_batch, out_head, out_token,
    tokens, prefix, window, scale, softcap,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    VALUE_PADDED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr, SINKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp. Grid: blocks of rows, key heads, batch."""
    kv_head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = rows < tokens * GROUP
    token = rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    q = _load(
        query + batch * query_batch, head * query_head + token * query_token, valid, WIDTH, PADDED
    )
    key += batch * key_batch + kv_head * key_head
    value += batch * value_batch + kv_head * value_head
    prefix_key += kv_head * prefix_key_head
    prefix_value += kv_head * prefix_value_head
    acc = tl.zeros([ROWS, VALUE_PADDED], tl.float32)
    if SINKS:
        top = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * LOG2E
        total = tl.full([ROWS], 1.0, tl.float32)
    else:
        top = tl.full([ROWS], LOWEST, tl.float32)
        total = tl.zeros([ROWS], tl.float32)

    low = tl.program_id(0) * ROWS // GROUP  # the first and one past the last token of the block
    high = tl.minimum(tokens, ((tl.program_id(0) + 1) * ROWS - 1) // GROUP + 1)
    own_start = 0
    whole = prefix // KEYS * KEYS
    if WINDOWED:
        own_start = tl.maximum(0, low - window + 1)
        whole = tl.minimum(prefix, tl.maximum(0, prefix + low - window + 1))
    else:
        acc, top, total = _attend(
            acc, top, total, q, token + prefix, prefix_key, prefix_value, prefix_key_token,
            prefix_value_token, 0, whole, window, scale, softcap, WIDTH, PADDED, VALUE_WIDTH,
            VALUE_PADDED, KEYS, False, WINDOWED, CAPPED, PRECISION,
        )  # fmt: skip
    acc, top, total = _attend(
        acc, top, total, q, token + prefix, prefix_key, prefix_value, prefix_key_token,
        prefix_value_token, whole, prefix, window, scale, softcap, WIDTH, PADDED, VALUE_WIDTH,
        VALUE_PADDED, KEYS, True, WINDOWED, CAPPED, PRECISION,
    )  # fmt: skip
    acc, top, total = _attend(
        acc, top, total, q, token, key, value, key_token, value_token, own_start, high, window,
        scale, softcap, WIDTH, PADDED, VALUE_WIDTH, VALUE_PADDED, KEYS, True, WINDOWED, CAPPED,
        PRECISION,
    )  # fmt: skip
    _store(
        out + batch * out_batch, head * out_head + token * out_token, valid,
        acc / total[:, None], VALUE_WIDTH, VALUE_PADDED,
    )  # fmt: skip
    heads = tl.num_programs(1) * GROUP
    tl.store(lse + (batch * heads + head) * tokens + token, top / LOG2E + tl.log(total), mask=valid)


@triton.jit(do_not_specialize=["tokens", "prefix", "window"])
def query_grad(
    query, key, value, prefix_key, prefix_value, grad_out, lse, delta, grad,
    query_batch, query_head, query_token, key_batch, key_head, key_token,
    value_batch, value_head, value_token, prefix_key_head, prefix_key_token,
    prefix_value_head, prefix_value_token, grad_out_batch, grad_out_head, grad_out_token,
    grad_batch, grad_head, grad_token,
    tokens, prefix, window, scale, softcap,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    VALUE_PADDED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of the query. Grid: blocks of rows, key heads, batch."""
    kv_head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = rows < tokens * GROUP
    token = rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    q = _load(
        query + batch * query_batch, head * query_head + token * query_token, valid, WIDTH, PADDED
    )
    do = _load(
        grad_out + batch * grad_out_batch, head * grad_out_head + token * grad_out_token, valid,
        VALUE_WIDTH, VALUE_PADDED,
    )  # fmt: skip
    flat = (batch * tl.num_programs(1) * GROUP + head) * tokens + token
    row_lse = tl.load(lse + flat, mask=valid, other=0.0) * LOG2E
    row_delta = tl.load(delta + flat, mask=valid, other=0.0)
    key += batch * key_batch + kv_head * key_head
    value += batch * value_batch + kv_head * value_head
    prefix_key += kv_head * prefix_key_head
    prefix_value += kv_head * prefix_value_head
    acc = tl.zeros([ROWS, PADDED], tl.float32)

    low = tl.program_id(0) * ROWS // GROUP
    high = tl.minimum(tokens, ((tl.program_id(0) + 1) * ROWS - 1) // GROUP + 1)
    own_start = 0
    whole = prefix // KEYS * KEYS
    if WINDOWED:
        own_start = tl.maximum(0, low - window + 1)
        whole = tl.minimum(prefix, tl.maximum(0, prefix + low - window + 1))
    else:
        acc = _query_grad(
            acc, q, do, row_lse, row_delta, token + prefix, prefix_key, prefix_value,
            prefix_key_token, prefix_value_token, 0, whole, window, scale, softcap, WIDTH, PADDED,
            VALUE_WIDTH, VALUE_PADDED, KEYS, False, WINDOWED, CAPPED, PRECISION,
        )  # fmt: skip
    acc = _query_grad(
        acc, q, do, row_lse, row_delta, token + prefix, prefix_key, prefix_value,
        prefix_key_token, prefix_value_token, whole, prefix, window, scale, softcap, WIDTH, PADDED,
        VALUE_WIDTH, VALUE_PADDED, KEYS, True, WINDOWED, CAPPED, PRECISION,
    )  # fmt: skip
    acc = _query_grad(
        acc, q, do, row_lse, row_delta, token, key, value, key_token, value_token, own_start, high,
        window, scale, softcap, WIDTH, PADDED, VALUE_WIDTH, VALUE_PADDED, KEYS, True, WINDOWED,
        CAPPED, PRECISION,
    )  # fmt: skip
    _store(
        grad + batch * grad_batch, head * grad_head + token * grad_token, valid, acc * scale,
        WIDTH, PADDED,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "window"])
def own_grads(
    query, key, value, grad_out, lse, delta, key_grad, value_grad,
    query_batch, query_head, query_token, key_batch, key_head, key_token,
    value_batch, value_head, value_token, grad_out_batch, grad_out_head, grad_out_token,
    tokens, window, scale, softcap,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    VALUE_PADDED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of own keys and values. Grid: blocks of keys, key heads, batch.

    key_grad and value_grad are contiguous `[batch, kv_heads, tokens, dim]`.
    """
    kv_head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    start = tl.program_id(0) * KEYS
    cols = start + tl.arange(0, KEYS)
    valid = cols < tokens
    key += batch * key_batch + kv_head * key_head
    value += batch * value_batch + kv_head * value_head
    k = _load(key, cols.to(tl.int64) * key_token, valid, WIDTH, PADDED)
    v = _load(value, cols.to(tl.int64) * value_token, valid, VALUE_WIDTH, VALUE_PADDED)
    stop = tokens
    if WINDOWED:
        stop = tl.minimum(tokens, start + KEYS - 1 + window)
    heads = tl.num_programs(1) * GROUP
    dk, dv = _key_grads(
        tl.zeros([KEYS, PADDED], tl.float32), tl.zeros([KEYS, VALUE_PADDED], tl.float32), k, v,
        cols, query + batch * query_batch, grad_out + batch * grad_out_batch,
        lse + batch * heads * tokens, delta + batch * heads * tokens, query_head, query_token,
        grad_out_head, grad_out_token, 0, start * GROUP, stop * GROUP, tokens, kv_head, window,
        scale, softcap, GROUP, WIDTH, PADDED, VALUE_WIDTH, VALUE_PADDED, ROWS, True, WINDOWED,
        CAPPED, PRECISION,
    )  # fmt: skip
    flat = (batch * tl.num_programs(1) + kv_head) * tokens + cols
    _store(key_grad, flat * WIDTH, valid, dk * scale, WIDTH, PADDED)
    _store(value_grad, flat * VALUE_WIDTH, valid, dv, VALUE_WIDTH, VALUE_PADDED)


@triton.jit(do_not_specialize=["batches", "tokens", "prefix", "window"])
def prefix_grads(
    query, prefix_key, prefix_value, grad_out, lse, delta, key_grad, value_grad,
    query_batch, query_head, query_token, prefix_key_head, prefix_key_token,
    prefix_value_head, prefix_value_token, grad_out_batch, grad_out_head, grad_out_token,
    key_grad_head, key_grad_token, value_grad_head, value_grad_token,
    batches, tokens, prefix, window, scale, softcap,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    VALUE_PADDED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the batch's share to the prefix's gradients. Grid: blocks of keys, key heads."""
    kv_head = tl.program_id(1).to(tl.int64)
    start = tl.program_id(0) * KEYS
    cols = start + tl.arange(0, KEYS)
    valid = cols < prefix
    wide = cols.to(tl.int64)
    k = _load(prefix_key + kv_head * prefix_key_head, wide * prefix_key_token, valid, WIDTH, PADDED)
    v = _load(
        prefix_value + kv_head * prefix_value_head, wide * prefix_value_token, valid, VALUE_WIDTH,
        VALUE_PADDED,
    )  # fmt: skip
    stop = tokens
    if WINDOWED:  # the last token that sees the block's last key
        stop = tl.maximum(0, tl.minimum(tokens, start + KEYS - 1 + window - prefix))
    dk = tl.zeros([KEYS, PADDED], tl.float32)
    dv = tl.zeros([KEYS, VALUE_PADDED], tl.float32)
    per_batch = tl.num_programs(1) * GROUP * tokens
    for _ in range(batches):
        dk, dv = _key_grads(
            dk, dv, k, v, cols, query, grad_out, lse, delta, query_head, query_token, grad_out_head,
            grad_out_token, prefix, 0, stop * GROUP, tokens, kv_head, window, scale, softcap, GROUP,
            WIDTH, PADDED, VALUE_WIDTH, VALUE_PADDED, ROWS, WINDOWED, WINDOWED, CAPPED, PRECISION,
        )  # fmt: skip
        query += query_batch
        grad_out += grad_out_batch
        lse += per_batch
        delta += per_batch
    key_grad += kv_head * key_grad_head
    value_grad += kv_head * value_grad_head
    dk = dk * scale + _load(key_grad, wide * key_grad_token, valid, WIDTH, PADDED)
    dv += _load(value_grad, wide * value_grad_token, valid, VALUE_WIDTH, VALUE_PADDED)
    _store(key_grad, wide * key_grad_token, valid, dk, WIDTH, PADDED)
    _store(value_grad, wide * value_grad_token, valid, dv, VALUE_WIDTH, VALUE_PADDED)
