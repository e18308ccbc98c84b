"""Schedules: what a stage does in which order, and with weights of which age."""

import pytest

from algorithms.async_pipeline.schedule import (
    Action,
    actions,
    check_delays,
    forwarded,
    natural,
    stretched,
)
from algorithms.common.errors import InputError


def text(plan):
    return " ".join(f"{action.kind[0].upper()}{action.index}" for action in plan)


def test_warm_up_steady_state_and_drain():
    assert text(actions(2, 0, 4)) == "F0 F1 F2 B0 U0 F3 B1 U1 B2 U2 B3 U3"
    assert text(actions(0, 0, 3)) == "F0 B0 U0 F1 B1 U1 F2 B2 U2"


def test_fewer_microbatches_than_stages():
    assert text(actions(5, 0, 2)) == "F0 F1 B0 U0 B1 U1"
    assert actions(5, 3, 3) == []


def test_an_update_takes_several_microbatches():
    assert text(actions(1, 2, 6, 2)) == "F2 F3 B2 F4 B3 U1 F5 B4 B5 U2"


@pytest.mark.parametrize("accumulation", [1, 2, 3])
@pytest.mark.parametrize("delay", range(6))
def test_a_forward_sees_weights_that_are_as_old_as_the_formula_says(delay, accumulation):
    start, stop, updates = 6, 24, 6 // accumulation
    for action in actions(delay, start, stop, accumulation):
        if action.kind == "forward":
            seen = max(start, action.index - delay) // accumulation
            assert updates == seen
        updates += action.kind == "update"
    assert updates == stop // accumulation


@pytest.mark.parametrize("delay", [0, 1, 3, 9])
def test_pieces_of_a_run_are_the_run_and_their_forwards_are_foretold(delay):
    whole = actions(delay, 4, 12, 2)
    pieces = []
    for done, until in [(4, 4), (4, 6), (6, 10), (10, 12)]:
        pieces += actions(delay, 4, 12, 2, done=done, until=until)
        forwards = [action.index for action in pieces if action.kind == "forward"]
        assert forwards == list(range(4, forwarded(delay, 4, 12, until)))
    assert pieces == whole
    assert Action("update", 5) in whole


@pytest.mark.parametrize("stages", range(1, 9))
def test_stages_with_these_delays_never_wait_for_each_other_in_a_circle(stages):
    delays = natural(stages)
    assert delays == list(range(stages))[::-1]
    plans = [actions(delay, 0, 5) for delay in delays]
    over, at = set(), [0] * stages
    while any(at[k] < len(plans[k]) for k in range(stages)):
        before = list(at)
        for k, plan in enumerate(plans):
            if at[k] == len(plan):
                continue
            action = plan[at[k]]
            needs = {
                "forward": (k - 1, "forward", action.index) if k else None,
                "backward": (k + 1, "backward", action.index) if k < stages - 1 else None,
                "update": None,
            }[action.kind]
            if needs is None or needs in over:
                over.add((k, action.kind, action.index))
                at[k] += 1
        assert at != before, "a deadlock"


def test_delays_that_hide_messages():
    assert stretched(4, 0) == natural(4)
    assert stretched(4, 1) == [9, 6, 3, 0]
    assert stretched(3, 0.2) == [3, 2, 0]


@pytest.mark.parametrize(
    ("delays", "message"),
    [
        ([1, 0], "delays: 2 numbers for 3 stages"),
        ([2, -1, 0], "delays: stage 1 has -1, which is negative"),
        ([1, 2, 0], "delays: stage 1 has 2, more than stage 0"),
    ],
)
def test_delays_that_cannot_be(delays, message):
    with pytest.raises(InputError) as caught:
        check_delays(delays, 3)
    assert str(caught.value) == message


@pytest.mark.parametrize("bounds", [(1, 4), (2, 5)])
def test_runs_are_whole_updates(bounds):
    with pytest.raises(InputError, match="is no multiple of accumulation"):
        actions(1, *bounds, 2)
