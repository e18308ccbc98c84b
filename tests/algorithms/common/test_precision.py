"""bf16: the forward pass is rounded, weights and what is learned are not."""

import pytest
import torch

from algorithms.common.comm import Comm
from algorithms.common.metrics import read_rows
from tests import toys
from tests.loops import folder, loop

ALONE = Comm(None, torch.device("cpu"))


def train(tokens, run_dir, precision):
    """Losses of a run of its own, with the model and the optimizer it ends with."""
    training = toys.training(precision=precision, steps=20)
    made = loop(ALONE, tokens, folder(run_dir), training)
    seen = set()
    made.model.lm_head.register_forward_hook(lambda _, __, scores: seen.add(scores.dtype))
    made.run()
    rows = read_rows(run_dir / "metrics.jsonl")
    return [row["train/loss"] for row in rows], rows[-1]["val/loss"], made.model, made.method, seen


def test_bf16_rounds_the_forward_pass_and_nothing_that_stays(tokens, tmp_path):
    exact, exact_held_out, _, _, in_fp32 = train(tokens, tmp_path / "fp32", "fp32")
    losses, held_out, decoder, method, in_bf16 = train(tokens, tmp_path / "bf16", "bf16")
    assert (in_fp32, in_bf16) == ({torch.float32}, {torch.bfloat16})
    assert losses != exact
    assert losses == pytest.approx(exact, rel=0.01)
    assert held_out == pytest.approx(exact_held_out, rel=0.01)
    assert losses[-1] < 0.9 * losses[0], "the model learns nothing"
    kept = [*decoder.parameters()]
    kept += [parameter.grad for parameter in decoder.parameters() if parameter.grad is not None]
    kept += [
        value
        for state in method.optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    assert {tensor.dtype for tensor in kept} == {torch.float32}
    assert len(method.optimizer.state) == len([*decoder.parameters()])
