"""Ranks with a network each, on a switch whose wires have a rate: a cluster on one machine.

Every rank is a process in a network namespace of its own with one interface, `wire0`. Its other
end is a port of a bridge in one more namespace. Both ends are token buckets (tc-tbf), so each rank
sends and receives at most `mbit`. Latency is the kernel's, some 0.1 ms; it cannot be set.

The namespaces have no names: they live as long as a descriptor of this process or a rank's process.
So whatever ends the owner, kill -9 included, ends the ranks, and the kernel takes the network down;
nothing is ever left for a next start. Needs root on Linux, and iproute2.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from threading import Barrier
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from algorithms.common.comm import Comm
from algorithms.common.errors import InputError, one_line
from tasks.prctl import die_with_parent

INTERFACE = "wire0"
MTU = 1500
FRAME_BYTES = MTU + 14
"""What the limiter charges for a full packet: Ethernet's header is in it, its checksum is not."""
SEGMENT_BYTES = MTU - 20 - 20 - 12
"""Of these, what TCP carries: the headers of IP and TCP and its timestamps are off."""
BURST_BYTES = 16 * 1024
"""What passes unlimited after a pause. A wire has no such thing, so it is small against a buffer: a
bucket of 256 kB halves the time of a message of 480 kB. Less would make the timer the limit."""
GSO_BYTES = 16_000
"""Largest bundle of packets that the kernel hands on as one. It fits the bucket, so the limiter
does not cut it up; interface counters see one header per bundle."""
QUIET_S = 0.1
"""An interface that has sent nothing for so long is done; delayed acknowledgements take 0.04 s."""
CLONE_NEWNET = 0x40000000


class Port:
    """A rank's view of its network."""

    def __init__(self, comm: Comm, meeting: Barrier) -> None:
        self.comm = comm
        self._meeting = meeting

    def meet(self) -> None:
        """Wait for all ranks without a byte on the wire."""
        self._meeting.wait()

    def sent_bytes(self) -> int:
        """What this rank has sent since its interface came up, frames as the kernel counts them.

        Waits until every rank's interface is quiet; all ranks call it together.
        """
        self._wait_until_quiet()
        self.meet()
        self._wait_until_quiet()  # what the others sent last has been acknowledged since
        sent = _counted_bytes()
        self.meet()
        return sent

    def _wait_until_quiet(self) -> None:
        before = -1
        while before != (before := _counted_bytes()):
            time.sleep(QUIET_S)


