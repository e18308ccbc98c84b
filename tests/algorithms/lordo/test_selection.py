"""Which weights of real families are low-rank."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from algorithms.common.errors import InputError
from algorithms.lordo.selection import describe, low_rank_names
from tests.families import FAMILIES, tiny


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_and_mlp_of_every_family(family: str) -> None:
    model = tiny(family)
    if family == "mamba2":
        with pytest.raises(InputError, match=r"^low_rank.parameters: the model has no attention"):
            low_rank_names(model)
        return
    names = low_rank_names(model)
    weights = dict(model.named_parameters())
    vocabulary = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    for name in names:
        assert weights[name].dim() >= 2 and min(weights[name].shape[-2:]) > 1
        assert id(weights[name]) not in vocabulary
    low = sum(weights[name].numel() for name in names)
    every = sum(w.numel() for w in weights.values() if id(w) not in vocabulary)
    assert low > 0.5 * every


def test_gpt2_by_name_and_in_a_sentence() -> None:
    model = tiny("gpt2", num_hidden_layers=1, n_layer=1)
    names = low_rank_names(model)
    assert names == [
        "transformer.h.0.attn.c_attn.weight",
        "transformer.h.0.attn.c_proj.weight",
        "transformer.h.0.mlp.c_fc.weight",
        "transformer.h.0.mlp.c_proj.weight",
    ]
    low = 32 * (3 * 32 + 32 + 4 * 32 + 4 * 32)
    every = sum(parameter.numel() for parameter in model.parameters())
    share = f"{100 * low / every:.1f}"
    assert describe(model, names) == (
        f"4 of 16 weights have low-rank moments: {low:,} of {every:,} parameters ({share} %)"
    )


def test_experts_are_matrices_with_a_leading_dimension() -> None:
    model = tiny("qwen3_moe")
    weights = dict(model.named_parameters())
    assert any(weights[name].dim() == 3 for name in low_rank_names(model))


def test_patterns_choose_and_every_one_must_match() -> None:
    model = tiny("gpt2", num_hidden_layers=2, n_layer=2)
    assert low_rank_names(model, ["*.1.mlp.*", "transformer.wte.weight"]) == [
        "transformer.wte.weight",
        "transformer.h.1.mlp.c_fc.weight",
        "transformer.h.1.mlp.c_proj.weight",
    ]
    with pytest.raises(InputError, match=r"^low_rank.parameters: '\*.bias' matches no matrix"):
        low_rank_names(model, ["*.mlp.*", "*.bias"])


class Odd(nn.Module):
    """Names that say attention, on weights that are no matrices to project."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.ParameterDict(
            {
                "vector": torch.zeros(4),
                "scalar": torch.zeros(()),
                "empty": torch.zeros(0, 4),
                "column": torch.zeros(4, 1),
                "matrix": torch.zeros(4, 6),
            }
        )
        self.attn["frozen"] = nn.Parameter(torch.zeros(4, 6), requires_grad=False)
        self.attn_positions = nn.Embedding(8, 4)
        self.attn_weight = nn.Parameter(torch.zeros(4, 6))


def test_vectors_columns_embeddings_and_frozen_weights_are_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.DEBUG):
        assert low_rank_names(Odd()) == ["attn.matrix"]
