"""Networks of namespaces: they limit, they count what `Comm` counts, and they leave nothing."""

import contextlib
import errno
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.multiprocessing import ProcessRaisedException

from algorithms.common.errors import InputError
from benchmarks import netns
from benchmarks.netns import BURST_BYTES, FRAME_BYTES, SEGMENT_BYTES, Network
from benchmarks.ring_model import MESSAGE_BYTES
from tasks.paths import PROJECT
from tests.benchmarks import exchanges
from tests.privileges import needs_root

SMALL, LARGE = [64, 1024, 8192], 480_000
MESSAGES: dict[str, Callable[[int], int]] = {
    "all_reduce": lambda ranks: 4 * (ranks - 1),  # a ring there and one back, each part in halves
    "all_gather": lambda ranks: ranks - 1,
    "send_recv": lambda ranks: 1,
    "all_to_all": lambda ranks: ranks - 1,
}
"""What a rank sends in one call; a broadcast sends one message over each edge of its tree."""

FRAME, HEADER = 66, 48
"""Of TCP, IP and Ethernet; of gloo, which sends three for a message: both sides announce it."""

LOST = "Connection (closed|reset) by|Broken pipe"
"""What gloo says of a neighbour that has ended."""

OWNER = """
import sys
from pathlib import Path
from benchmarks.netns import Network
from tests.benchmarks.exchanges import wait_for_the_end

if __name__ == "__main__":
    with Network(2, mbit=100) as network:
        print(*network.inodes(), flush=True)
        network.run(wait_for_the_end, Path(sys.argv[1]))
"""


@needs_root
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_counted_is_what_the_interfaces_send(ranks: int) -> None:
    with Network(ranks, mbit=1000) as network:
        results = network.run(exchanges.all_exchanges, [*SMALL, LARGE])
    for (kind, size), first in results[0].items():
        everyone = [result[kind, size] for result in results]
        counted = sum(each.counted for each in everyone)
        assert counted > 0
        if kind == "broadcast":
            # gloo's tree and our chain send as much in all, but not from the same ranks.
            messages = ranks - 1
            sent = [(sum(each.sent for each in everyone), counted)]
        else:
            messages = ranks * MESSAGES[kind](ranks)
            sent = [(each.sent, each.counted) for each in everyone]
            assert first.counted == counted / ranks
        if size == LARGE:
            for found, expected in sent:
                assert found == pytest.approx(expected, rel=0.05), (kind, size)
                assert found > expected, "headers must be in it"
        else:
            total = sum(found for found, _ in sent)
            assert total == pytest.approx(counted + MESSAGE_BYTES * messages, rel=0.15), (
                kind,
                size,
            )
            # Three frames, and hardly more than two bare acknowledgements for each message.
            least = 3 * (FRAME + HEADER)
            assert least <= (total - counted) / messages < least + 3 * FRAME, (kind, size)


@needs_root
@pytest.mark.slow
def test_wires_keep_their_rate_in_both_directions() -> None:
    size, mbit = 1_000_000, 10  # slow, so that the wire and not a busy machine sets the time
    with Network(2, mbit) as network:
        by_rank = network.run(exchanges.seconds_of, "send_recv", size)
    at_full_rate = 8 * FRAME_BYTES / SEGMENT_BYTES / (mbit * 1e6)
    seconds = [max(both) for both in zip(*by_rank, strict=True)]
    assert min(seconds) >= (size - 2 * BURST_BYTES) * at_full_rate  # two buckets on the way
    assert min(seconds) < 1.5 * size * at_full_rate


