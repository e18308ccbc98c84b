"""Signs of life that workers post for each other on a `torch.distributed.Store`.

Each rank has one entry, which it alone writes, so entries need no locks, and one request reads them
all. A process that takes over a rank, or comes back after the others left it out, begins a new
*life*: its old self is then gone for good, without any waiting. A process that is dead or stalled
and does not come back is known by its silence. One that is slow is neither: it *beats* while it
computes, and as long as its entry changes it is waited for. Nobody compares clocks of two machines.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from algorithms.common.errors import InputError

FIRST_PAUSE_S, LAST_PAUSE_S = 0.001, 0.02
"""Between two looks at the board: as short as the wait is young."""
BEATS_PER_TIMEOUT = 10


class Member(NamedTuple):
    """One life of a rank. Life 0 stands for whichever it has."""

    rank: int
    life: int


class Entry(NamedTuple):
    """What a rank says of itself. Numbers are those of decisions or steps; -1: none yet."""

    life: int = 0
    """0: the rank has not started."""
    beat: int = 0
    here: int = -1
    """It has come to this one."""
    ready: int = -1
    """It is about to connect to the members of this one."""
    done: int = -1
    """It is through with this one's exchange."""
    wish: int = -1
    """It wants to be let in, and this is the newest one that it has seen."""
    stop: bool = False
    """It was asked to stop."""


class Board:
    """The entries of `world_size` ranks; this process is `rank`.

    Every request to `store` may raise what the store raises when its host is gone.
    """

    def __init__(self, store: Store, *, rank: int, world_size: int, timeout_s: float) -> None:
        self.store = store
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._keys = [f"rank/{each}" for each in range(world_size)]
        self._entry = Entry()
        self._next_beat = 0.0
        for key in self._keys:
            store.compare_set(key, "", json.dumps(Entry()))  # or reading would block

    @property
    def me(self) -> Member:
        """This rank in its present life."""
        return Member(self.rank, self._entry.life)

    def begin_life(self) -> None:
        """Post an empty entry under a new life."""
        self._entry = Entry(life=self.store.add(f"lives/{self.rank}", 1))
        self._post()

    def come(self, number: int, stop: bool = False) -> None:
        """Post that this worker has come to `number`, and whether it was asked to stop."""
        self._entry = self._entry._replace(here=number, wish=-1, stop=stop)
        self._post()

    def stand_by(self, number: int) -> None:
        """Post that this worker is about to connect to the members of `number`."""
        self._entry = self._entry._replace(ready=number)
        self._post()

    def finish(self, number: int) -> None:
        """Post that this worker is through with the exchange of `number`."""
        self._entry = self._entry._replace(done=number)
        self._post()

    def wish(self, number: int) -> None:
        """Post that this worker, which knows of decision `number`, wants to be let in."""
        if self._entry.wish != number:
            self._entry = self._entry._replace(wish=number)
            self._post()

    def beat(self) -> None:
        """Show that this worker makes progress; cheap enough for every step."""
        if time.monotonic() >= self._next_beat:
            self._entry = self._entry._replace(beat=self._entry.beat + 1)
            self._post()

    def read(self) -> list[Entry]:
        """All entries by rank."""
        return [Entry(*json.loads(text)) for text in self.store.multi_get(self._keys)]

    def wait(
        self,
        members: Iterable[Member],
        ready: Callable[[Entry], bool],
        until: Callable[[], bool] = lambda: False,
        silence_s: float | None = None,
    ) -> list[Entry]:
        """The entries as soon as each of `members` is `ready`, gone, or silent for `silence_s`
        (None: `timeout_s`), or once `until` is true."""
        limit = self.timeout_s if silence_s is None else silence_s
        members, heard = list(members), dict[Member, tuple[Entry, float]]()
        pause = FIRST_PAUSE_S
        while True:
            entries, now = self.read(), time.monotonic()
            waiting = False
            for member in members:
                entry = entries[member.rank]
                if member not in heard or heard[member][0] != entry:
                    heard[member] = entry, now
                silent = now - heard[member][1] > limit
                waiting |= not (gone(member, entries) or ready(entry) or silent)
            if not waiting or until():
                return entries
            time.sleep(pause)
            pause = min(1.5 * pause, LAST_PAUSE_S)

    def _post(self) -> None:
        self.store.set(self._keys[self.rank], json.dumps(self._entry))
        self._next_beat = time.monotonic() + self.timeout_s / BEATS_PER_TIMEOUT


def gone(member: Member, entries: list[Entry]) -> bool:
    """Whether that rank has begun another life."""
    return member.life not in (0, entries[member.rank].life)


def those(
    members: Iterable[Member], ready: Callable[[Entry], bool], entries: list[Entry]
) -> list[Member]:
    """Which of `members` are `ready` and not gone, by rank, each with the life it has."""
    return [
        Member(m.rank, entries[m.rank].life)
        for m in sorted(members)
        if not gone(m, entries) and ready(entries[m.rank])
    ]


def connect(timeout_s: float, *, elastic: bool) -> Store:
    """The store that torchrun's environment names, under a prefix of this start of the workers;
    one in memory for a process that torchrun did not start.

    torchrun's agent hosts it, so that it outlives every rank, unless told otherwise: then rank 0
    does once it has a process group, and `elastic` raises `InputError`.
    """
    if "RANK" not in os.environ:
        return dist.HashStore()  # type: ignore[attr-defined]
    if elastic and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise InputError(
            "sync.elastic: needs a store that outlives every rank, but torchrun's agent hosts none;"
            " is TORCH_DISABLE_SHARE_RDZV_TCP_STORE set?"
        )
    store = dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=max(timeout_s, 60.0)),
    )
    return PrefixStore(f"board/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
