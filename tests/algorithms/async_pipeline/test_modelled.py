"""The modelled times against what can be counted by hand."""

import pytest

from algorithms.async_pipeline import modelled, trace
from algorithms.async_pipeline.modelled import Span, timeline
from algorithms.async_pipeline.schedule import natural

N = 40


@pytest.mark.parametrize("stages", [1, 2, 5])
def test_equal_stages_lose_the_fill_and_the_drain_alone(stages):
    """A microbatch passes P-1 forwards before the last stage is busy, and P-1 backwards after."""
    events = timeline(natural(stages), N, [3.0] * stages)
    assert trace.span(events) == pytest.approx(3.0 * (N + stages - 1))
    assert trace.utilisation(events) == pytest.approx(N / (N + stages - 1))


def test_the_slowest_stage_sets_the_pace():
    events = timeline(natural(3), N, [1.0, 6.0, 1.0])
    assert trace.span(events) == pytest.approx(6.0 * N, rel=0.05)
    assert trace.utilisation(events) == pytest.approx(8 / 18, rel=0.05)


def test_without_delays_a_pipeline_works_one_stage_at_a_time():
    events = timeline([0, 0, 0], N, [1.0, 1.0, 1.0])
    assert trace.utilisation(events) == pytest.approx(1 / 3)


@pytest.mark.parametrize("microbatches", [2, 7])
def test_every_action_is_there_once_and_nothing_overlaps(microbatches):
    """Also with fewer microbatches than stages, and more per update."""
    stages = timeline(natural(4), microbatches * 2, [1.0, 2.0, 0.5, 1.5], accumulation=2)
    for events in stages:
        done = [(e.kind, e.index) for e in events if e.kind != "wait"]
        assert sorted(done) == sorted(
            [(kind, m) for kind in ("forward", "backward") for m in range(2 * microbatches)]
            + [("update", u) for u in range(microbatches)]
        )
        for before, after in zip(events, events[1:], strict=False):
            assert after.start == pytest.approx(before.end)


def test_a_microbatch_goes_down_and_comes_back():
    stages = timeline(natural(3), 5, [1.0, 1.0, 1.0])
    times = [{(e.kind, e.index): e for e in events} for events in stages]
    for m in range(5):
        for k in (1, 2):
            above, here = times[k - 1], times[k]
            assert here["forward", m].start >= above["forward", m].end - 1e-9
            assert above["backward", m].start >= here["backward", m].end - 1e-9


DELAYS = [[0], [2, 1, 0], [7, 3, 3, 0], [4, 4, 4], [0, 0, 0, 0], [9, 1, 0]]


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("delays", DELAYS)
def test_a_span_that_grows_is_that_of_the_whole_timeline(delays, accumulation):
    """However it grew, exactly; also before the pipeline is full."""
    costs = [5, 3, 11, 2][: len(delays)]
    seconds = [3.0 * cost for cost in costs]  # whole numbers, so exact up to FORWARD
    for stride in (1, 4):
        grown = Span(delays, costs, accumulation)
        for microbatches in range(accumulation, 16 * accumulation, stride * accumulation):
            found = grown.of(microbatches)
            assert found == grown.of(microbatches)
            assert found == Span(delays, costs, accumulation).of(microbatches)
            whole = timeline(delays, microbatches, seconds, accumulation)
            assert isinstance(found, int)
            assert found == pytest.approx(trace.span(whole), rel=1e-12, abs=0)


def test_a_span_costs_what_is_new_and_a_drain(monkeypatch):
    made = 0

    def counted(*arguments):
        nonlocal made
        made += 1
        return trace.Event(*arguments)

    monkeypatch.setattr(modelled, "Event", counted)
    grown, counts = Span(natural(5), [1, 2, 3, 2, 1]), []
    for microbatches in range(10, 150, 10):
        made = 0
        grown.of(microbatches)
        counts.append(made)
    assert len(set(counts[2:])) == 1
