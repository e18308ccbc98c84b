"""Settings that are none: refused by name, before a model is touched."""

import pytest

from algorithms.branch_replay.config import ReplayConfig
from algorithms.common.errors import FieldError

INTEGERS = ("truncated_chunks", "chunk", "branches_per_pass", "head_chunk", "refresh_every")


def refused(name, value, **others):
    with pytest.raises(FieldError) as caught:
        ReplayConfig(**others, **{name: value})
    assert str(caught.value).startswith(f"{name}: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["mode", "kv_dtype"])
@pytest.mark.parametrize("value", ["Exact", "bfloat16", "", None, 1, ["exact"], True])
def test_a_choice_that_is_none(name, value):
    refused(name, value)


@pytest.mark.parametrize("name", [*INTEGERS, "window"])
@pytest.mark.parametrize("value", [1.5, 2.0, "4", True, [4], float("nan")])
def test_an_integer_that_is_none(name, value):
    refused(name, value)


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [None, -1])
def test_an_integer_that_is_out_of_range(name, value):
    refused(name, value)


@pytest.mark.parametrize("name", ["keep_attention", "offload"])
@pytest.mark.parametrize("value", ["cpu", "", 1, 0, None])
def test_a_switch_that_is_none(name, value):
    refused(name, value)


@pytest.mark.parametrize("name", ["tolerance", "aux_loss", "refresh_bound"])
@pytest.mark.parametrize("value", ["0.1", True, [0.1], float("nan"), -0.5, -1])
def test_a_number_that_is_none(name, value):
    refused(name, value)


def test_numbers_at_the_edges():
    refused("aux_loss", float("inf"))
    refused("aux_loss", None)
    refused("window", 0)
    ReplayConfig(tolerance=0, aux_loss=1, window=1)
    ReplayConfig(tolerance=float("inf"), refresh_bound=float("inf"))


def test_truncation_after_no_chunk_is_another_mode():
    refused("truncated_chunks", 0, mode="truncated")
    with pytest.raises(FieldError, match="take mode response_only"):
        ReplayConfig(mode="truncated")
    ReplayConfig(mode="truncated", truncated_chunks=1)


def test_what_to_dict_gives_is_accepted():
    for mode, chunks in (("exact", 0), ("response_only", 0), ("truncated", 2)):
        config = ReplayConfig(mode=mode, truncated_chunks=chunks, window=7, tolerance=1e-3)
        assert ReplayConfig(**config.to_dict()) == config
