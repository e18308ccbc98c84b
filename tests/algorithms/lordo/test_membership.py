"""Decisions and verdicts of workers that are threads: who waits for whom, and that all agree."""

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from algorithms.lordo.board import Board, Member
from algorithms.lordo.membership import PATIENCE, Decision, LostContact, Membership, Verdict

TIMEOUT_S = 1.0


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Results of calls made at the same time; a call that does not return fails the test."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        return [future.result(timeout=30) for future in futures]


def crew(world: int = 4, timeout_s: float = TIMEOUT_S) -> list[Membership]:
    store = dist.HashStore()
    return [
        Membership(Board(store, rank=rank, world_size=world, timeout_s=timeout_s))
        for rank in range(world)
    ]


def founded(world: int = 4, timeout_s: float = TIMEOUT_S) -> list[Membership]:
    """Members that all hold the weights, and from then on wait `timeout_s`."""
    members = crew(world, timeout_s=20)
    together(*[member.join for member in members])
    verdicts = together(*[lambda member=member: member.vote(True) for member in members])
    assert verdicts == [Verdict(True, [])] * world
    for member in members:
        member.board.timeout_s, member.board._next_beat = timeout_s, 0.0
    return members


def ranks(decision: Decision | None) -> list[int]:
    assert decision is not None
    return [member.rank for member in decision.members]


def reborn(member: Membership) -> Membership:
    """Another process with the rank of `member`, which is dead."""
    board = member.board
    timeout_s = board.timeout_s
    return Membership(Board(board.store, rank=board.rank, world_size=4, timeout_s=timeout_s))


def test_all_that_start_found_the_membership_and_the_lowest_has_the_weights() -> None:
    members = crew()
    decisions = together(*[member.join for member in members])
    everyone = [Member(rank, 1) for rank in range(4)]
    assert decisions == [Decision(0, everyone, [], False)] * 4
    assert decisions[0].source == Member(0, 1)
    assert [member.leads for member in members] == [True, False, False, False]


def test_after_a_commit_everybody_holds_the_weights() -> None:
    members = founded()
    assert all(member.decision.holders == member.decision.members for member in members)


def test_a_silent_one_is_waited_for_until_the_timeout_and_then_left_out() -> None:
    members = founded()
    begun = time.monotonic()
    decisions = together(*[members[rank].meet for rank in (0, 1, 3)])
    assert TIMEOUT_S < time.monotonic() - begun < TIMEOUT_S + 3
    assert decisions[0] == decisions[1] == decisions[2]
    assert ranks(decisions[0]) == [0, 1, 3]
    assert members[2].meet() is None, "it comes too late"


def test_one_that_beats_is_waited_for_beyond_the_timeout() -> None:
    members = founded()

    def slow() -> Decision | None:
        for _ in range(40):
            time.sleep(TIMEOUT_S / 10)
            members[2].board.beat()
        return members[2].meet()

    decisions = together(slow, *[members[rank].meet for rank in (0, 1, 3)])
    assert [ranks(decision) for decision in decisions] == [[0, 1, 2, 3]] * 4


def test_nobody_waits_for_a_rank_that_has_started_anew() -> None:
    members = founded(timeout_s=20)
    reborn(members[2]).board.begin_life()
    begun = time.monotonic()
    decisions = together(*[members[rank].meet for rank in (0, 1, 3)])
    assert time.monotonic() - begun < 5
    assert [ranks(decision) for decision in decisions] == [[0, 1, 3]] * 3


def test_one_that_came_and_died_is_found_out_when_it_is_back() -> None:
    members = founded(timeout_s=20)
    together(*[member.meet for member in members])
    timer = threading.Timer(0.2, reborn(members[2]).board.begin_life)
    timer.start()
    begun = time.monotonic()
    assert together(*[members[rank].stand_by for rank in (0, 1, 3)]) == [False] * 3
    assert time.monotonic() - begun < 5


def test_all_stand_by() -> None:
    members = founded(timeout_s=20)
    together(*[member.meet for member in members])
    assert together(*[member.stand_by for member in members]) == [True] * 4


@pytest.mark.parametrize("failing", [0, 3])
def test_one_failure_aborts_for_all_at_once(failing: int) -> None:
    members = founded(timeout_s=20)
    together(*[member.meet for member in members])
    begun = time.monotonic()
    votes = [lambda m=m: m.vote(m.board.rank != failing) for m in members]
    assert together(*votes) == [Verdict(False, [])] * 4
    assert time.monotonic() - begun < 5


def test_without_a_vote_it_is_aborted_and_a_late_one_does_not_change_that() -> None:
    members = founded()
    together(*[member.meet for member in members])
    verdicts = together(*[lambda m=m: m.vote(True) for m in members[:3]])
    assert verdicts == [Verdict(False, [])] * 3
    assert members[3].vote(True) == Verdict(False, [])


def test_a_request_to_stop_reaches_all() -> None:
    members = founded()
    decisions = together(*[lambda m=m: m.meet(m.board.rank == 2) for m in members])
    assert [decision.stop for decision in decisions] == [True] * 4


def round_without(members: list[Membership], *absent: int) -> list[Verdict]:
    """A committed round of those that are not `absent`."""
    present = [member for member in members if member.board.rank not in absent]
    together(*[member.meet for member in present])
    return together(*[lambda m=m: m.vote(True) for m in present])


