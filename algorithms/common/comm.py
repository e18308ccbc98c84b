"""Every collective and point-to-point call of ours goes through a `Comm`, which meters it by tag.

Backends: gloo (CPU; CUDA tensors are staged through pinned host memory, since gloo has no CUDA
point-to-point) and NCCL (CUDA). The one that was asked for is used or an error is raised.

Not `from __future__ import annotations`: DDP compares the annotations of its hook as objects.
"""

import os
import pickle
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from algorithms.common.errors import InputError
from algorithms.common.meter import (
    CONTROL,
    Meter,
    all_gather_wire_bytes,
    all_reduce_wire_bytes,
    broadcast_wire_bytes,
    reduce_scatter_wire_bytes,
)

Op = Literal["sum", "mean", "max"]
# A mean is a sum divided afterwards: gloo has no AVG, and both backends should round alike.
_OPS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}

_COLLECTIVE = 1
"""gloo's tag of the messages of a collective, so that they match none of `isend`, whose is 0."""

Hook = Callable[[object, Any], torch.futures.Future[Tensor]]


def opponents(rank: int, size: int) -> list[int]:
    """All other ranks, in turns in which the ranks form pairs: a round robin by the circle method.
    Of an odd number one has nothing to do in a turn, so that turns of different ranks shift."""
    turns = size - 1 + size % 2
    found = []
    for turn in range(turns):
        if rank == turns:  # the last of an even number: whoever would meet itself
            peer = next(each for each in range(turns) if (2 * each - turn) % turns == 0)
        else:
            peer = (turn - rank) % turns
            peer = turns if peer == rank else peer
        if peer < size:
            found.append(peer)
    return found


class Transfer:
    """A transfer under way. Neither read nor write its tensor before `wait` has returned."""

    def __init__(
        self,
        tensor: Tensor,
        work: dist.Work | None = None,
        wire: Tensor | None = None,
        finish: Callable[[], object] | None = None,
    ) -> None:
        self._tensor = tensor
        self._work = work
        self._wire = wire  # what the backend reads or writes; must live as long as the work
        self._finish = finish

    def wait(self) -> Tensor:
        """Block until the transfer is over (NCCL: make the current stream wait for it)."""
        if self._work is not None:
            self._work.wait()
            if self._finish is not None:
                self._finish()
            self._work = self._wire = self._finish = None
        return self._tensor


