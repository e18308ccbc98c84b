"""The choice of a twin: the first that can run, counted, with its reason; or the forced one."""

import logging
import threading

import pytest
import torch

from kernels import dispatch
from kernels.dispatch import CannotRun, Twin

FAST = Twin("fast", lambda x: "not on Sundays" if x.sum() == 7 else None, lambda x: "fast")
PICKY = Twin("picky", lambda x: "tensors are on cpu", lambda x: "picky")
PLAIN = Twin("plain", dispatch.anywhere, lambda x: "plain")


@pytest.fixture
def op(request):
    """A name of an operation that no other test uses."""
    return request.node.nodeid


def test_the_first_twin_that_can_run_runs(op):
    assert dispatch.choose(op, [FAST, PLAIN], torch.ones(3)) is FAST
    assert dispatch.choose(op, [FAST, PLAIN], torch.ones(7)) is PLAIN
    assert dispatch.choose(op, [PICKY, FAST], torch.ones(3)) is FAST


def test_calls_are_counted_with_the_reason(op):
    for size in (7, 3, 7):
        dispatch.choose(op, [PICKY, FAST, PLAIN], torch.ones(size))
    assert dispatch.counters[op] == {"plain": 2, "fast": 1}
    assert dispatch.reasons[op] == {
        "fast": "not picky: tensors are on cpu",
        "plain": "not picky: tensors are on cpu; not fast: not on Sundays",
    }


def test_a_choice_is_logged_once_for_each_reason(op, caplog):
    with caplog.at_level(logging.INFO, logger="kernels.dispatch"):
        for size in (3, 3, 7, 7, 3):
            dispatch.choose(op, [FAST, PLAIN], torch.ones(size))
    assert caplog.messages == [
        f"{op} runs as fast (preferred)",
        f"{op} runs as plain (not fast: not on Sundays)",
    ]


def test_an_override_forces_a_twin_and_ends(op):
    with dispatch.override(op, "plain"):
        assert dispatch.choose(op, [FAST, PLAIN], torch.ones(3)) is PLAIN
        with dispatch.override(op, "fast"):
            assert dispatch.choose(op, [FAST, PLAIN], torch.ones(3)) is FAST
        assert dispatch.choose("another " + op, [FAST, PLAIN], torch.ones(3)) is FAST
    assert dispatch.choose(op, [FAST, PLAIN], torch.ones(3)) is FAST
    assert dispatch.reasons[op] == {"plain": "forced", "fast": "preferred"}


def test_an_override_does_not_reach_another_thread(op):
    chosen = []
    with dispatch.override(op, "plain"):
        thread = threading.Thread(
            target=lambda: chosen.append(dispatch.choose(op, [FAST, PLAIN], torch.ones(3)))
        )
        thread.start()
        thread.join()
    assert chosen == [FAST]


def test_a_forced_twin_that_cannot_run_raises_with_its_reason_and_counts_nothing(op):
    with dispatch.override(op, "picky"), pytest.raises(CannotRun, match="tensors are on cpu"):
        dispatch.choose(op, [PICKY, FAST, PLAIN], torch.ones(3))
    assert not dispatch.counters[op]


def test_an_unknown_twin_raises_with_the_names(op):
    message = "no twin 'gpu', only picky, plain"
    with dispatch.override(op, "gpu"), pytest.raises(CannotRun, match=message):
        dispatch.choose(op, [PICKY, PLAIN], torch.ones(3))


def test_no_twin_left_raises_with_every_reason(op):
    with pytest.raises(CannotRun, match="not picky: tensors are on cpu; not fast: not on Sundays"):
        dispatch.choose(op, [PICKY, FAST], torch.ones(7))
