"""Reuse of a captured prompt over several optimizer steps: off by default, measured when on."""

import pytest
import torch

from algorithms.branch_replay.config import ReplayConfig
from algorithms.branch_replay.refresh import cosine
from algorithms.branch_replay.replay import BranchReplay
from algorithms.branch_replay.traversal import Traversal
from tests.families import tiny
from tests.replays import coupled, distance, replayed, responses, take_gradients, tokens

HYBRID = "falcon_h1"


def run(lr: float, steps: int, **settings):
    """Outputs of `steps` steps with one captured prompt, and the capture's age after each."""
    model = tiny(HYBRID)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    config = ReplayConfig(mode="response_only", chunk=8, **settings)
    replay = BranchReplay(model, config)
    captured = replay.capture(tokens(20))
    outs = []
    for _ in range(steps):
        outs.append(replay.step(captured, responses(5, 7), coupled))
        for parameter in model.parameters():  # steps of one length, whatever the gradient
            if parameter.grad is not None:
                parameter.grad /= 1e-30 + parameter.grad.norm()
        optimizer.step()
        optimizer.zero_grad()
    return outs


def test_a_prompt_is_captured_again_after_k_steps():
    outs = run(1e-3, 8, refresh_every=3, refresh_bound=1.0)
    drifts = [out.drift for out in outs]
    assert drifts[0] is None
    assert [d.age for d in drifts[1:]] == [1, 2, 3, 1, 2, 3, 1]
    assert [d.recaptured for d in drifts[1:]] == [False, False, True] * 2 + [False]
    changes = [d.state_change for d in drifts[1:4]]
    assert 0 < changes[0] < changes[1] < changes[2] < 1.0
    measured = drifts[3]
    assert 0.5 < measured.gradient_cosine < 1.0 - 1e-9
    assert measured.log_prob_change > 1e-6
    assert drifts[1].gradient_cosine is None
    prompts = [out.tokens_without_graph - 12 for out in outs]
    assert prompts == [0] * 8  # captures are counted where they are made, not in these steps


def test_a_bound_that_is_passed_recaptures_early():
    outs = run(3e-2, 3, refresh_every=100, refresh_bound=1e-3)
    assert all(out.drift.recaptured and out.drift.state_change > 1e-3 for out in outs[1:])


def test_a_recaptured_step_is_that_of_a_fresh_prompt_and_adds_to_what_was_there():
    model = tiny(HYBRID)
    config = ReplayConfig(mode="response_only", chunk=8, refresh_every=100, refresh_bound=0.0)
    replay = BranchReplay(model, config)
    captured = replay.capture(tokens(20))
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.1)
    _, fresh = replayed(model, tokens(20), responses(5, 7), mode="response_only", chunk=8)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    out = replay.step(captured, responses(5, 7), coupled)
    gradients = {name: g - 1 for name, g in take_gradients(model).items()}
    assert out.drift.recaptured and captured.age == 0
    assert distance(gradients, fresh) <= 1e-6
    assert replay.step(captured, responses(5, 7), coupled).drift is None


def test_weights_that_are_written_but_equal_have_not_drifted():
    drifts = [out.drift for out in run(0.0, 3, refresh_every=2, refresh_bound=0.0)]
    assert [d.age for d in drifts[1:]] == [1, 2]
    assert drifts[2].recaptured and drifts[2].state_change == 0.0
    assert drifts[2].gradient_cosine == pytest.approx(1.0)
    assert drifts[2].log_prob_change == 0.0


def test_cosine():
    one, two = torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])
    assert cosine([one, None], [two, None]) == pytest.approx(0.5**0.5)
    assert cosine([one, None], [None, one]) == 0.0
    assert cosine([None], [None]) == 1.0


@pytest.mark.parametrize("family", ["mamba2", "llama", HYBRID])
@pytest.mark.parametrize("change_again", [True, False])
def test_a_recapture_that_was_interrupted_is_made_up_for(family, change_again, monkeypatch):
    model = tiny(family)
    settings = {"mode": "response_only", "chunk": 5}
    replay = BranchReplay(model, ReplayConfig(**settings, refresh_every=3, refresh_bound=0.0))
    captured = replay.capture(tokens(16))

    def change():
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(1.1)

    capture = Traversal._capture

    def interrupt(self, segment, entry):
        if segment.start == 10 and segment.end not in self.captured:
            raise KeyboardInterrupt
        return capture(self, segment, entry)

    change()
    with monkeypatch.context() as patch:
        patch.setattr(Traversal, "_capture", interrupt)
        with pytest.raises(KeyboardInterrupt):
            replay.step(captured, responses(5, 7), coupled)
    assert all(parameter.grad is None for parameter in model.parameters())
    if change_again:
        change()
    out = replay.step(captured, responses(5, 7), coupled)
    ours = take_gradients(model)
    _, fresh = replayed(model, tokens(16), responses(5, 7), **settings)
    assert out.drift is None and captured.age == 0
    assert distance(ours, fresh) <= 1e-6
    assert replay.step(captured, responses(5, 7), coupled).drift is None
