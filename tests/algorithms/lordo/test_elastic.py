"""Four workers, of which some die or stall: the others go on, all end with equal weights."""

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.crew import EVERY, WORLD, Crew, Fate, replayed

pytestmark = pytest.mark.slow

TIMEOUT_S = 3.0
MARGIN_S = 5.0
"""For everything but waiting, on a busy machine."""


@pytest.fixture
def crew(tmp_path: Path) -> Iterator[Crew]:
    made = Crew(tmp_path, timeout_s=TIMEOUT_S)
    yield made
    made.close()


def begin(crew: Crew, fates: dict[int, Fate] | None = None) -> None:
    """Start all ranks and let two rounds go by."""
    for rank in range(crew.world):
        crew.start(rank, (fates or {}).get(rank))
    crew.rounds(2, restart=False)


def check(crew: Crew) -> list[dict]:
    """Stop the run and hold it to what was promised; its rounds in order, one report each."""
    crew.quit()
    assert all(process.exitcode in (0, -signal.SIGKILL) for process in crew.processes.values())
    reports = crew.events("round", "joined")
    reference = replayed(reports)
    after: dict[int, set[tuple[float, ...]]] = {}
    for report in reports:
        if report["step"] > 0:
            after.setdefault(report["step"], set()).add(tuple(report["x"]))
    assert {len(weights) for weights in after.values()} == {1}, "members differ"
    for step, weights in after.items():
        torch.testing.assert_close(
            torch.tensor(weights.copy().pop(), dtype=torch.float64),
            reference[step],
            rtol=0,
            atol=1e-12,
        )
    rounds = {report["step"]: report for report in reports if report["event"] == "round"}
    assert sorted(rounds) == list(range(EVERY, max(rounds) + 1, EVERY)), "no round is skipped"
    [result] = crew.events("result")
    ends = crew.events("end")
    assert {tuple(end["x"]) for end in (*ends, result)} == after[max(rounds)]
    assert len(ends) == sum(process.exitcode == 0 for process in crew.processes.values())
    return [rounds[step] for step in sorted(rounds)]


def longest_sync(crew: Crew) -> float:
    return max(event["seconds"] for event in crew.events("synced"))


def kill(crew: Crew, *ranks: int) -> None:
    """Kill them; wait until a round has all again."""
    moment = time.time()
    for rank in ranks:
        crew.signal(rank, signal.SIGKILL)
    crew.wait(lambda: crew.joined(ranks, moment))
    crew.all_in()


def stall(crew: Crew, rank: int) -> None:
    """Stop it; wait until a round goes on without it."""
    moment = time.time()
    crew.signal(rank, signal.SIGSTOP)

    def without() -> bool:
        return any(
            event["time"] > moment and rank not in event["members"]
            for event in crew.events("round")
        )

    crew.wait(without)


@pytest.mark.parametrize("victims", [(2, 2), (0, 3)], ids=["the same", "first the lowest"])
def test_one_of_four_is_killed_twice(crew: Crew, victims: tuple[int, int]) -> None:
    begin(crew)
    for victim in victims:
        kill(crew, victim)
    crew.rounds(2)
    assert longest_sync(crew) < TIMEOUT_S + MARGIN_S
    check(crew)
    for rank in range(WORLD):
        assert len(crew.events("start", rank=rank)) == 1 + victims.count(rank)


@pytest.mark.parametrize("place", ["arriving", "before", "within", "after", "applied"])
@pytest.mark.parametrize("rank", [0, 2])
def test_wherever_in_a_sync_it_dies(crew: Crew, rank: int, place: str) -> None:
    begin(crew, {rank: (5 * EVERY, place, "die")})
    crew.wait(lambda: len(crew.events("start", rank=rank)) == 2)
    crew.wait(lambda: crew.events("joined", rank=rank)[-1]["step"] >= 5 * EVERY)
    crew.all_in()
    rounds = check(crew)
    there = rank in rounds[4]["members"]
    assert there == (place == "applied")
    joined = crew.events("joined", rank=rank)[-1]
    known = [r for r in rounds if r["time"] < crew.events("start", rank=rank)[-1]["time"]]
    assert joined["step"] <= known[-1]["step"] + 2 * EVERY, "it is in after the next round"


def test_a_source_that_dies_while_it_hands_over(crew: Crew) -> None:
    begin(crew, {1: (0, "handing over", "die")})
    crew.signal(0, signal.SIGKILL)  # now 1 is the lowest that has the weights
    crew.wait(lambda: len(crew.events("start", rank=1)) == 2)
    crew.wait(lambda: all(crew.events("joined", rank=rank)[-1]["step"] > 0 for rank in (0, 1)))
    crew.all_in()
    check(crew)


def test_one_that_dies_before_the_new_group_is_made(tmp_path: Path) -> None:
    crew = Crew(tmp_path, timeout_s=30.0)
    try:
        begin(crew, {3: (5 * EVERY, "arriving", "die"), 2: (5 * EVERY, "decided", "die")})
        crew.wait(lambda: all(crew.events("joined", rank=rank)[-1]["step"] > 0 for rank in (2, 3)))
        crew.all_in()
        assert longest_sync(crew) < 30.0, "its return ends the wait"
        rounds = check(crew)
        assert rounds[4]["members"] == [0, 1]
    finally:
        crew.close()


