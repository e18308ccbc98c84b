"""Checks of what a user hands in, by the names that the user gave it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from algorithms.branch_replay.tree import Node
from algorithms.common.errors import InputError

Named = tuple[str, object, bool]
"""A name, the tokens, and whether they are scored."""


def check_tokens(model: Any, named: Iterable[Named]) -> None:
    """Raise `InputError`, which names the first bad one, unless all tokens are int64 [n], on the
    device of `model`, and in its vocabulary: that of the embeddings and, where scored, the head."""
    embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    for name, tokens, scored in named:
        if not isinstance(tokens, Tensor):
            kind = type(tokens).__name__
            raise InputError(f"{name}: must be a tensor int64 [n] without padding, not a {kind}")
        if tokens.ndim != 1 or tokens.dtype != torch.int64:
            kind = f"{tokens.dtype} {list(tokens.shape)}"
            raise InputError(f"{name}: must be int64 [n] without padding, not {kind}")
        if tokens.device != embeddings.device:
            raise InputError(f"{name}: is on {tokens.device}, the model on {embeddings.device}")
        vocabulary = min(len(embeddings), len(head)) if scored else len(embeddings)
        outside = (tokens < 0) | (tokens >= vocabulary)
        if bool(outside.any()):
            at = int(outside.nonzero()[0])
            raise InputError(
                f"{name}: token {int(tokens[at])} at position {at} is not in the vocabulary of "
                f"{vocabulary}"
            )


def of_group(prompt: object, responses: object) -> Iterator[Named]:
    """The prompt and the responses."""
    if not isinstance(responses, Sequence | Tensor):
        kind = type(responses).__name__
        raise InputError(f"responses: must be a list of tensors int64 [n], not a {kind}")
    yield "prompt", prompt, False
    for i, response in enumerate(responses):
        yield f"responses[{i}]", response, True


def of_trees(trees: object) -> Iterator[Named]:
    """The tokens of every node, named by its place."""
    if not isinstance(trees, Sequence):
        raise InputError(f"trees: must be a list of nodes, not a {type(trees).__name__}")
    open_nodes = [(f"trees[{i}]", tree) for i, tree in reversed(list(enumerate(trees)))]
    while open_nodes:
        name, node = open_nodes.pop()
        if not isinstance(node, Node):
            raise InputError(f"{name}: must be a Node, not a {type(node).__name__}")
        yield f"{name}.tokens", node.tokens, node.scored
        below = [(f"{name}.children[{i}]", child) for i, child in enumerate(node.children)]
        open_nodes.extend(reversed(below))
