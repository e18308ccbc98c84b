"""What a sync sends: the mean of one flat buffer over the workers, through a codec both ways.

The quantised reduce-scatter and all-gather of MuLoCo (arXiv 2505.23725), written as an all-to-all
of encoded parts and an all-gather. Worker k owns part k of the buffer. Every worker encodes its
buffer and sends each part to the owner; the owner decodes the M parts, adds them in rank order and
divides by M. It then adds what its own code lost in the round before (its residual), encodes, and
keeps what is lost now; everybody decodes the M encoded means, hence ends with the same bits. What
the first code loses is the caller's to keep: `Reduced.sent` says what the others saw.

Without a codec it goes the same way in the buffer's dtype. Since the order of all sums is fixed,
`reduce_stacked` gives the same bits in one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from algorithms.common.codec import Codec
from algorithms.common.comm import Comm
from algorithms.common.errors import InputError
from algorithms.common.meter import Meter


class Reduced(NamedTuple):
    """Both [numel] in the buffer's dtype; new tensors."""

    mean: Tensor
    """Mean over the workers, the same bits on every rank."""
    sent: Tensor
    """What the others saw of this worker: its buffer, encoded and decoded."""


class Background:
    """A thread that exchanges rounds in the order in which they were started.

    `group` has the ranks of the `Comm` whose rounds it takes, the backend gloo (CUDA tensors are
    staged), and carries nothing else: a group's collectives must come in the same order on all
    ranks, and those of a thread could mix with those of the main thread. Several reducers may share
    a `Background`. None is a world of one.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        if group is not None and dist.get_backend(group) != "gloo":
            raise ValueError("NCCL groups in flight at the same time can deadlock; needs gloo")
        self.group = group
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="wire")

    def close(self) -> None:
        """Wait for what was started, then end the thread."""
        self.thread.shutdown()


class Pending:
    """A round that was started."""

    def __init__(self, comm: Comm, counted: Meter, mean: Future[Tensor], sent: Tensor) -> None:
        self._comm = comm
        self._counted: Meter | None = counted
        self._mean = mean
        self._sent = sent

    def wait(self) -> Reduced:
        """Block until the round is over. Only now are its bytes counted, so that no counter
        depends on how fast the network was. Raises what the exchange raised."""
        mean = self._mean.result()
        if self._counted is not None:
            self._comm.add(self._counted)
            self._counted = None
        return Reduced(mean, self._sent)

    def state_dict(self) -> dict[str, Any]:
        """What the round gave, and its bytes unless they are counted already. Blocks like `wait`,
        but leaves the round as it is."""
        mean = self._mean.result()  # first: the thread counts as it sends
        counters = {} if self._counted is None else self._counted.state_dict()
        return {"mean": mean, "sent": self._sent, "counters": counters}

    @classmethod
    def restored(cls, comm: Comm, state: dict[str, Any]) -> Pending:
        """The round whose `state_dict` it was; nothing is sent anew."""
        counted = Meter()
        counted.load_state_dict(state["counters"])
        mean = Future[Tensor]()
        mean.set_result(state["mean"].to(comm.device))
        return cls(comm, counted, mean, state["sent"].to(comm.device))


class Reducer:
    """Averages one kind of buffer over the ranks of `comm`, round after round.

    `codec` None sends the buffer's dtype. With `background` a started round goes on while the
    caller computes; without, `start` returns when the round is over.
    """

    def __init__(
        self,
        comm: Comm,
        tag: str,
        codec: Codec | None,
        background: Background | None = None,
    ) -> None:
        self._comm = comm
        self._tag = tag
        self._code = codec or _Plain()
        self._feedback = codec is not None
        self._background = background
        self._residual: Tensor | None = None  # of the part that this rank owns
        self._newest: Future[Tensor] | None = None

    def __call__(self, flat: Tensor) -> Reduced:
        """`start`, then wait."""
        return self.start(flat).wait()

    @torch.no_grad()
    def start(self, flat: Tensor) -> Pending:
        """Send `flat` [numel], equally long on all ranks, in a round that may overlap others.

        All ranks start the same rounds in the same order. `flat` is copied: it may be changed.
        """
        padded = _padded(flat.detach(), self._comm.world_size, self._code.block)
        encoded = self._code.encode(padded)
        sent = self._code.decode(encoded, flat.numel(), flat.dtype)
        background = self._background
        lane = Comm(background.group if background else self._comm.group, self._comm.device)
        assert lane.world_size == self._comm.world_size, "the background has other ranks"
        # The caller's stream, so that what the thread reads, writes and frees needs no events.
        stream = torch.cuda.current_stream(flat.device) if flat.is_cuda else None

        def exchange() -> Tensor:
            with torch.no_grad(), torch.cuda.stream(stream):  # which hold for one thread only
                return self._exchange(lane, encoded, len(padded), flat.dtype)[: flat.numel()]

        if background is None:
            mean = Future[Tensor]()
            mean.set_result(exchange())  # if it fails, there is no round that anyone waits for
        else:
            mean = background.thread.submit(exchange)
        self._newest = mean
        return Pending(self._comm, lane, mean, sent)

    def state_dict(self) -> dict[str, Tensor]:
        """The residual of the part that this rank owns. Blocks until all rounds that were started
        are over: the state is that after them."""
        if self._newest is not None:
            self._newest.result()
        return {} if self._residual is None else {"residual": self._residual}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Needs no round under way, and as many ranks as before: owners' parts depend on it."""
        residual = state.get("residual")
        self._residual = None if residual is None else residual.to(self._comm.device, copy=True)

    def _exchange(self, comm: Comm, encoded: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Mean [numel] of every rank's `encoded`, whose M equal parts hold numel / M values."""
        received = torch.empty_like(encoded)
        comm.all_to_all(received, encoded, self._tag)
        mean = _mean(self._code.decode(received, numel, dtype).chunk(comm.world_size))
        if self._residual is not None:
            if self._residual.shape != mean.shape:
                raise InputError(
                    f"{self._tag}: this rank's residual has {self._residual.numel()} values, its"
                    f" part of the buffer {mean.numel()}; another model or number of ranks"
                )
            mean += self._residual
        parts = comm.all_gather(self._code.encode(mean), self._tag)
        means = self._code.decode(torch.cat(parts), numel, dtype)
        if self._feedback:
            self._residual = _lost(mean, means.chunk(comm.world_size)[comm.rank])
        return means


@torch.no_grad()
def reduce_stacked(
    flats: Sequence[Tensor], codec: Codec | None, residuals: list[Tensor] | None = None
) -> tuple[Tensor, list[Tensor]]:
    """What M ranks with `Reducer`s get for `flats` (each [numel]): the mean and each one's `sent`.

    `residuals` are the owners', in rank order, and are replaced; a new list is empty. None keeps
    none, as in a reducer's only round.
    """
    code = codec or _Plain()
    numel, dtype = flats[0].numel(), flats[0].dtype
    decoded = []
    for flat in flats:
        padded = _padded(flat.detach(), len(flats), code.block)
        decoded.append(code.decode(code.encode(padded), len(padded), dtype))
    mean = _mean(decoded)
    if codec is not None:
        if residuals:
            mean += torch.cat(residuals)
        means = codec.decode(codec.encode(mean), len(mean), dtype)
        if residuals is not None:
            residuals[:] = _lost(mean, means).chunk(len(flats))
        mean = means
    return mean[:numel], [each[:numel] for each in decoded]


class _Plain:
    """No code: the bytes of a copy of the values."""

    block = 1

    def encode(self, flat: Tensor) -> Tensor:
        return flat.clone().view(torch.uint8)

    def decode(self, encoded: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        return encoded.view(dtype)[:numel]


def _padded(flat: Tensor, world_size: int, block: int) -> Tensor:
    """`flat` [numel], filled up with zeros to M equal parts of whole blocks; a copy if need be."""
    missing = -flat.numel() % (world_size * block)
    return torch.cat([flat, flat.new_zeros(missing)]) if missing else flat


def _mean(held: Sequence[Tensor]) -> Tensor:
    """Their mean, added in order."""
    total = held[0].clone()
    for each in held[1:]:
        total += each
    return total.div_(len(held))


def _lost(values: Tensor, decoded: Tensor) -> Tensor:
    """What a code lost of `values`. Nothing where that is not finite: such a round is the
    receiver's to refuse, and must not spoil the next."""
    return (values - decoded).nan_to_num_(0.0, 0.0, 0.0)
