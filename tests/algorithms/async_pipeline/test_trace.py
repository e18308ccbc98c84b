"""Traces: utilisation is compute over (P times wall)."""

import time

import pytest

from algorithms.async_pipeline.trace import Event, Trace, seconds, span, utilisation

STAGES = [
    [
        Event("forward", 0, 10.0, 11.0),
        Event("wait", 0, 11.0, 13.0),
        Event("backward", 0, 13.0, 15.0),
    ],
    [Event("wait", 0, 10.5, 11.0), Event("forward", 0, 11.0, 12.0), Event("update", 0, 12.0, 20.0)],
]


def test_shares_of_a_trace():
    assert span(STAGES) == 10.0
    assert seconds(STAGES[0], "wait", "forward") == 3.0
    assert utilisation(STAGES) == pytest.approx(12 / 20)


def test_events_last_as_long_as_what_is_inside_and_are_taken_once():
    trace = Trace()
    with trace.record("forward", 3):
        time.sleep(0.02)
    (event,) = trace.take()
    assert (event.kind, event.index) == ("forward", 3)
    assert event.end - event.start >= 0.02
    assert trace.take() == []
