"""Each mutation breaks one rule of the derivation, and the comparison with naive sees it."""

import pytest
import torch

from algorithms.branch_replay import state, traversal
from algorithms.branch_replay.attention import Run
from algorithms.branch_replay.errors import SelfCheckError
from algorithms.branch_replay.path import Path
from algorithms.branch_replay.state import StateLayer
from tests.families import tiny, true_float64
from tests.replays import coupled, distance, naive, replayed, responses, tokens

SEEN = 1e-4
"""A mutation moves the gradient by at least this; rounding by 1e-12."""


def apart(family: str, **settings) -> float:
    """Distance of the gradients. Values are not looked at: most mutations leave them alone."""
    model = tiny(family)
    prompt, branches = tokens(17), responses(5, 7, 3)
    with true_float64(model):
        _, _, truth = naive(model, prompt, branches)
        settings = {"chunk": 4, "branches_per_pass": 2} | settings
        _, gradients = replayed(model, prompt, branches, **settings)
    return distance(gradients, truth)


@pytest.mark.parametrize("family", ["llama", "mamba2", "falcon_h1", "lfm2"])
def test_nothing_is_seen_without_a_mutation(family):
    assert apart(family) <= 1e-12


def test_a_dropped_cotangent_of_one_batch_of_branches_is_seen(monkeypatch):
    dropped = []

    def add_all_but_one(total, given):
        if not dropped and any(leaf.grad is not None for leaf in given.values()):
            dropped.append(given)
        else:
            state.add_cotangents(total, given)

    monkeypatch.setattr(traversal, "add_cotangents", add_all_but_one)
    assert apart("mamba2") > SEEN
    assert dropped


def test_dropped_cotangents_of_keys_and_values_are_seen(monkeypatch):
    prefix = Path.prefix

    def without_sink_once(self, layer, end, window):
        found = prefix(self, layer, end, window)
        if layer == 1 and end == 16 and found.key_grad is not None and not dropped:
            dropped.append(end)
            found.key_grad = torch.zeros_like(found.key_grad)
            found.value_grad = torch.zeros_like(found.value_grad)
        return found

    dropped = []
    monkeypatch.setattr(Path, "prefix", without_sink_once)
    assert apart("llama") > SEEN
    assert dropped


def test_a_shifted_position_is_seen(monkeypatch):
    monkeypatch.setattr(StateLayer, "get_seq_length", lambda self: max(0, self.run.start - 1))
    with pytest.raises(SelfCheckError, match="does not carry over"):
        apart("llama")
    monkeypatch.setattr(
        StateLayer, "get_seq_length", lambda self: self.run.start - (self.run.start == 16)
    )
    with pytest.raises(AssertionError):
        model = tiny("llama")
        with true_float64(model):
            _, log_probs, _ = naive(model, tokens(17), responses(5))
            out, _ = replayed(model, tokens(17), responses(5), chunk=4)
        torch.testing.assert_close(out.log_probs[0][0], log_probs[0])
    assert apart("llama") > SEEN


def test_a_sweep_in_the_wrong_order_is_seen(monkeypatch):
    monkeypatch.setattr(traversal, "reversed", lambda items: list(items), raising=False)
    assert apart("llama") > SEEN


def test_a_skipped_convolution_state_is_seen(monkeypatch):
    assert_skipped_is_seen(monkeypatch, "conv", "lfm2")
    assert_skipped_is_seen(monkeypatch, "conv", "mamba2")


def test_a_skipped_recurrent_state_is_seen(monkeypatch):
    assert_skipped_is_seen(monkeypatch, "recurrent", "mamba2")


def assert_skipped_is_seen(monkeypatch, kind: str, family: str) -> None:
    with monkeypatch.context() as patch:
        forward = traversal.Trunk.forward

        def forgetful(self, inputs, run, given):
            if run.path is not None and run.start == 16:  # where branches begin
                given = {
                    key: torch.zeros_like(kept) if key[1] == kind else kept
                    for key, kept in given.items()
                }
            return forward(self, inputs, run, given)

        patch.setattr(traversal.Trunk, "forward", forgetful)
        assert apart(family) > SEEN


def test_a_state_that_leaks_from_one_branch_into_the_next_is_seen(monkeypatch):
    """Restoring is by copies; without them pass 2 starts from what pass 1 left."""
    leaf = traversal.leaves

    def leaking(given, batch, gradient):
        made = leaf(given, batch, gradient)
        for kept in given.values():
            kept.mul_(1.01)
        return made

    monkeypatch.setattr(traversal, "leaves", leaking)
    with pytest.raises(SelfCheckError, match="in pass 1 and"):
        apart("mamba2")


def test_cotangents_that_are_not_cleared_are_seen(monkeypatch):
    monkeypatch.setattr(Path, "clear_cotangents", lambda self, start, end: None)
    model = tiny("llama")
    prompt, branches = tokens(9), responses(9, 9)  # blocks of responses share positions
    with true_float64(model):
        _, _, truth = naive(model, prompt, branches)
        _, gradients = replayed(model, prompt, branches, chunk=4)
    assert distance(gradients, truth) > SEEN


def test_kept_attention_of_another_chunk_is_seen(monkeypatch):
    recompute = traversal.Traversal._recompute

    def mixed_up(self, segment, entry, cotangents):
        if segment.end == 8:
            self.outputs[8] = self.outputs[12]
        return recompute(self, segment, entry, cotangents)

    assert apart("llama", keep_attention=True) <= 1e-12
    monkeypatch.setattr(traversal.Traversal, "_recompute", mixed_up)
    assert apart("llama", keep_attention=True) > SEEN


def test_a_replay_with_other_coefficients_is_seen():
    """The comparison itself: a loss that differs in one coefficient gives another gradient."""
    model = tiny("llama")

    def other(log_probs):
        return coupled(log_probs) + 0.01 * log_probs[0][0]

    with true_float64(model):
        _, _, truth = naive(model, tokens(17), responses(5, 7))
        _, gradients = replayed(model, tokens(17), responses(5, 7), other, chunk=4)
    assert distance(gradients, truth) > SEEN


def test_a_layer_that_misses_its_prefix_raises(monkeypatch):
    monkeypatch.setattr(Run, "consumed", property(lambda self: 0, lambda self, value: None))
    with pytest.raises(SelfCheckError, match="attention layers used their prefix"):
        apart("llama")
