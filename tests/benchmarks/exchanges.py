"""What ranks on a `Network` do in tests. A module of its own: their processes import it by name."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from algorithms.common.comm import Comm
from benchmarks.netns import Port


@dataclass
class Traffic:
    """Of one kind of call on one rank, per call."""

    counted: float
    """Wire bytes by `Comm`."""
    sent: float
    """Bytes by the interface."""


def all_exchanges(port: Port, sizes: list[int]) -> dict[tuple[str, int], Traffic]:
    """Traffic of every kind of call for buffers of `sizes` bytes."""
    return {
        (kind, size): measured(port, call)
        for size in sizes
        for kind, call in calls(port.comm, size).items()
    }


def calls(comm: Comm, size: int) -> dict[str, Callable[[], object]]:
    """Every kind of call with a buffer of `size` bytes, a multiple of 16."""
    buffer, other = torch.ones(size // 4), torch.ones(size // 4)
    following, preceding = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size

    def send_recv() -> None:
        # gloo says on the same wire that a buffer waits: after our own message, the other side
        # would begin when we end.
        coming = comm.irecv(other, preceding, "test")
        going = comm.isend(buffer, following, "test")
        coming.wait()
        going.wait()

    return {
        "all_reduce": lambda: comm.all_reduce(buffer, "test"),
        "all_gather": lambda: comm.all_gather(buffer, "test"),
        "broadcast": lambda: comm.broadcast(buffer, 0, "test"),
        "send_recv": send_recv,
        "all_to_all": lambda: comm.all_to_all(other, buffer, "test"),
    }


def measured(port: Port, call: Callable[[], object], repetitions: int = 3) -> Traffic:
    """One call is made beforehand: connections are learned, buffers are there. The least of three
    goes: on a busy machine TCP may think that a packet was lost, and send it again."""
    call()
    counted, sent = [port.comm.wire_bytes], [port.sent_bytes()]
    for _ in range(3):
        for _ in range(repetitions):
            call()
        counted.append(port.comm.wire_bytes)
        sent.append(port.sent_bytes())
    least = min(after - before for before, after in pairwise(sent))
    return Traffic((counted[-1] - counted[0]) / (3 * repetitions), least / repetitions)


def seconds_of(port: Port, kind: str, size: int) -> list[float]:
    """Five calls of one kind, with all ranks at once."""
    call = calls(port.comm, size)[kind]
    seconds = []
    for _ in range(5):
        port.meet()
        begun = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begun)
    return seconds


def wire_bytes_of(port: Port, kind: str, size: int) -> int:
    """What a call is counted as."""
    before = port.comm.wire_bytes
    calls(port.comm, size)[kind]()
    return port.comm.wire_bytes - before


def fail_on_rank_1(port: Port) -> None:
    """The others wait for a message that never comes."""
    if port.comm.rank == 1:
        raise RuntimeError("rank 1 has had enough")
    port.comm.recv(torch.ones(1), 1, "test")


def wait_for_the_end(port: Port, folder: Path) -> None:
    """Say that this rank is there, then hang as a collective does whose peer is gone."""
    (folder / f"rank_{port.comm.rank}").write_text(str(os.getpid()))
    port.comm.recv(torch.ones(1), (port.comm.rank + 1) % port.comm.world_size, "test")
