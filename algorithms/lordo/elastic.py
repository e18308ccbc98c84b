"""Rounds that go on without dead or stalled workers, and take them back with the global weights.

At a sync the living members agree on who takes part (`algorithms/lordo/membership.py`), exchange
into buffers through a gloo group of their own, and agree that it worked for all before anyone
applies it; else those that are left do it again. Means are over the members present. The group is
made anew only when it is another one, or has failed. Then a worker that was started again, or was
left out, is let in: it loads the state of the lowest holder and goes on at the next step.

A dead worker costs the others one wait: until it is back and says so, at most the timeout. A worker
that dies within the exchange is noticed at once, by its closed connections.

How it departs from torchft, which has the same aim: membership changes at syncs only, there is no
server beside the store, and a round that failed is repeated rather than dropped.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from algorithms.common.comm import Comm
from algorithms.common.errors import NonFiniteError, one_line
from algorithms.lordo.board import Board, Member
from algorithms.lordo.membership import Decision, Membership

log = logging.getLogger(__name__)

T = TypeVar("T")

ATTEMPTS = 10
"""Failed exchanges after which it is no longer a matter of workers that die."""
CONNECT_S = 5.0
CHUNK_BYTES = 1 << 24
"""Of a state under way; each must arrive within the timeout."""


class Worker(Protocol):
    """What `Elastic` needs of the training on this rank."""

    def regroup(self) -> None:
        """The group is another one: forget what hangs on its ranks, such as residuals of shards."""

    def state(self) -> dict[str, Any]:
        """What a worker that joins after a round has to know: tensors and plain values."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from the `state` of another worker; what it does not hold starts afresh."""


class Turn(NamedTuple):
    """How to go on after a sync; the same on all members."""

    step: int
    """The last step that is done; another than that of the call after a `rejoined`."""
    rejoined: bool
    """This worker's state came from another one."""
    stop: bool
    """A member was asked to stop; all stop now."""
    over: bool
    """The run ended without this worker; nothing is left to do."""


