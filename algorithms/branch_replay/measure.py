"""What a model costs, measured on a few tokens: weights by use, graph bytes by token, speed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from algorithms.branch_replay.attention import Run, Write, our_attention, running
from algorithms.branch_replay.costs import Attention, Shape, tokens_forward
from algorithms.branch_replay.trunk import Trunk

LENGTHS = (32, 96)
"""At which the autograd graph is weighed: what grows is what a token costs."""

TIMED = (16, 512)
"""At which a forward and backward is timed."""

OUTPUTS = {"o_proj", "out_proj", "c_proj", "dense"}
"""Names of the projections after attention."""


@dataclass(frozen=True)
class Speed:
    """Of forward and backward on this machine."""

    flops_per_second: float
    overhead: float
    """Seconds of one forward and backward of no tokens."""


def describe(trunk: Trunk) -> Shape:
    """What the costs of `trunk`'s model depend on."""
    model = trunk.model
    whole = [_weigh(trunk, length, frozenset()) for length in LENGTHS]
    stopped = [_weigh(trunk, length, trunk.top) for length in LENGTHS]
    run, state = whole[0][1:]
    apart = LENGTHS[1] - LENGTHS[0]
    weight, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    item, wide = weight.element_size(), 8 if weight.dtype == torch.float64 else 4
    values = sum(t.shape[1] * t.shape[3] for t in (*run.keys.values(), *run.values.values()))
    below, top, top_keys, top_back = _weights(model, trunk.layers, _reached(model, *stopped[0][1:]))
    return Shape(
        weights=below,
        top=top,
        top_keys=top_keys,
        top_back=top_back,
        head=float(head.numel()),
        layers=trunk.layers,
        vocabulary=head.shape[0],
        attention=tuple(
            Attention(
                heads=run.heads[layer],
                key_dim=run.keys[layer].shape[3],
                value_dim=run.values[layer].shape[3],
                window=run.windows[layer],
                top=(layer, "attention") in trunk.top,
            )
            for layer in sorted(run.keys)
        ),
        parameter_bytes=sum(
            p.numel() * p.element_size() for p in model.parameters() if p.requires_grad
        ),
        graph_bytes=(whole[1][0] - whole[0][0]) / apart,
        prompt_graph_bytes=(stopped[1][0] - stopped[0][0]) / apart,
        kv_bytes=values * item,
        grad_bytes=values * wide,
        output_bytes=sum(
            run.heads[layer] * (run.values[layer].shape[3] * item + wide)
            for layer in run.keys
            if (layer, "attention") not in trunk.top
        ),
        state_bytes=sum(t.numel() * t.element_size() for t in state.values()),
        item=item,
        wide=wide,
        trained=_trained(model),
    )


def time_it(trunk: Trunk, shape: Shape) -> Speed:
    """Best of three at two lengths. The parameters' gradients stay as they are."""
    model = trunk.model
    wanted = [p for p in model.parameters() if p.requires_grad]
    seconds = []
    with our_attention(model):
        for length in TIMED:
            best = float("inf")
            for _ in range(3):
                start = _clock(model)
                hidden, _, _ = _run(trunk, length, frozenset(), None)
                torch.autograd.grad([hidden.sum()], wanted, allow_unused=True)
                best = min(best, _clock(model) - start)
            seconds.append(best)
    flops = [_trunk_update(shape, length) for length in TIMED]
    rate = (flops[1] - flops[0]) / max(seconds[1] - seconds[0], 1e-9)
    return Speed(rate, max(seconds[0] - flops[0] / rate, 0.0))


def _trunk_update(shape: Shape, tokens: int) -> float:
    head = 2.0 * (2.0 + shape.trained) * shape.head * tokens
    return tokens_forward(shape, tokens, 0, scored=True).update - head


def _clock(model: Any) -> float:
    device = model.get_input_embeddings().weight.device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _weigh(trunk: Trunk, length: int, stop: frozenset[Write]) -> tuple[int, Run, dict[Any, Tensor]]:
    """Bytes that autograd keeps of a forward, the run and the states after it."""
    kept: dict[int, int] = {}
    with our_attention(trunk.model):
        _, run, state = _run(trunk, length, stop, _noting(trunk.model, kept))
    return sum(kept.values()), run, state


def _run(
    trunk: Trunk, length: int, stop: frozenset[Write], around: AbstractContextManager[Any] | None
) -> tuple[Any, Run, dict[Any, Tensor]]:
    device = trunk.model.get_input_embeddings().weight.device
    tokens = torch.zeros(1, length, dtype=torch.long, device=device)
    run = Run(None, 0, stop)
    with running(run), torch.enable_grad():
        if around is None:
            hidden, state = trunk.forward(tokens, run, {})
        else:
            with around:
                hidden, state = trunk.forward(tokens, run, {})
    return hidden, run, state


def _noting(model: nn.Module, kept: dict[int, int]) -> AbstractContextManager[Any]:
    """A context that notes in `kept` the bytes of what autograd saves, each storage once."""
    held: list[Tensor] = []  # so that no address is used twice
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
            held.append(tensor.detach())
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


def _reached(model: Any, run: Run, state: dict[Any, Tensor]) -> set[Tensor]:
    """Parameters that the state depends on which `run` left."""
    wanted = [p for p in model.parameters() if p.requires_grad]
    outputs = (*run.keys.values(), *run.values.values(), *state.values())
    sums = [output.sum() for output in outputs if output.requires_grad]
    grads = torch.autograd.grad(sums, wanted, allow_unused=True) if sums else [None] * len(wanted)
    return {p for p, grad in zip(wanted, grads, strict=True) if grad is not None}


def _weights(model: Any, layers: int, reached: set[Tensor]) -> tuple[float, float, float, float]:
    """Weights per token below the top layer, in it, of its queries, keys and values, and of these
    the ones in `reached`."""
    stack = next(
        m for m in model.base_model.modules() if isinstance(m, nn.ModuleList) and len(m) == layers
    )
    text = model.config.get_text_config()
    experts = int(getattr(text, "num_local_experts", 0) or getattr(text, "num_experts", 0))
    used = int(getattr(text, "num_experts_per_tok", 0))
    sums = [0.0, 0.0, 0.0, 0.0]
    for index, layer in enumerate(stack):
        top = index == layers - 1
        attending = [n for n, m in layer.named_modules() if n and hasattr(m, "layer_idx")]
        for name, parameter, size in _multiplied(layer, experts, used):
            sums[1 if top else 0] += size
            module = name.rsplit(".", 1)[0]
            inside = any(name.startswith(f"{attention}.") for attention in attending)
            if top and inside and not OUTPUTS & set(module.split(".")):
                sums[2] += size
                sums[3] += size if parameter in reached else 0.0
    return sums[0], sums[1], sums[2], sums[3]


def _trained(model: Any) -> float:
    """Share of the matrices that get a gradient; embeddings multiply nothing."""
    embeddings = model.get_input_embeddings().weight
    matrices = [p for p in model.base_model.parameters() if p.ndim > 1 and p is not embeddings]
    trained = sum(p.numel() for p in matrices if p.requires_grad)
    return float(trained / max(sum(p.numel() for p in matrices), 1))


def _multiplied(layer: nn.Module, experts: int, used: int) -> Iterator[tuple[str, Tensor, float]]:
    """Parameters that are matrices, and how many of their values multiply one token."""
    for name, parameter in layer.named_parameters():
        if parameter.ndim == 3 and experts and parameter.shape[0] == experts:
            yield name, parameter, parameter.numel() * used / experts
        elif parameter.ndim >= 2:
            yield name, parameter, float(parameter.numel())