@pytest.mark.parametrize("place", ["let in", "connecting", "loading"])
def test_one_that_dies_when_it_has_just_been_let_in(tmp_path: Path, place: str) -> None:
    crew = Crew(tmp_path, world=2, timeout_s=TIMEOUT_S)
    try:
        begin(crew)
        crew.signal(1, signal.SIGKILL)
        crew.wait(lambda: crew.processes[1].exitcode is not None, restart=False)
        crew.start(1, (0, place, "die"))
        crew.wait(lambda: crew.processes[1].exitcode is not None, restart=False)
        crew.start(1)
        crew.all_in(restart=False)
        assert longest_sync(crew) < 2 * TIMEOUT_S + MARGIN_S
        check(crew)
    finally:
        crew.close()


def test_an_exchange_that_fails_on_one_rank_is_done_again(tmp_path: Path) -> None:
    crew = Crew(tmp_path, timeout_s=30.0)
    try:
        begin(crew, {2: (5 * EVERY, "within", "raise")})
        crew.rounds(5, restart=False)
        assert longest_sync(crew) < 15.0, "the others learn of it without waiting"
        rounds = check(crew)
        assert all(report["members"] == [0, 1, 2, 3] for report in rounds)
    finally:
        crew.close()
    sizes = [event["size"] for event in crew.events("group", rank=0)]
    assert sizes == [4, 4]


@pytest.mark.parametrize("rank", [0, 3])
def test_a_stalled_one_is_left_out_and_comes_back(crew: Crew, rank: int) -> None:
    begin(crew)
    for _ in range(2):
        stall(crew, rank)
        crew.rounds(2)
        assert rank not in crew.newest_members()
        crew.signal(rank, signal.SIGCONT)
        crew.all_in()
    check(crew)
    assert len(crew.events("start", rank=rank)) == 1, "it is the same process"
    assert longest_sync(crew) > TIMEOUT_S


def test_one_that_stalls_within_an_exchange(crew: Crew) -> None:
    begin(crew, {1: (5 * EVERY, "within", "stall")})
    crew.wait(lambda: any(1 not in e["members"] for e in crew.events("round")))
    crew.rounds(1)
    crew.signal(1, signal.SIGCONT)
    crew.all_in()
    check(crew)
    others = [e["seconds"] for e in crew.events("synced") if e["rank"] != 1]
    assert TIMEOUT_S < max(others) < 2 * TIMEOUT_S + MARGIN_S


def test_two_die_at_once(crew: Crew) -> None:
    begin(crew)
    kill(crew, 1, 3)
    kill(crew, 0, 1)
    assert longest_sync(crew) < TIMEOUT_S + MARGIN_S
    check(crew)


def test_a_single_survivor_goes_on_alone(crew: Crew) -> None:
    begin(crew)
    for rank in (0, 1, 3):
        crew.signal(rank, signal.SIGKILL)
    crew.wait(lambda: crew.newest_members() == [2], restart=False)
    crew.rounds(3, restart=False)
    assert crew.newest_members() == [2]
    for rank in (0, 1, 3):
        crew.start(rank)
    crew.all_in()
    assert longest_sync(crew) < 2 * TIMEOUT_S + MARGIN_S
    check(crew)


def test_when_all_die_they_begin_again_from_what_the_lowest_has(crew: Crew) -> None:
    begin(crew)
    for rank in range(WORLD):
        crew.signal(rank, signal.SIGKILL)
    crew.wait(lambda: len(crew.events("joined")) == 2 * WORLD)
    again = crew.events("joined")[WORLD:]
    assert {event["step"] for event in again} == {0}, "which is nothing, for want of a checkpoint"


def test_only_the_lowest_living_member_leads(crew: Crew) -> None:
    begin(crew)
    stall(crew, 0)
    crew.rounds(2)
    crew.signal(0, signal.SIGCONT)
    crew.all_in()
    check(crew)
    leaders = set()
    for event in crew.events("synced"):
        lowest = event["rank"] == min(event["members"])
        # The one that stalled may be stopped between a sync and its report: it leads no more.
        assert event["leads"] == lowest or (event["rank"] == 0 and not event["leads"])
        leaders |= {event["rank"]} if event["leads"] else set()
    assert leaders == {0, 1}


@pytest.mark.parametrize("seed", range(3))
def test_killed_at_random_moments(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    crew = Crew(tmp_path, timeout_s=TIMEOUT_S, step_s=0.005)  # much of the time is spent in syncs
    try:
        begin(crew)
        for _ in range(8):
            time.sleep(chance.random() * 0.5)
            victim = chance.randrange(WORLD)
            if crew.processes[victim].exitcode is None:
                crew.signal(victim, signal.SIGKILL)
            crew.rounds(1)
        crew.all_in()
        assert longest_sync(crew) < 8 * TIMEOUT_S + 2 * MARGIN_S, (
            "gloo's wait for one that dies while they connect"
        )
        check(crew)
    finally:
        crew.close()


def test_a_world_of_one(tmp_path: Path) -> None:
    crew = Crew(tmp_path, world=1)
    try:
        begin(crew)
        crew.quit()
        assert len(crew.events("result")) == len(crew.events("end")) == 1
    finally:
        crew.close()
