"""Which way of computing an update fits a budget, and what each would take.

Peak memory is what comes on top of the weights: gradients, the prompt's keys and values and their
cotangents, recurrent states at the chunks' ends, and the larger of two autograd graphs, that of a
batch of branches with its logits and that of a chunk of the prompt. Not in it: optimizer states,
and the scratch space of attention that each thread beyond the first has. Time is FLOPs over a
measured rate plus a measured overhead per forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from algorithms.branch_replay.config import ReplayConfig, is_number
from algorithms.branch_replay.costs import (
    Shape,
    naive_flops,
    packed_flops,
    replay_flops,
    tokens_forward,
)
from algorithms.branch_replay.inputs import check_autocast, check_model
from algorithms.branch_replay.measure import Speed, describe, time_it
from algorithms.branch_replay.trunk import Trunk
from algorithms.common.config import require
from algorithms.common.errors import InputError

LOGITS = 4.5
"""Copies of a token's logits at the head's peak: logits, their exponentials, their gradient."""

CAPTURE = 0.57
"""Live values of a forward without a graph, in graphs of one layer."""

CHUNKS = (256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True)
class Work:
    """One update: a group of `group` responses of `response` tokens to a prompt."""

    prompt: int
    response: int
    group: int

    def __post_init__(self) -> None:
        for name in ("prompt", "response", "group"):
            value = getattr(self, name)
            positive = type(value) is int and value > 0
            require(positive, name, f"must be a positive integer, not {value!r}")

    @property
    def responses(self) -> list[int]:
        return [self.response] * self.group


@dataclass(frozen=True)
class Row:
    """What one way takes."""

    name: str
    bytes: float
    """Peak on the device, beyond the weights."""
    host_bytes: float
    flops: float
    seconds: float
    config: ReplayConfig | None = None
    """None: not one of ours."""


@dataclass(frozen=True)
class Choice:
    """The way that was picked, and what the others would have taken."""

    picked: Row
    rows: list[Row]

    @property
    def config(self) -> ReplayConfig:
        assert self.picked.config is not None
        return self.picked.config

    def __str__(self) -> str:
        lines = [f"{'':15}{'peak MB':>10}{'host MB':>10}{'GFLOP':>12}{'seconds':>10}"]
        for row in self.rows:
            lines.append(
                f"{row.name:15}{row.bytes / 1e6:10.1f}{row.host_bytes / 1e6:10.1f}"
                f"{row.flops / 1e9:12.1f}{row.seconds:10.2f}"
            )
        c = self.config
        lines.append(
            f"picked: {c.mode}, chunk {c.chunk}, {c.branches_per_pass} branches per pass"
            + (", prompt on the host" if c.offload else "")
            + (", attention kept" if c.keep_attention else "")
        )
        return "\n".join(lines)


def choose(model: Any, work: Work, budget: float) -> Choice:
    """The fastest exact replay whose peak is within `budget` bytes beyond the weights; if there is
    none, the fastest that treats the prompt as a constant. `print` the result for the table.

    Raises `InputError` if not even that fits, and for a model whose decoder is frozen.
    """
    check_model(model)
    if not any(p.requires_grad for p in model.base_model.parameters()):
        raise InputError("model: all weights of its decoder are frozen, there is nothing to replay")
    check_autocast(model)
    with torch.inference_mode(False), torch.enable_grad():  # whatever the caller turned off
        trunk = Trunk(model)
        shape = describe(trunk)
        speed = time_it(trunk, shape)
    return pick(shape, speed, work, budget)


def pick(shape: Shape, speed: Speed, work: Work, budget: float) -> Choice:
    """`choose` with a model that is already measured."""
    if not is_number(budget) or budget <= 0:
        raise InputError(f"budget: must be a positive number of bytes, not {budget!r}")
    rows = [naive(shape, speed, work), packed(shape, speed, work)]
    ways = {}
    for mode in ("exact", "response_only"):
        ways[mode] = [replay(shape, speed, work, config) for config in candidates(work, mode)]
        fitting = [row for row in ways[mode] if row.bytes <= budget]
        # Where nothing fits, the smallest is what the table shows.
        best = min(fitting, key=_order) if fitting else min(ways[mode], key=lambda r: r.bytes)
        rows.append(best)
    for row in rows[2:]:
        if row.bytes <= budget:
            return Choice(row, rows)
    least = min(rows[2:], key=lambda row: row.bytes)
    raise InputError(
        f"budget: {budget / 1e6:.0f} MB are too few, {least.name} takes {least.bytes / 1e6:.0f} MB"
    )


def candidates(work: Work, mode: Any) -> Iterator[ReplayConfig]:
    """All settings that are worth a look."""
    chunks = [c for c in CHUNKS if c < work.prompt] + [max(CHUNKS[0], min(work.prompt, CHUNKS[-1]))]
    sizes = sorted({min(2**i, work.group) for i in range(8)} - {0})
    places: list[dict[str, Any]] = [{}, {"offload": True}]
    if mode != "response_only":
        places.append({"keep_attention": True})
    for place in places:
        for chunk in sorted(set(chunks)):
            for size in sizes or [1]:
                yield ReplayConfig(mode=mode, chunk=chunk, branches_per_pass=size, **place)


def replay(shape: Shape, speed: Speed, work: Work, config: ReplayConfig) -> Row:
    """One setting of the engine."""
    size, host = replay_bytes(shape, work, config)
    inputs = work.prompt - 1
    open_tokens = {"exact": inputs, "response_only": 0}.get(
        config.mode, config.truncated_chunks * config.chunk
    )
    flops = replay_flops(
        shape,
        work.prompt,
        work.responses,
        open_tokens=open_tokens,
        keep_attention=config.keep_attention,
    )
    if config.offload:  # attention's forward is repeated in backward
        flops += _attention_again(shape, work, open_tokens)
    pieces = -(-inputs // config.chunk) if inputs else 0
    batches = -(-work.group // config.branches_per_pass) if work.group else 0
    # A forward alone is a third of forward and backward.
    runs = pieces * (4 / 3 if open_tokens else 1 / 3) + batches * 4 / 3
    seconds = flops / speed.flops_per_second + runs * speed.overhead
    return Row(config.mode, size, host, flops, seconds, config)


def replay_bytes(shape: Shape, work: Work, config: ReplayConfig) -> tuple[float, float]:
    """Peak on the device beyond the weights, and what lies on the host."""
    inputs = work.prompt - 1
    swept = config.mode != "response_only"
    whole = work.response <= config.chunk
    # A response that is cut into pieces is run alone; all but its last piece lie in the path.
    batch = min(config.branches_per_pass, work.group) if whole else 1
    piece = min(work.response, config.chunk)
    behind = inputs + (0 if whole else (work.response - 1) // config.chunk * config.chunk)
    collected = behind if swept or not whole else 0

    kept = shape.kv_bytes if config.kv_dtype == "model" else shape.kv_bytes * 2 / shape.item
    path = behind * kept + collected * shape.grad_bytes
    # Of a path that lies elsewhere one layer is here at a time, and its cotangents.
    fetched = behind * (shape.kv_bytes + shape.grad_bytes) / max(len(shape.attention), 1)
    remote = config.offload or config.kv_dtype == "bf16"
    here = (0.0 if config.offload else path) + (fetched if remote else 0.0)
    pieces = -(-inputs // config.chunk)
    states = shape.state_bytes * (pieces + (2 if swept else 0))
    again = shape.output_bytes if config.keep_attention else 0
    open_tokens = config.truncated_chunks * config.chunk if config.mode == "truncated" else inputs
    outputs = again * min(open_tokens, inputs)

    rows = batch * piece
    logits = LOGITS * shape.vocabulary * shape.wide * min(rows, config.head_chunk)
    branches = shape.graph_bytes * rows + logits + 2 * batch * shape.state_bytes
    if work.group > batch or not whole:  # the first batch meets no gradients yet
        branches += shape.parameter_bytes
    chunk = min(config.chunk, behind)
    # What is kept of attention is a part of the graph of the chunk.
    sweep = (shape.prompt_graph_bytes + shape.kv_bytes - again) * chunk + shape.parameter_bytes
    capture = CAPTURE * shape.graph_bytes / max(shape.layers, 1) * chunk
    stages = max(branches, capture, sweep if collected else 0.0)
    return here + states + outputs + stages, path if config.offload else 0.0


def naive(shape: Shape, speed: Speed, work: Work) -> Row:
    """One full sequence at a time."""
    tokens = work.prompt - 1 + work.response
    size = shape.graph_bytes * tokens + shape.parameter_bytes
    size += LOGITS * shape.vocabulary * shape.wide * work.response
    flops = naive_flops(shape, work.prompt, work.responses)
    seconds = flops / speed.flops_per_second + work.group * speed.overhead
    return Row("naive", size, 0.0, flops, seconds)


def packed(shape: Shape, speed: Speed, work: Work) -> Row:
    """Prompt and branches in one graph, as PrefixGrouper and the tree kernels do."""
    tokens = work.prompt - 1 + work.response * work.group
    size = shape.graph_bytes * tokens + shape.parameter_bytes
    size += LOGITS * shape.vocabulary * shape.wide * work.response * work.group
    flops = packed_flops(shape, work.prompt, work.responses)
    return Row("packed", size, 0.0, flops, flops / speed.flops_per_second + speed.overhead)


def _attention_again(shape: Shape, work: Work, open_tokens: int) -> float:
    inputs = work.prompt - 1
    again = [tokens_forward(shape, n, inputs, scored=True) for n in work.responses]
    if open_tokens:
        again.append(tokens_forward(shape, inputs, 0, scored=False))
    return sum(f.own + f.constant for f in again)


def _order(row: Row) -> tuple[float, float]:
    return row.seconds, row.bytes
