"""The kill matrix: one round of each kind, and how rounds are dealt."""

from collections import Counter

import pytest

from benchmarks import fault_rounds
from benchmarks.fault_arena import Arena
from benchmarks.fault_rounds import KINDS, SPANS, Quiet, Rounds
from benchmarks.faults import ROUNDS, plan


def test_kinds_take_turns_and_the_spans_have_their_shares():
    dealt = plan(ROUNDS)
    kinds, spans = (Counter(column) for column in zip(*dealt, strict=True))
    assert set(kinds) == set(KINDS) and max(kinds.values()) - min(kinds.values()) <= 1
    assert min(spans["write"], spans["before"]) >= ROUNDS / 4
    assert len({*dealt}) == 3 * len(KINDS), "every kind in every span"


@pytest.fixture(scope="module")
def rounds(tmp_path_factory):
    arena = Arena(tmp_path_factory.mktemp("faults") / "project")
    with pytest.MonkeyPatch.context() as patch, arena.services():
        patch.setattr(fault_rounds, "PATIENCE_S", 60.0)  # beside other work
        yield Rounds(arena)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "span"), plan(len(KINDS)), ids=[*KINDS])
def test_nothing_is_lost_and_nothing_left(rounds, name, span):
    verdict = rounds.play(name, span)
    assert verdict.orphans == 0
    assert verdict.wrong_status == 0
    assert verdict.resume_mismatch == 0
    assert verdict.duplicate_steps == 0


def test_a_run_that_was_faster_moves_all_moments():
    quiet = Quiet({"flow": 0.0, "rank": 10.0}, (16.0, 1.0), 20.0)
    assert quiet.by(10.0) == Quiet({"flow": 0.0, "rank": 5.0}, (8.0, 0.5), 10.0)
    assert quiet.by(30.0) == quiet, "a slower one has a moment to be struck at"


def test_a_quarter_of_the_spans_is_a_write_and_a_quarter_lies_before_the_first():
    assert Counter(SPANS) == {"write": 1, "before": 1, "any": 2}
