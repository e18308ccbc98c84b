"""Cuts a decoder of `transformers` into stages, and joins their weights again.

A stage is the model's own decoder class with fewer layers: the first keeps the embedding, the last
the final norm and the head. Each computes masks and rotary embeddings for itself, by the family's
own code and once per shape of inputs, so nothing but hidden states has to travel. Parameters keep
the names and the storage they have in the model. Whether a family can be cut so is not assumed but
tried: the stages one after the other must give the model's logits, bit for bit.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from algorithms.async_pipeline.partition import by_hand
from algorithms.common.comm import Comm
from algorithms.common.errors import InputError, one_line

PROBE = 8
"""Tokens of the check after a cut."""


class Stage(nn.Module):
    """Layers `start` to `end` of `model`, with the embedding if first, norm and head if last."""

    def __init__(self, model: Any, start: int, end: int, *, first: bool, last: bool) -> None:
        super().__init__()
        self.first = first
        self.model = _shallow(model.base_model)
        self.model.config = _config_of(model.config, start, end)
        layers = nn.ModuleList()
        for index in range(start, end):  # under its old number; slices of the list do not look
            layers.add_module(str(index), model.base_model.layers[index])
        self.model.layers = layers
        if not first:
            del self.model.embed_tokens
        if not last:
            self.model.norm = nn.Identity()
        self.lm_head = model.lm_head if last else None
        self._settings: dict[Any, list[dict[str, Any]]] = {}

    def forward(self, inputs: Tensor) -> Tensor:
        """Hidden states `[batch, tokens, width]`, or logits `[batch, tokens, vocab]` on the last
        stage, of int64 tokens `[batch, tokens]` on the first, else of hidden states."""
        hidden: Tensor = self.model.embed_tokens(inputs) if self.first else inputs
        for layer, settings in zip(self.model.layers, self._of_layers(hidden), strict=True):
            hidden = layer(hidden, **settings)
        hidden = self.model.norm(hidden)
        return hidden if self.lm_head is None else self.lm_head(hidden)

    def _of_layers(self, hidden: Tensor) -> list[dict[str, Any]]:
        """What the decoder hands to each layer beside the hidden states: masks, rotary embeddings.

        They depend on nothing but the shape, so the decoder itself runs once per shape.
        """
        key = (hidden.shape, hidden.dtype, hidden.device)
        if key not in self._settings:
            seen: list[dict[str, Any]] = []
            hooks = [
                layer.register_forward_pre_hook(
                    lambda layer, inputs, settings: seen.append(settings), with_kwargs=True
                )
                for layer in self.model.layers
            ]
            with torch.no_grad():
                self.model(inputs_embeds=hidden, use_cache=False)
            for hook in hooks:
                hook.remove()
            self._settings[key] = seen
        return self._settings[key]


def cut(model: Any, counts: list[int], name: str = "layers") -> list[Stage]:
    """The stages of `model`, `counts[k]` layers on stage k; they share its parameters.

    Raises `InputError` for counts that do not fit (begins with `name`), for a head that shares its
    weight with the embedding, for dropout, and for a family that cannot be cut.
    """
    base = getattr(model, "base_model", None)
    parts = ("embed_tokens", "layers", "norm")
    missing = [part for part in parts if not hasattr(base, part)]
    if missing or not isinstance(getattr(model, "lm_head", None), nn.Module):
        what = missing[0] if missing else "lm_head"
        raise InputError(f"model.family: a pipeline cannot cut a decoder without {what}")
    by_hand(counts, len(base.layers), len(counts), name)  # type: ignore[union-attr]
    if len(counts) > 1 and model.lm_head.weight is base.embed_tokens.weight:  # type: ignore[union-attr]
        raise InputError(
            "model.tie_word_embeddings: the embedding lies on the first stage and the head on the"
            " last, which do not share weights; set it to false (a loaded model: give the head a"
            " weight of its own)"
        )
    if getattr(model.config, "attention_dropout", 0.0):
        raise InputError("model.extra.attention_dropout: must be 0: stages may recompute a forward")
    ends = list(accumulate(counts))
    last = len(counts) - 1
    stages = [
        Stage(model, end - count, end, first=k == 0, last=k == last)
        for k, (count, end) in enumerate(zip(counts, ends, strict=True))
    ]
    _require_same(model, stages)
    return stages


def join(model: nn.Module, parts: Iterable[Mapping[str, Tensor]]) -> nn.Module:
    """Copy the stages' weights, by name, into `model`, an ordinary decoder that can be saved.

    Raises `InputError` when together they are not the model's weights.
    """
    whole: dict[str, Tensor] = {}
    for part in parts:
        if twice := sorted(set(part) & set(whole)):
            raise InputError(f"{twice[0]}: is on two stages")
        whole |= part
    tied = {name for name in model.state_dict() if name not in dict(model.named_parameters())}
    try:
        problems = model.load_state_dict(whole, strict=False)
    except RuntimeError as error:  # another shape
        raise InputError(f"stages do not fit the model: {one_line(error)}") from None
    if missing := sorted(set(problems.missing_keys) - tied):
        raise InputError(f"{missing[0]}: is on no stage")
    if problems.unexpected_keys:
        raise InputError(f"{problems.unexpected_keys[0]}: is not in the model")
    return model


def gather(stage: nn.Module, comm: Comm) -> list[dict[str, Tensor]] | None:
    """On rank 0 the weights of every rank's stage, by stage, on the host; elsewhere None.

    Point to point, under the tag `weights`; all ranks call it, at a point where none is training.
    """
    mine = {name: parameter.detach() for name, parameter in stage.named_parameters()}
    described = comm.gather_objects({name: (w.shape, w.dtype) for name, w in mine.items()})
    if described is None:
        for weight in mine.values():
            comm.send(weight, 0, "weights")
        return None
    parts = [{name: weight.cpu() for name, weight in mine.items()}]
    for rank, shapes in enumerate(described[1:], 1):
        part = {}
        for name, (shape, dtype) in shapes.items():
            weight = torch.empty(shape, dtype=dtype, device=comm.device)
            part[name] = comm.recv(weight, rank, "weights").cpu()
        parts.append(part)
    return parts


def _shallow(module: nn.Module) -> Any:
    """A module with the same children and settings, whose own children can be exchanged."""
    twin = copy.copy(module)
    for register in ("_modules", "_parameters", "_buffers"):
        setattr(twin, register, dict(getattr(module, register)))
    return twin


def _config_of(config: Any, start: int, end: int) -> Any:
    own = copy.deepcopy(config)
    own.num_hidden_layers = end - start
    if getattr(config, "layer_types", None) is not None:  # looked up by place, not by number
        own.layer_types = config.layer_types[start:end]
    return own


def _require_same(model: Any, stages: list[Stage]) -> None:
    weight = model.lm_head.weight
    tokens = torch.arange(PROBE, device=weight.device).remainder(weight.shape[0]).unsqueeze(0)
    with torch.no_grad():
        expected = model(input_ids=tokens, use_cache=False).logits
        found = tokens
        for stage in stages:
            found = stage(found)
    if not torch.equal(found, expected):
        kind = model.config.model_type
        raise InputError(f"model.family: {kind} cannot be cut: its stages give other logits")