class Elastic:
    """The rounds of one worker. `comm` speaks to the present members; it stays the same object,
    with other ranks, so whoever holds it need not care. The process has no other process group.

    Raises `LostContact` in a worker that finds nobody to join, and whatever the store raises when
    its host is gone.
    """

    def __init__(self, board: Board, worker: Worker, comm: Comm) -> None:
        self.membership = Membership(board)
        self.board = board
        self.worker = worker
        self.comm = comm
        self._group: list[Member] = []

    def join(self, step: int) -> Turn:
        """Take part from now on. `step` is the last one of the state that this worker has; that
        state becomes everybody's if nobody has gone on and this is the lowest rank."""
        return self._enter(self.membership.join(), step)

    def sync(
        self,
        step: int,
        exchange: Callable[[int], T],
        apply: Callable[[int, T], None],
        stop: bool = False,
    ) -> Turn:
        """The sync of `step`; `stop`: this worker was asked to stop.

        `exchange(step)` does the collectives through the group's `Comm`, with results in new
        buffers. It may be called again: it changes nothing that another call would see. `apply`
        takes over what it returned. Deterministic: all members end with equal weights.
        """
        before = self.membership.decision.members
        for _ in range(ATTEMPTS):
            decision = self.membership.meet(stop)
            if decision is None:
                log.warning("step %d: the others went on without this rank; joining again", step)
                return self._enter(None, step)
            if lost := [str(m.rank) for m in before if m not in decision.members]:
                log.warning("step %d: going on without rank %s", step, ", ".join(lost))
            before = decision.members
            succeeded, exchanged = self._try(step, decision, lambda: exchange(step))
            verdict = self.membership.vote(succeeded)
            if verdict.committed:
                apply(step, exchanged)
                if verdict.joiners:
                    return self._enter(self.membership.admit(verdict.joiners), step)
                return Turn(step, rejoined=False, stop=decision.stop, over=False)
            self._disband()
        raise RuntimeError(f"step {step}: the exchange failed {ATTEMPTS} times")

    def _enter(self, decision: Decision | None, step: int) -> Turn:
        """Hand the state to the members of `decision` that lack it, until all have it; None: this
        worker is no member and has to join."""
        me, rejoined, failures = self.board.me, False, 0
        while failures < ATTEMPTS:
            if decision is None:
                decision = self.membership.join()
                if decision is None:
                    return Turn(step, rejoined, stop=False, over=True)
                me = self.board.me
            if decision.members == decision.holders:
                return Turn(step, rejoined, decision.stop, over=False)
            wanted = me not in decision.holders and me != decision.source
            hand_over = partial(self._hand_over, decision, wanted, step)
            succeeded, state = self._try(step, decision, hand_over)
            verdict = self.membership.vote(succeeded)
            if not verdict.committed:
                self._disband()
                failures += 1
                decision = self.membership.meet()
                continue
            if wanted:
                step, rejoined = state["step"], True
                self.worker.load_state(state["worker"])
            names = ", ".join(str(member.rank) for member in decision.members)
            log.info("after step %d: ranks %s go on together", step, names)
            decision = self.membership.decision
            if verdict.joiners:
                decision = self.membership.admit(verdict.joiners)
        raise RuntimeError(f"after step {step}: handing over the weights failed {ATTEMPTS} times")

    def _hand_over(self, decision: Decision, wanted: bool, step: int) -> Any:
        """Send the source's state to all; what this worker received if `wanted`, else None.

        A broadcast, as sends between two ranks do not obey a timeout that was set later.
        """
        source, data = decision.members.index(decision.source), torch.empty(0, dtype=torch.uint8)
        sends = decision.source == self.board.me
        if sends:
            buffer = io.BytesIO()
            torch.save({"step": step, "worker": self.worker.state()}, buffer)
            data = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
        length = torch.tensor([len(data)])
        self.comm.broadcast(length, source, "rejoin")
        size = int(length)
        if not sends:
            data = torch.empty(size if wanted else min(size, CHUNK_BYTES), dtype=torch.uint8)
        for start in range(0, size, CHUNK_BYTES):
            offset = start if sends or wanted else 0
            part = data[offset : offset + min(CHUNK_BYTES, size - start)]
            self.comm.broadcast(part, source, "rejoin")
            self.board.beat()
        if not wanted:
            return None
        file = io.BytesIO(data.numpy().tobytes())
        return torch.load(file, map_location=self.comm.device, weights_only=True)

    def _try(self, step: int, decision: Decision, work: Callable[[], Any]) -> tuple[bool, Any]:
        """Whether `work` succeeded in the group of the members, and its result."""
        try:
            self._assemble(decision.members)
            return True, work()
        except NonFiniteError:
            raise
        except RuntimeError as error:  # of gloo or the store; a bug of ours fails every time
            if len(decision.members) == 1:
                raise
            log.warning("step %d: an exchange failed: %s", step, one_line(error))
            return False, None

    def _assemble(self, members: list[Member]) -> None:
        """Make `comm` speak to `members`, unless it does."""
        if members == self._group:
            return
        self._disband()
        if len(members) > 1:
            if not self.membership.stand_by():
                raise RuntimeError("a member was lost before they had connected")
            store = PrefixStore(f"group/{self.membership.decision.number}", self.board.store)
            _start_group(store, members.index(self.board.me), len(members), self.board.timeout_s)
            self._speak_to(dist.group.WORLD)
        self._group = members
        self.worker.regroup()

    def _disband(self) -> None:
        """Close the connections, which tells members that still wait for this one. It takes the
        last reference to the group: a worker that keeps one makes them wait for the timeout."""
        self._group = []
        self._speak_to(None)
        if dist.is_initialized():
            dist.destroy_process_group()

    def _speak_to(self, group: dist.ProcessGroup | None) -> None:
        fresh = Comm(group, self.comm.device)
        self.comm.group, self.comm.backend = group, fresh.backend
        self.comm.rank, self.comm.world_size = fresh.rank, fresh.world_size


def _start_group(store: Store, rank: int, world_size: int, timeout_s: float) -> None:
    """Make the process's group, or raise RuntimeError as if it had not been tried.

    gloo waits five timeouts for a peer that dies while they connect; so connecting has a shorter
    one. All are known to be there.

    torch counts groups, also one that could not be made, and ranks with different counts do not
    find each other. Destroying a group, if only one of this rank alone, sets the count back.
    """
    connecting = timedelta(seconds=min(timeout_s, CONNECT_S))
    try:
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=connecting
        )
        assert dist.group.WORLD is not None
        dist.group.WORLD.set_timeout(timedelta(seconds=timeout_s))
    except RuntimeError:
        alone = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=alone, rank=0, world_size=1)
        dist.destroy_process_group()
        raise
