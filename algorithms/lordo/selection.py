"""Which weights get low-rank moments: by default the matrices of attention and MLP.

LoRDO does not say which; LDAdam's recipe takes linear weights in modules named `attn` or `mlp`.
Names are matched along the whole dotted path of a weight, and weights rather than containers are
counted, because a pattern that matches nearly nothing is easily overlooked.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from algorithms.common.cohort import is_matrix
from algorithms.common.errors import InputError

PLACES = re.compile(r"attn|attention|mlp|feed_forward|ffn|expert", re.IGNORECASE)
"""Some module on a weight's path is called so: GPT-2, Llama, Mixtral, gpt-oss, DeepSeek, LFM2."""


def low_rank_names(model: nn.Module, patterns: Sequence[str] = ()) -> list[str]:
    """Names of the low-rank weights of `model`, in its order.

    By default matrices, and stacks of matrices, with sides of at least 2, below a module whose name
    says attention or MLP; no embeddings and no head. With glob `patterns` all matrices that one of
    them matches. Raises `InputError` if nothing is found, or a pattern matches no matrix.
    """
    matrices = {
        name: parameter
        for name, parameter in model.named_parameters()
        if is_matrix(parameter) and parameter.requires_grad
    }
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in matrices):
            raise InputError(f"low_rank.parameters: {pattern!r} matches no matrix of the model")
    if patterns:
        return [n for n in matrices if any(fnmatchcase(n, pattern) for pattern in patterns)]
    vocabulary = _embeddings_and_head(model)
    names = [
        name
        for name, parameter in matrices.items()
        if PLACES.search(name.rpartition(".")[0])
        and min(parameter.shape[-2:]) > 1
        and id(parameter) not in vocabulary
    ]
    if not names:
        raise InputError(
            "low_rank.parameters: the model has no attention or MLP matrices by name; name its own"
        )
    return names


def describe(model: nn.Module, names: Sequence[str], what: str = "low-rank moments") -> str:
    """One line: how many weights have `what`, and which share of all parameters."""
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    low, every = sum(sizes[name] for name in names), sum(sizes.values())
    return (
        f"{len(names)} of {len(sizes)} weights have {what}:"
        f" {low:,} of {every:,} parameters ({100 * low / every:.1f} %)"
    )


def _embeddings_and_head(model: nn.Module) -> set[int]:
    modules = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return {id(p) for module in [*modules, head] if module is not None for p in module.parameters()}