def test_a_wish_is_heard_at_the_next_round_and_gets_the_weights_from_the_lowest() -> None:
    members = founded(timeout_s=20)
    late = reborn(members[0])
    joined: list[Decision | None] = []
    thread = threading.Thread(target=lambda: joined.append(late.join()), daemon=True)
    thread.start()
    while members[1].board.read()[0].wish < 0:
        time.sleep(0.01)
    verdicts = round_without(members, 0)
    assert verdicts == [Verdict(True, [Member(0, 2)])] * 3
    decisions = together(*[lambda m=m: m.admit(verdicts[0].joiners) for m in members[1:]])
    thread.join(20)
    assert joined == decisions[:1] == decisions[1:2]
    holders = [Member(1, 1), Member(2, 1), Member(3, 1)]
    assert decisions[0] == Decision(2, [Member(0, 2), *holders], holders, False)
    assert decisions[0].source == Member(1, 1)
    assert late.leads and not members[1].leads


def test_a_dead_workers_wish_costs_one_wait() -> None:
    members = founded()
    late = reborn(members[3])
    late.board.begin_life()
    late.board.wish(late._newest().number)  # and dies
    verdicts = round_without(members, 3)
    assert verdicts[0].joiners == [Member(3, 2)]
    decisions = together(*[lambda m=m: m.admit(verdicts[0].joiners) for m in members[:3]])
    assert [ranks(decision) for decision in decisions] == [[0, 1, 2]] * 3
    for _ in range(2):
        assert round_without(members, 3)[0].joiners == []


def test_an_aborted_round_and_one_that_stops_let_nobody_in() -> None:
    members = founded()
    late = reborn(members[3])
    late.board.begin_life()
    late.board.wish(0)
    together(*[member.meet for member in members[:3]])
    aborted = together(*[lambda m=m: m.vote(m.board.rank > 0) for m in members[:3]])
    assert aborted == [Verdict(False, [])] * 3
    late.board.wish(1)
    together(*[lambda m=m: m.meet(True) for m in members[:3]])
    assert together(*[lambda m=m: m.vote(True) for m in members[:3]]) == [Verdict(True, [])] * 3


def test_when_all_have_died_they_found_it_again() -> None:
    members = [reborn(member) for member in founded(timeout_s=20)]
    begun = time.monotonic()
    decisions = together(*[member.join for member in members])
    assert time.monotonic() - begun < 5
    assert decisions == [Decision(1, [Member(rank, 2) for rank in range(4)], [], False)] * 4


def test_a_worker_that_finds_nobody_says_so() -> None:
    members = founded(timeout_s=0.1)
    with pytest.raises(LostContact, match=r"^rank 2 cannot join: members 0, 1, 2, 3 were silent"):
        reborn(members[2]).join()


def test_a_run_that_is_over_lets_nobody_in() -> None:
    members = founded()
    members[0].end()
    assert reborn(members[2]).join() is None
    begun = time.monotonic()
    assert members[3].meet() is None
    assert time.monotonic() - begun < TIMEOUT_S, "it does not wait for those that have left"


def test_what_is_done_once_is_done_by_the_lowest() -> None:
    members, done = founded(), list[int]()
    together(*[lambda m=m: m.once(lambda: done.append(m.board.rank)) for m in members])
    assert done == [0]


def test_when_the_lowest_dies_the_next_one_does_it() -> None:
    members, done = founded(timeout_s=20), list[int]()

    def die() -> None:
        done.append(0)
        reborn(members[0]).board.begin_life()
        raise KeyboardInterrupt

    def lowest() -> None:
        with pytest.raises(KeyboardInterrupt):
            members[0].once(die)

    others = [lambda m=m: m.once(lambda: done.append(m.board.rank)) for m in members[1:]]
    together(lowest, *others)
    assert done == [0, 1]


def test_nobody_takes_over_from_one_that_may_be_at_it_still() -> None:
    members = founded(timeout_s=0.05)
    begun = time.monotonic()
    with pytest.raises(LostContact, match=r"^rank 0 was silent for 0\.5 s$"):
        members[1].once(lambda: None)
    assert time.monotonic() - begun > PATIENCE * 0.05


@pytest.mark.parametrize("seed", range(3))
def test_whatever_the_delays_there_is_one_decision_and_one_verdict_per_number(seed: int) -> None:
    members = founded(timeout_s=0.05)
    decided: dict[int, set[str]] = {}
    judged: dict[int, set[str]] = {}

    def life(membership: Membership) -> None:
        chance = random.Random(10 * seed + membership.board.rank)
        give_up = time.monotonic() + 1.5
        while time.monotonic() < give_up:
            time.sleep(chance.choice([0.0, 0.01, 0.06, 0.12]))
            decision = membership.meet()
            if decision is None:
                return
            decided.setdefault(decision.number, set()).add(str(decision))
            time.sleep(chance.choice([0.0, 0.01, 0.06]))
            verdict = membership.vote(chance.random() < 0.9)
            judged.setdefault(decision.number, set()).add(str(verdict))

    together(*[lambda m=m: life(m) for m in members])
    assert {len(each) for each in (*decided.values(), *judged.values())} == {1}
    assert len(decided) > 5
