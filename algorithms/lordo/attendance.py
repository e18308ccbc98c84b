"""Exchanges of a fixed set of ranks: bounded waits, and an error that says who is missing.

A collective that one rank never enters ends, if at all, with an error about a socket, in NCCL with
an abort. So each rank posts that it has come before it exchanges and waits until all have. If the
exchange fails all the same, those who neither finished nor failed died or stalled in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from algorithms.common.comm import Comm
from algorithms.common.errors import MissingRanks, NonFiniteError, one_line
from algorithms.common.loop import Guard, unguarded
from algorithms.lordo.board import Board, Entry, Member, connect, those

T = TypeVar("T")

GRACE_S = 2.0
"""For the others to notice a failure too."""


class Attendance:
    """Calls exchanges of all ranks; one per process, made by all of them.

    A rank is missing when it is silent for the board's timeout. The collectives inside an exchange
    are bounded by their group's timeout.
    """

    def __init__(self, board: Board) -> None:
        self.board = board
        self._number = 0
        board.begin_life()

    def exchange(self, step: int, work: Callable[[], T]) -> T:
        """The result of `work`, the collectives of `step`, once all ranks have come.

        Raises `MissingRanks`, in place of what `work` raises when a collective fails for want of a
        rank; when none is missing, what `work` raises.
        """
        board = self.board
        self._number = number = self._number + 1
        board.come(number)
        if missing := self._missing(lambda entry: entry.here >= number, board.timeout_s):
            raise MissingRanks(
                f"step {step}: {missing} did not come to the exchange within {board.timeout_s:g} s"
            )
        try:
            result = work()
        except NonFiniteError:
            raise
        except RuntimeError as error:
            board.finish(number)
            missing = self._missing(lambda entry: entry.done >= number, GRACE_S)
            if not missing:
                raise
            raise MissingRanks(
                f"step {step}: the exchange failed, {missing} died or stalled in it:"
                f" {one_line(error)}"
            ) from error
        board.finish(number)
        return result

    def _missing(self, ready: Callable[[Entry], bool], silence_s: float) -> str:
        """Which ranks are not `ready` and silent; empty if all are."""
        everyone = [Member(rank, 0) for rank in range(self.board.world_size)]
        entries = self.board.wait(everyone, ready, silence_s=silence_s)
        present = {member.rank for member in those(everyone, ready, entries)}
        absent = [str(rank) for rank in range(self.board.world_size) if rank not in present]
        return f"rank{'s' if len(absent) > 1 else ''} {', '.join(absent)}" if absent else ""


def guard(comm: Comm, timeout_s: float) -> Guard:
    """The `exchange` of the ranks that torchrun started; a world of one needs none."""
    if comm.world_size == 1:
        return unguarded
    store = connect(timeout_s, elastic=False)
    board = Board(store, rank=comm.rank, world_size=comm.world_size, timeout_s=timeout_s)
    return Attendance(board).exchange
