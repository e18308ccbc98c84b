"""How many bytes were moved, by tag. Exact integers: counted or computed, never estimated.

Payload is what an algorithm hands over: the (encoded) bytes of one rank's buffer, counted once per
all-reduce or once per reduce-scatter plus all-gather. Wire is what one rank sends under the model
of the `*_wire_bytes` functions (rings for collectives); gloo's small messages go other ways, but
the bytes of a model can be compared between machines. Headers are in neither.

A world of one sends nothing: its wire bytes are 0, its payload is what a larger world would count.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

CONTROL = "control"
"""Tag of what steers a run rather than trains it (pickled objects, barriers, stop flags). Metered,
but kept out of the totals: its size depends on pickles and on how often a run was resumed, and the
totals must repeat."""


def reduce_scatter_wire_bytes(size: int, world_size: int) -> int:
    """Ring: M-1 rounds, each sends one of the M parts of a buffer of `size` bytes."""
    return (world_size - 1) * -(-size // world_size)


def all_gather_wire_bytes(size: int, world_size: int) -> int:
    """Ring: M-1 rounds, each passes on one rank's buffer of `size` bytes."""
    return (world_size - 1) * size


def all_reduce_wire_bytes(size: int, world_size: int) -> int:
    """Ring: a reduce-scatter of `size` bytes, then an all-gather of its parts."""
    return 2 * reduce_scatter_wire_bytes(size, world_size)


def broadcast_wire_bytes(size: int, world_size: int, rank: int, src: int) -> int:
    """Chain that starts at `src` and goes up the ranks: all but its last rank send `size` bytes."""
    return 0 if (rank - src) % world_size == world_size - 1 else size


@dataclass
class Counter:
    """What this rank has moved under one tag."""

    payload_bytes: int = 0
    wire_bytes: int = 0
    calls: int = 0


class Meter:
    """The counters of one rank."""

    def __init__(self) -> None:
        self.counters: dict[str, Counter] = {}

    @property
    def payload_bytes(self) -> int:
        """Of all tags but `control`."""
        return sum(c.payload_bytes for tag, c in self.counters.items() if tag != CONTROL)

    @property
    def wire_bytes(self) -> int:
        """Of all tags but `control`."""
        return sum(c.wire_bytes for tag, c in self.counters.items() if tag != CONTROL)

    def metrics(self) -> dict[str, int]:
        """Both totals and each tag's payload, under their metric names."""
        totals = {"comm/payload_bytes": self.payload_bytes, "comm/wire_bytes": self.wire_bytes}
        tags = {f"comm/{tag}/payload_bytes": c.payload_bytes for tag, c in self.counters.items()}
        return totals | tags

    def state_dict(self) -> dict[str, dict[str, int]]:
        """The counters as plain ints; belongs into a checkpoint, so that a resumed run goes on."""
        return {tag: asdict(counter) for tag, counter in self.counters.items()}

    def load_state_dict(self, state: dict[str, dict[str, int]]) -> None:
        self.counters = {tag: Counter(**values) for tag, values in state.items()}

    def add(self, other: Meter) -> None:
        """Count here too what `other` has counted."""
        for tag, counter in other.counters.items():
            self._count(tag, counter.payload_bytes, counter.wire_bytes)
            self.counters[tag].calls += counter.calls - 1

    def _count(self, tag: str, payload_bytes: int, wire_bytes: int) -> None:
        counter = self.counters.setdefault(tag, Counter())
        counter.payload_bytes += payload_bytes
        counter.wire_bytes += wire_bytes
        counter.calls += 1
