"""Who takes part in a round, when workers die, stall and come back: one answer for all.

Workers come to numbered *decisions*. Each waits a bounded time for those it expects and proposes
the ones that came; the first proposal to reach the store holds for all (`compare_set`), so there is
never a second group. The members then try something together, each says whether it went well for
it, and the first *verdict* to reach the store holds: committed if all were done, else aborted, and
nobody applies what another does not. After an abort those that are left come to the next decision.

A worker that is in no decision wishes to be let in. A verdict names the wishes that its proposer
saw; those workers come to the next decision together with the members and get the weights. A wish
counts only if its worker has seen the present decision or the one before, so a dead worker's wish
costs at most one wait.

*Holders* are members that have the weights. If no holder is left (at the start, or when all died at
once), all ranks found the membership again, and what the lowest of them has, holds.

This is two-phase commit with the store as coordinator. As with torchft and hivemind, the store is
the one part that must not fail; here torchrun's agent hosts it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from algorithms.common.errors import MissingRanks
from algorithms.lordo.board import LAST_PAUSE_S, Board, Entry, Member, gone, those

PATIENCE = 10
"""Timeouts for which one waits for the others when going on without them would lose work."""


class LostContact(MissingRanks):
    """Nobody who could let this worker go on shows a sign of life. The message is one line."""


class Decision(NamedTuple):
    """Who takes part; members and holders by rank."""

    number: int
    members: list[Member]
    holders: list[Member]
    stop: bool
    """Whether one of them was asked to stop."""

    @property
    def source(self) -> Member:
        """The member whose state holds for those that are not holders."""
        return (self.holders or self.members)[0]


class Verdict(NamedTuple):
    """What became of a decision."""

    committed: bool
    joiners: list[Member]
    """Whom to let in next; they are not members yet."""


class Membership:
    """This worker's view; `decision` is the newest that it takes part in.

    Methods return None when the worker is left out, or the run is over: then `join`.
    """

    def __init__(self, board: Board) -> None:
        self.board = board
        self.decision = Decision(-1, [], [], False)

    @property
    def over(self) -> bool:
        """Whether the run has ended."""
        return bool(self.board.store.check(["over"]))

    def join(self) -> Decision | None:
        """Wait to be let in, or found the membership; None when the run is over.

        Raises `LostContact` when no member has shown a sign of life for `PATIENCE` timeouts.
        """
        board = self.board
        board.begin_life()
        seen: list[Entry] = []
        heard = time.monotonic()
        while not self.over:
            self.decision = decision = self._newest()
            members, entries = decision.members, board.read()
            verdict = self._verdict(decision.number)
            if all(gone(member, entries) for member in members):
                decided = self._decide([Member(rank, 0) for rank in range(board.world_size)], [])
            elif verdict is not None and board.me in verdict.joiners:
                decided = self._decide([*members, *verdict.joiners], members)
            else:
                board.wish(decision.number)
                sight = [entries[member.rank] for member in members]
                if sight != seen:
                    seen, heard = sight, time.monotonic()
                if time.monotonic() - heard > PATIENCE * board.timeout_s:
                    raise self._lost_contact(members)
                time.sleep(LAST_PAUSE_S)
                continue
            if decided is not None:
                return decided
        return None

    def meet(self, stop: bool = False) -> Decision | None:
        """Come to the next decision with the present members; `stop`: this one was asked to."""
        return self._decide(self.decision.members, self.decision.holders, stop)

    def admit(self, joiners: Sequence[Member]) -> Decision | None:
        """Come to the next decision with the present members and those that a verdict lets in."""
        return self._decide([*self.decision.members, *joiners], self.decision.members)

    def stand_by(self) -> bool:
        """Whether all members are about to act on this decision. To be asked before they connect
        to each other: that wait would not end when a member comes back that died meanwhile."""
        number, members, board = self.decision.number, self.decision.members, self.board
        board.stand_by(number)

        def ready(entry: Entry) -> bool:
            return entry.ready >= number

        entries = board.wait(members, ready, lambda: self._verdict(number) is not None)
        return those(members, ready, entries) == members

    def vote(self, succeeded: bool) -> Verdict:
        """Say how this decision's work went here; what holds for all."""
        decision, board = self.decision, self.board
        number, members = decision.number, decision.members
        committed = False
        if succeeded:
            board.finish(number)

            def ready(entry: Entry) -> bool:
                return entry.done >= number

            entries = board.wait(members, ready, lambda: self._verdict(number) is not None)
            committed = those(members, ready, entries) == members
        else:
            entries = board.read()
        joiners = []
        if committed and not decision.stop:
            wishes = [Member(r, e.life) for r, e in enumerate(entries) if e.wish >= number - 1 >= 0]
            joiners = [member for member in wishes if member not in members]
        proposal = json.dumps(Verdict(committed, joiners))
        verdict = _verdict(board.store.compare_set(f"verdict/{number}", "", proposal))
        if verdict.committed:
            self.decision = decision._replace(holders=members)
        return verdict

    @property
    def leads(self) -> bool:
        """Whether this is the lowest member, and the others have not gone on without it."""
        lowest = self.decision.members[0] == self.board.me
        return lowest and self._decision(self.decision.number + 1) is None

    def once(self, action: Callable[[], None]) -> None:
        """Have the lowest living member do `action` while the others wait; after a death the next
        one does it, from the start. At most once per decision.

        Raises `LostContact` when the one that does it is silent for `PATIENCE` timeouts.
        """
        board, patience = self.board, PATIENCE * self.board.timeout_s
        key = f"once/{self.decision.number}"
        for member in self.decision.members:
            if member == board.me:
                action()
                board.store.set(key, "")
                return
            entries = board.wait(
                [member], lambda entry: False, lambda: board.store.check([key]), patience
            )
            if board.store.check([key]):
                return
            if not gone(member, entries):
                raise LostContact(f"rank {member.rank} was silent for {patience:g} s")

    def end(self) -> None:
        """Tell workers that are still to come that the run is over."""
        self.board.store.set("over", "")

    def _decide(
        self, expected: Sequence[Member], holders: list[Member], stop: bool = False
    ) -> Decision | None:
        """Come to the next decision, wait for `expected`, agree; None if that leaves this out."""
        board, number = self.board, self.decision.number + 1
        board.come(number, stop)

        def ready(entry: Entry) -> bool:
            return entry.here >= number

        def settled() -> bool:
            return self._decision(number) is not None or self.over

        patience = 1 if board.me in holders else PATIENCE
        entries = board.wait(expected, ready, settled, patience * board.timeout_s)
        present = those(expected, ready, entries)
        decision = None
        if len(present) < len(expected):  # else all are here: nobody has gone on
            decision = self._decision(number)
            if decision is None and self.over:
                return None
        if decision is None:
            holding = [member for member in holders if member in present]
            if not holding and not all(gone(member, entries) for member in holders):
                raise self._lost_contact(holders)
            stop = any(entries[member.rank].stop for member in present)
            proposal = json.dumps(Decision(number, present, holding, stop))
            decision = _decision(board.store.compare_set(f"decision/{number}", "", proposal))
            board.store.set("newest", str(number))
        self.decision = decision
        return decision if board.me in decision.members else None

    def _newest(self) -> Decision:
        """The newest decision, whoever takes part in it."""
        newest, store = self.decision, self.board.store
        if store.check(["newest"]):  # which may be one behind
            newest = self._decision(int(store.get("newest"))) or newest
        while (following := self._decision(newest.number + 1)) is not None:
            newest = following
        return newest

    def _lost_contact(self, members: Sequence[Member]) -> LostContact:
        patience = PATIENCE * self.board.timeout_s
        ranks = ", ".join(str(member.rank) for member in members)
        return LostContact(
            f"rank {self.board.rank} cannot join: members {ranks} were silent for {patience:g} s"
        )

    def _decision(self, number: int) -> Decision | None:
        key, store = f"decision/{number}", self.board.store
        return _decision(store.get(key)) if store.check([key]) else None

    def _verdict(self, number: int) -> Verdict | None:
        key, store = f"verdict/{number}", self.board.store
        return _verdict(store.get(key)) if store.check([key]) else None


def _decision(text: bytes) -> Decision:
    number, members, holders, stop = json.loads(text)
    return Decision(number, [Member(*m) for m in members], [Member(*h) for h in holders], stop)


def _verdict(text: bytes) -> Verdict:
    committed, joiners = json.loads(text)
    return Verdict(committed, [Member(*joiner) for joiner in joiners])