class Network:
    """`ranks` namespaces on one switch, each wire of `mbit` megabits (1e6) per second both ways.

    A context manager, to be used from a main thread. Raises `InputError` where there is no root or
    no iproute2, or where the kernel refuses.
    """

    def __init__(self, ranks: int, mbit: float) -> None:
        self.ranks = ranks
        self.mbit = mbit
        self._namespaces: list[int] = []  # descriptors; the last one is the switch

    def __enter__(self) -> Network:
        require_tools()
        try:
            for _ in range(self.ranks + 1):
                self._namespaces.append(_new_namespace())
            self._connect()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def inodes(self) -> list[int]:
        """Of the namespaces: what /proc and lsns call them."""
        return [os.fstat(descriptor).st_ino for descriptor in self._namespaces]

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Results of `function(port, *args)` by rank, each in a new process of one thread.

        `function` is at the top level of a module; results can be pickled. A rank that fails ends
        the others, and raises `torch.multiprocessing.ProcessRaisedException` with its traceback.
        """
        meeting = get_context("spawn").Barrier(self.ranks)
        store, *results = files = [os.memfd_create("netns") for _ in range(self.ranks + 1)]
        try:
            places = [
                _Place(os.getpid(), namespace, store, result)
                for namespace, result in zip(self._namespaces, results, strict=False)
            ]
            spawn(_rank, (places, meeting, function, args), nprocs=self.ranks, daemon=True)  # type: ignore[no-untyped-call]
            return [pickle.loads(Path(f"/proc/self/fd/{each}").read_bytes()) for each in results]
        finally:
            for each in files:
                os.close(each)

    def _connect(self) -> None:
        switch = self._namespaces[-1]
        ports = [f"port{rank}" for rank in range(self.ranks)]
        commands = ["link add switch type bridge stp_state 0 mcast_snooping 0"]
        commands += ["link set switch addrgenmode none up"]  # no IPv6, or it would chatter
        for port, namespace in zip(ports, self._namespaces, strict=False):
            ours = f"name {port} mtu {MTU} gso_max_size {GSO_BYTES}"
            theirs = f"name {INTERFACE} mtu {MTU} gso_max_size {GSO_BYTES}"
            place = f"netns /proc/self/fd/{namespace}"
            commands += [f"link add {ours} type veth peer {theirs} {place}"]
            commands += [f"link set {port} addrgenmode none master switch up"]
        self._in(switch, "ip", commands)
        bucket = f"tbf rate {round(self.mbit * 1e6)}bit burst {BURST_BYTES} limit 4mb"
        self._in(switch, "tc", [f"qdisc add dev {port} root {bucket}" for port in ports])
        for rank, namespace in enumerate(self._namespaces[:-1]):
            commands = ["link set lo up", f"link set {INTERFACE} addrgenmode none up"]
            commands += [f"address add 10.77.0.{rank + 1}/24 dev {INTERFACE}"]
            self._in(namespace, "ip", commands)
            self._in(namespace, "tc", [f"qdisc add dev {INTERFACE} root {bucket}"])

    def _in(self, namespace: int, tool: str, commands: list[str]) -> None:
        """Have ip or tc do all `commands` in a namespace."""
        done = subprocess.run(
            ["nsenter", f"--net=/proc/self/fd/{namespace}", tool, "-batch", "-"],
            input="\n".join(commands) + "\n",
            pass_fds=self._namespaces,
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            raise InputError(f"{tool} cannot make the network: {one_line(done.stderr)}")

    def _close(self) -> None:
        while self._namespaces:
            os.close(self._namespaces.pop())


@dataclass(frozen=True)
class _Place:
    """Where a rank belongs: descriptors of its owner. Nothing lies on a disk to be left there."""

    owner: int
    namespace: int
    store: int
    result: int

    def path(self, descriptor: int) -> str:
        return f"/proc/{self.owner}/fd/{descriptor}"


def require_tools() -> None:
    """Raise `InputError` where a `Network` cannot be made."""
    if os.geteuid() != 0:
        raise InputError("network namespaces need root")
    for tool in ("ip", "tc", "nsenter"):
        if shutil.which(tool) is None:
            raise InputError(f"network namespaces need the program {tool}; iproute2 has ip and tc")


def _new_namespace() -> int:
    """A descriptor that holds a new network namespace; this process stays in its own."""
    answers: list[int | OSError] = []

    def ask() -> None:
        try:
            _call("unshare", CLONE_NEWNET)  # moves the calling thread only
            answers.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            answers.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    (answer,) = answers
    if isinstance(answer, OSError):
        raise InputError(f"no network namespace can be made: {answer.strerror}")
    return answer


def _call(name: str, *args: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*args) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)


def _counted_bytes() -> int:
    """What the interface of this process's namespace has sent; a bundle counts one header."""
    for line in Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counters.split()[8])
    raise RuntimeError(f"no interface {INTERFACE} here")


def _rank(
    rank: int,
    places: list[_Place],
    meeting: Barrier,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    place = places[rank]
    die_with_parent(place.owner)
    descriptor = os.open(place.path(place.namespace), os.O_RDONLY)
    _call("setns", descriptor, CLONE_NEWNET)  # of this thread, and of all that it will start
    os.close(descriptor)
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    torch.set_num_threads(1)
    store = f"file://{place.path(place.store)}"  # ranks find each other without a byte on the wire
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=len(places))
    port = Port(Comm(dist.group.WORLD, torch.device("cpu")), meeting)
    result = function(port, *args)  # where it raises, the group dies with this process, not before
    dist.destroy_process_group()
    Path(place.path(place.result)).write_bytes(pickle.dumps(result))