@needs_root
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "all_to_all"])
def test_collectives_fill_their_wires(kind: str, ranks: int) -> None:
    """In both directions all the time, and no two ranks send to one."""
    mbit = 2  # slow, so that the wire and not a busy machine sets the time
    with Network(ranks, mbit) as network:
        by_rank = network.run(exchanges.seconds_of, kind, 120_000)
        (wire_bytes,) = set(network.run(exchanges.wire_bytes_of, kind, 120_000))
    at_full_rate = 8 * FRAME_BYTES / SEGMENT_BYTES / (mbit * 1e6)
    seconds = [max(everyone) for everyone in zip(*by_rank, strict=True)]
    assert statistics.median(seconds) < 1.2 * wire_bytes * at_full_rate


@needs_root
def test_the_kernel_takes_a_network_down_with_its_descriptors() -> None:
    own = os.stat("/proc/self/ns/net").st_ino
    with Network(3, mbit=10) as network:
        inodes = network.inodes()
        assert len(set(inodes)) == 4 and own not in inodes
        assert holders(inodes) == {os.getpid()}
        assert os.stat("/proc/self/ns/net").st_ino == own
    assert holders(inodes) == set()


@needs_root
def test_two_networks_do_not_meet() -> None:
    with Network(2, mbit=10) as one, Network(2, mbit=10) as other:
        assert not set(one.inodes()) & set(other.inodes())


@needs_root
@pytest.mark.slow
def test_nothing_outlives_a_killed_owner(tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    environment = os.environ | {"PYTHONPATH": str(PROJECT)}
    command = [sys.executable, str(script), str(tmp_path)]
    owner = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    try:
        inodes = [int(word) for word in owner.stdout.readline().split()]
        marks = [tmp_path / f"rank_{rank}" for rank in range(2)]
        eventually(lambda: all(mark.exists() and mark.read_text() for mark in marks), 120)
        ranks = {int(mark.read_text()) for mark in marks}
        assert ranks <= holders(inodes)
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    eventually(lambda: holders(inodes) == set(), 10)


@needs_root
@pytest.mark.slow
def test_a_rank_that_fails_ends_the_others() -> None:
    with Network(2, mbit=100) as network:
        inodes = network.inodes()
        # Rank 0 may be the first to be heard: it loses its connection to rank 1.
        with pytest.raises(ProcessRaisedException, match=f"has had enough|{LOST}"):
            network.run(exchanges.fail_on_rank_1)
        assert holders(inodes) == {os.getpid()}


def test_without_root_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(InputError, match="^network namespaces need root$"), Network(2, mbit=10):
        pass


def test_a_program_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda tool: None if tool == "tc" else tool)
    with pytest.raises(InputError, match="need the program tc"), Network(2, mbit=10):
        pass


def test_a_kernel_that_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, *args: int) -> None:
        raise OSError(errno.EPERM, "Operation not permitted", name)

    monkeypatch.setattr(netns, "require_tools", lambda: None)
    monkeypatch.setattr(netns, "_call", refuse)
    with pytest.raises(InputError, match="can be made: Operation not permitted"):
        Network(2, mbit=10).__enter__()


@needs_root
def test_a_rate_that_tc_refuses_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(InputError, match="^tc cannot make the network: "), Network(2, mbit=0):
        pass
    assert len(os.listdir("/proc/self/fd")) == before


def holders(inodes: list[int]) -> set[int]:
    """Processes that keep one of these namespaces alive, by being in it or by a descriptor. None
    is mounted anywhere, so without holders the kernel has none of them."""
    names = {f"net:[{inode}]" for inode in inodes}
    found = set()
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            links = [process / "ns" / "net"]
            with contextlib.suppress(OSError):  # it ended meanwhile
                links += (process / "fd").iterdir()
            for link in links:
                with contextlib.suppress(OSError):  # it was closed meanwhile
                    if os.readlink(link) in names:
                        found.add(int(process.name))
    mounts = Path("/proc/self/mountinfo").read_text()
    assert not any(f"net:[{inode}]" in mounts for inode in inodes)
    return found


def eventually(condition: Callable[[], bool], timeout_s: float) -> None:
    give_up = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up, "did not come true"
        time.sleep(0.05)