class Comm(Meter):
    """Metered communication inside `group`; ranks and peers are ranks of the group.

    `group` None is a world of one without any process group. All ranks of the group make the same
    collective calls in the same order with equal shapes and dtypes. Results never carry gradients.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        super().__init__()
        self.group = group
        self.device = device
        self.rank: int = 0 if group is None else dist.get_rank(group)
        self.world_size: int = 1 if group is None else dist.get_world_size(group)
        self.backend: str = "none" if group is None else dist.get_backend(group)

    # Collectives

    def all_reduce(
        self, tensor: Tensor, tag: str, op: Op = "sum", async_op: bool = False
    ) -> Transfer:
        """Reduce `tensor` over the ranks, in place; with `async_op` it holds the result after
        `wait`. Every rank ends with the same bits."""
        tensor = tensor.detach()
        size = tensor.nbytes
        self._count(tag, size, all_reduce_wire_bytes(size, self.world_size))
        if self._trivial(tensor):
            return Transfer(tensor)
        wire = self._staged(tensor)
        work = dist.all_reduce(wire, op=_OPS[op], group=self.group, async_op=True)

        def finish() -> None:
            if op == "mean":
                wire.div_(self.world_size)
            if wire is not tensor:
                tensor.copy_(wire)

        transfer = Transfer(tensor, work, wire, finish)
        if not async_op:
            transfer.wait()
        return transfer

    def reduce_scatter(self, output: Tensor, input: Tensor, tag: str, op: Op = "sum") -> None:
        """Reduce `input` [M * n, ...] over the ranks; rank r keeps its part r in `output` [n, ...].

        Counts as payload what does not stay here, so that with the all-gather of the parts the
        buffer is counted once.
        """
        output, input = output.detach(), input.detach()
        wire_bytes = reduce_scatter_wire_bytes(input.nbytes, self.world_size)
        self._count(tag, input.nbytes - output.nbytes, wire_bytes)
        if self._trivial(input):
            output.copy_(input)
            return
        wire = self._staged(output, fill=False)
        dist.reduce_scatter_single(wire, self._staged(input), op=_OPS[op], group=self.group)
        if op == "mean":
            wire.div_(self.world_size)
        if wire is not output:
            output.copy_(wire)

    def all_to_all(self, output: Tensor, input: Tensor, tag: str) -> None:
        """Send part j of `input` [M * n, ...] to rank j; part i of `output` (like `input`) comes
        from rank i.

        Counts like `reduce_scatter`, which this is with the sum left to the receiver.
        """
        output, input = output.detach(), input.detach()
        if len(input) % self.world_size:
            raise ValueError(f"{len(input)} rows cannot be cut into {self.world_size} equal parts")
        size = input.nbytes
        wire_bytes = reduce_scatter_wire_bytes(size, self.world_size)
        self._count(tag, size - size // self.world_size, wire_bytes)
        if self._trivial(input):
            output.copy_(input)
            return
        wire = self._staged(output, fill=False)
        coming, going = _as_bytes(wire), _as_bytes(self._staged(input))
        if self.backend == "gloo":
            self._exchange_in_pairs(coming.chunk(self.world_size), going.chunk(self.world_size))
        else:
            dist.all_to_all_single(coming, going, group=self.group)
        if wire is not output:
            output.copy_(wire)

    # gloo's own all-to-all and all-gather take up to twice as long on a thin network. It asks for a
    # message on the wire that carries data the other way, so we ask before we send; and where two
    # ranks send to one at a time, both are late, and so is who waits for them.

    def _exchange_in_pairs(self, coming: Sequence[Tensor], going: Sequence[Tensor]) -> None:
        """Over gloo: part j of `going` to rank j, and part i of `coming` from rank i. A rank asks
        for a part when that pair's turn has come, however late others are."""
        coming[self.rank].copy_(going[self.rank])
        for peer in opponents(self.rank, self.world_size):
            receive = self._receive(coming[peer], peer)
            send = self._send(going[peer], peer)
            receive.wait()
            send.wait()

    def _pass_round(self, parts: Sequence[Tensor]) -> None:
        """Over gloo: every rank sends what it has received to the next one, its own part first, so
        each wire has one sender. At first a rank has its own of `parts`, in the end all."""
        rank, size = self.rank, self.world_size
        before, after = (rank - 1) % size, (rank + 1) % size
        receives = [self._receive(parts[(rank - turn) % size], before) for turn in range(1, size)]
        sends = []
        for turn, receive in enumerate(receives):
            sends.append(self._send(parts[(rank - turn) % size], after))
            receive.wait()
        for send in sends:
            send.wait()

    def _send(self, part: Tensor, peer: int) -> Transfer:
        return Transfer(part, dist.isend(part, group=self.group, group_dst=peer, tag=_COLLECTIVE))

    def _receive(self, part: Tensor, peer: int) -> Transfer:
        return Transfer(part, dist.irecv(part, group=self.group, group_src=peer, tag=_COLLECTIVE))

    def all_gather_into(self, output: Tensor, input: Tensor, tag: str) -> None:
        """Concatenate every rank's `input` [n, ...] in rank order into `output` [M * n, ...]."""
        output.detach().copy_(torch.cat(self.all_gather(input, tag)))

    def all_gather(self, tensor: Tensor, tag: str) -> list[Tensor]:
        """Every rank's `tensor` in rank order, as new tensors."""
        tensor = tensor.detach()
        size = tensor.nbytes
        self._count(tag, size, all_gather_wire_bytes(size, self.world_size))
        if self._trivial(tensor):
            return [tensor.clone() for _ in range(self.world_size)]
        wire = _as_bytes(self._staged(tensor))
        parts = [torch.empty_like(wire) for _ in range(self.world_size)]
        if self.backend == "gloo":
            parts[self.rank].copy_(wire)
            self._pass_round(parts)
        else:
            dist.all_gather(parts, wire, group=self.group)
        return [part.view(tensor.dtype).view(tensor.shape).to(tensor.device) for part in parts]

    def broadcast(self, tensor: Tensor, src: int, tag: str) -> None:
        """Overwrite `tensor` with that of rank `src`."""
        tensor = tensor.detach()
        size = tensor.nbytes
        self._count(tag, size, broadcast_wire_bytes(size, self.world_size, self.rank, src))
        if self._trivial(tensor):
            return
        wire = self._staged(tensor)
        dist.broadcast(_as_bytes(wire), group=self.group, group_src=src)
        if wire is not tensor:
            tensor.copy_(wire)

    def ddp_hook(self, tag: str) -> Hook:
        """What DDP does without a hook (mean all-reduce of each bucket, bit for bit), metered.

        Use: `model.register_comm_hook(None, comm.ddp_hook("gradients"))`.
        """

        def hook(
            state: object,
            bucket: dist.GradBucket,  # type: ignore[name-defined]
        ) -> torch.futures.Future[torch.Tensor]:
            # DDP scales before it adds; a product with 1/M rounds otherwise than a quotient.
            buffer = bucket.buffer().mul_(1.0 / self.world_size)
            size = buffer.nbytes
            self._count(tag, size, all_reduce_wire_bytes(size, self.world_size))
            if self._trivial(buffer):
                done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
                done.set_result(buffer)
                return done
            work = dist.all_reduce(buffer, group=self.group, async_op=True)
            return work.get_future().then(lambda future: future.value()[0])  # type: ignore[no-any-return]

        return hook

    # Control plane

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """A copy of rank `src`'s picklable `obj`; what other ranks pass is ignored."""
        box = [pickle.dumps(obj)] if self.rank == src else [b""]
        if self.world_size > 1:
            dist.broadcast_object_list(box, group=self.group, group_src=src)
        size = len(box[0])
        self._count(CONTROL, size, broadcast_wire_bytes(size, self.world_size, self.rank, src))
        return pickle.loads(box[0])

    def gather_objects(self, obj: Any) -> list[Any] | None:
        """On rank 0 copies of every rank's picklable `obj` in rank order, elsewhere None."""
        data = pickle.dumps(obj)
        self._count(CONTROL, len(data), 0 if self.rank == 0 else len(data))
        box: list[Any] | None = [data] * self.world_size if self.rank == 0 else None
        if self.world_size > 1:
            dist.gather_object(data, box, group=self.group, group_dst=0)
        return None if box is None else [pickle.loads(each) for each in box]

    def barrier(self) -> None:
        """Wait for every rank."""
        self._count(CONTROL, 0, 0)
        if self.world_size > 1:
            dist.barrier(self.group)

    # Point to point: n bytes at the sender, 0 at the receiver. Messages between two ranks match in
    # the order in which they were posted, whatever their tags.

    def isend(self, tensor: Tensor, peer: int, tag: str) -> Transfer:
        """Start to send `tensor`. A CUDA tensor under gloo is on the host when this returns."""
        self._check_peer(peer)
        tensor = tensor.detach()
        self._count(tag, tensor.nbytes, tensor.nbytes)
        if self._trivial(tensor):
            return Transfer(tensor)
        wire = _as_bytes(self._staged(tensor))
        return Transfer(tensor, dist.isend(wire, group=self.group, group_dst=peer), wire)

    def irecv(self, tensor: Tensor, peer: int, tag: str) -> Transfer:
        """Start to receive into `tensor`, whose shape and dtype are those that were sent."""
        self._check_peer(peer)
        tensor = tensor.detach()
        self._count(tag, 0, 0)
        if self._trivial(tensor):
            return Transfer(tensor)
        wire = self._staged(tensor, fill=False)
        work = dist.irecv(_as_bytes(wire), group=self.group, group_src=peer)
        finish = None if wire is tensor else lambda: tensor.copy_(wire, non_blocking=True)
        return Transfer(tensor, work, wire, finish)

    def send(self, tensor: Tensor, peer: int, tag: str) -> None:
        """`isend`, then wait."""
        self.isend(tensor, peer, tag).wait()

    def recv(self, tensor: Tensor, peer: int, tag: str) -> Tensor:
        """`irecv`, then wait; returns `tensor`."""
        return self.irecv(tensor, peer, tag).wait()

    def metered(self, sends: list[dist.P2POp], tag: str) -> list[dist.P2POp]:
        """`sends` that torch is about to start itself, counted and made contiguous."""
        for each in sends:
            each.tensor = each.tensor.contiguous()
            self._count(tag, each.tensor.nbytes, each.tensor.nbytes)
        return sends

    def _trivial(self, tensor: Tensor) -> bool:
        """Nothing to send; the same on every rank, so all skip the call."""
        return self.world_size == 1 or tensor.numel() == 0

    def _staged(self, tensor: Tensor, fill: bool = True) -> Tensor:
        """`tensor` itself if the backend can use it as it lies, else a buffer (`fill`: a copy)."""
        if self.backend == "gloo" and tensor.is_cuda:
            wire = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        elif tensor.is_contiguous():
            return tensor
        else:
            wire = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        return wire.copy_(tensor) if fill else wire

    def _check_peer(self, peer: int) -> None:
        if peer == self.rank or not 0 <= peer < self.world_size:
            raise ValueError(f"rank {self.rank} of {self.world_size} has no peer {peer}")


def _as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory as uint8: what is only moved may have any dtype."""
    return tensor.view(-1).view(torch.uint8)


def init(backend: str, timeout: timedelta = timedelta(minutes=10)) -> Comm:
    """Join the world that torchrun's environment describes, or a world of one without it.

    `timeout` bounds every wait for another rank. Raises `InputError` that names the key `backend`.
    """
    if backend not in ("gloo", "nccl"):
        raise InputError(f"backend: {backend!r} is unknown; known: gloo, nccl")
    device = torch.device("cpu")
    if backend == "nccl":
        local_rank, devices = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local_rank >= devices:
            raise InputError(
                "backend: nccl needs one CUDA device per rank of a machine;"
                f" local rank {local_rank} has none, {devices} found"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:
        return Comm(None, device)
    dist.init_process_group(
        backend, timeout=timeout, device_id=device if backend == "nccl" else None
    )
    return Comm(dist.group.WORLD, device)


def shutdown(comm: Comm) -> None:
    """Leave the world that `init` joined."""
    if comm.group is not None:
        dist.destroy_process_group()
