"""Checks of what a user hands in, by the names that the user gave it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from algorithms.branch_replay.config import ReplayConfig
from algorithms.branch_replay.refresh import Captured
from algorithms.branch_replay.tree import Node
from algorithms.common.errors import InputError

Named = tuple[str, object, bool]
"""A name, the tokens, and whether they are scored."""


def check_tokens(model: Any, named: Iterable[Named]) -> None:
    """Raise `InputError`, which names the first bad one, unless all tokens are int64 [n], on the
    device of `model`, and in its vocabulary: that of the embeddings and, where scored, the head."""
    embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    named = list(named)
    least = min(len(embeddings), len(head))
    if _are_tokens([tokens for _, tokens, _ in named], embeddings.device, least):
        return
    for name, tokens, scored in named:
        if not isinstance(tokens, Tensor):
            kind = type(tokens).__name__
            raise InputError(f"{name}: must be a tensor int64 [n] without padding, not a {kind}")
        if tokens.ndim != 1 or tokens.dtype != torch.int64:
            kind = f"{tokens.dtype} {list(tokens.shape)}"
            raise InputError(f"{name}: must be int64 [n] without padding, not {kind}")
        if tokens.device != embeddings.device:
            raise InputError(f"{name}: is on {tokens.device}, the model on {embeddings.device}")
        vocabulary = least if scored else len(embeddings)
        outside = (tokens < 0) | (tokens >= vocabulary)
        if bool(outside.any()):
            at = int(outside.nonzero()[0])
            raise InputError(
                f"{name}: token {int(tokens[at])} at position {at} is not in the vocabulary of "
                f"{vocabulary}"
            )


def _are_tokens(given: Sequence[object], device: torch.device, vocabulary: int) -> bool:
    """The same of all at once, and in the smaller vocabulary: fast where nothing is wrong."""
    tensors = [tokens for tokens in given if isinstance(tokens, Tensor)]
    if len(tensors) < len(given) or not tensors:
        return False
    for tokens in tensors:
        if tokens.ndim != 1 or tokens.dtype != torch.int64 or tokens.device != device:
            return False
    flat = torch.cat(tensors)
    return not bool(((flat < 0) | (flat >= vocabulary)).any())


def check_model(model: Any) -> None:
    """Raise `InputError` unless `model` has a trunk, a head, and weights that autograd takes."""
    if hasattr(model, "get_base_model"):
        raise InputError("model: is a PeftModel; give what its get_base_model returns")
    head = getattr(model, "get_output_embeddings", None)
    if not callable(head):
        kind = type(model).__name__
        raise InputError(f"model: must be a causal language model of transformers, not a {kind}")
    if head() is None:
        raise InputError(
            f"model: {type(model).__name__} has no vocabulary head, give the causal language model"
        )
    if any(p.is_inference() for p in model.parameters()):
        raise InputError("model: its weights were made in torch.inference_mode")


def check_autocast(model: Any) -> None:
    """Raise `InputError` under autocast: what is kept of a prompt would be of mixed dtypes."""
    device = model.get_input_embeddings().weight.device.type
    if torch.is_autocast_enabled(device):
        raise InputError(
            "torch.autocast: replay computes in the model's own dtype; leave the context, or "
            "convert the model"
        )


def check_captured(captured: Captured, config: ReplayConfig) -> None:
    """Raise `InputError` if a prompt was captured with other settings that its state is made of."""
    for name in ("window", "kv_dtype", "chunk"):  # states are kept by the ends of chunks
        then, now = getattr(captured.config, name), getattr(config, name)
        if then != now:
            raise InputError(f"prompt: was captured with {name} {then}, this replay has {now}")


def of_prompt(prompt: object) -> Iterator[Named]:
    """A prompt, or each of several in one tensor [prompts, n]."""
    if isinstance(prompt, Tensor) and prompt.ndim == 2 and len(prompt):
        yield from ((f"prompt[{i}]", tokens, False) for i, tokens in enumerate(prompt))
    else:
        yield "prompt", prompt, False


def of_group(prompt: object, responses: object) -> Iterator[Named]:
    """The prompt and the responses."""
    if isinstance(responses, Tensor) and responses.ndim == 0:
        raise InputError("responses: must be a list of tensors int64 [n], not a scalar tensor")
    if not isinstance(responses, Sequence | Tensor):
        kind = type(responses).__name__
        raise InputError(f"responses: must be a list of tensors int64 [n], not a {kind}")
    yield from of_prompt(prompt)
    for i, response in enumerate(responses):
        if isinstance(response, Node):
            yield from _of_nodes([(f"responses[{i}]", response)])
        else:
            yield f"responses[{i}]", response, True


def of_trees(trees: object) -> Iterator[Named]:
    """The tokens of every node, named by its place."""
    if not isinstance(trees, Sequence):
        raise InputError(f"trees: must be a list of nodes, not a {type(trees).__name__}")
    yield from _of_nodes([(f"trees[{i}]", tree) for i, tree in enumerate(trees)])


def _of_nodes(named: list[tuple[str, Any]]) -> Iterator[Named]:
    """The same of these nodes and all below."""
    open_nodes = named[::-1]
    while open_nodes:
        name, node = open_nodes.pop()
        if not isinstance(node, Node):
            raise InputError(f"{name}: must be a Node, not a {type(node).__name__}")
        yield f"{name}.tokens", node.tokens, node.scored
        if not isinstance(node.children, Sequence):
            kind = type(node.children).__name__
            raise InputError(f"{name}.children: must be a list of nodes, not a {kind}")
        below = [(f"{name}.children[{i}]", child) for i, child in enumerate(node.children)]
        open_nodes.extend(reversed(below))
