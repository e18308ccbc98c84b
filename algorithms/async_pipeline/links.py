"""The messages of a stage: activations and gradients between neighbours, targets from the first
stage straight to the last.

Receives are posted ahead, so that transfers run while stages compute; a send is waited for when it
must have arrived. Shapes are agreed once. Between two ranks messages match in the order in which
they are posted: that of microbatches, and within one, targets before activations.

A stage that cannot go on sends NaN in place of its next messages, both ways; whoever takes such a
message does the same, so all stages learn of it without waiting for each other in good times. One
NaN stops whoever is at work, but a stage that is done with its part of a run waits for all messages
of it, so a stage in distress sends as many as that may still be.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from algorithms.common.comm import Comm, Transfer
from algorithms.common.errors import one_line

ACTIVATIONS, GRADIENTS, TARGETS = "activations", "gradients", "targets"
"""Kinds of messages, and what they are metered under while a pipeline trains."""
EVALUATION = "evaluation"
"""What all are metered under while it evaluates."""

Held = dict[str, dict[int, Tensor]]
"""Messages by kind and microbatch."""


class StageLostError(RuntimeError):
    """Another stage died, or sent nothing within the timeout of the process group."""


class Poisoned(Exception):
    """A message is NaN from its first value on: its sender, or one behind it, cannot go on."""


@dataclass(frozen=True)
class Spec:
    """Shape and dtype of a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> Spec:
        return Spec(tuple(tensor.shape), tensor.dtype)

    def filled(self, device: torch.device, value: float = 0.0) -> Tensor:
        """With `value`, or 0 where the dtype knows no NaN."""
        value = value if self.dtype.is_floating_point else 0.0
        return torch.full(self.shape, value, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class Shapes:
    """Of all that a stage takes and gives."""

    inputs: Spec
    outputs: Spec
    targets: Spec


def agree(stage: nn.Module, comm: Comm, example: Callable[[], tuple[Tensor, Tensor]]) -> Shapes:
    """Shapes of this stage's messages, found by one forward of zeros from the first stage to the
    last; `example` is called on the first stage. All ranks call this together."""
    pair = tuple(map(Spec.of, example())) if comm.rank == 0 else ()
    spec, targets = comm.broadcast_object(pair, src=0)
    inputs = outputs = spec
    for rank in range(comm.world_size):
        if rank == comm.rank:
            inputs = spec
            with torch.no_grad():
                outputs = spec = Spec.of(stage(spec.filled(comm.device)))
        if comm.world_size > 1:
            spec = comm.broadcast_object(spec, src=rank)
    return Shapes(inputs, outputs, targets)


class Inbox:
    """Messages from one peer: of each microbatch from `first` to `end`-1 one of each of `parts`.

    `ahead` of them are asked for before they are needed. Methods raise `StageLostError`."""

    def __init__(
        self, comm: Comm, peer: int, parts: dict[str, Spec], first: int, end: int, ahead: int
    ) -> None:
        self.comm, self.peer, self.parts = comm, peer, parts
        self.next, self.end, self.ahead = first, end, ahead
        self.pending: dict[tuple[str, int], Transfer] = {}

    def post(self, end: int, tag: str | None) -> None:
        """Ask for all messages of microbatches below `end`."""
        for index in range(self.next, min(end, self.end)):
            for part, spec in self.parts.items():
                with _naming(self.comm, self.peer, part, index):
                    buffer = torch.empty(spec.shape, dtype=spec.dtype, device=self.comm.device)
                    self.pending[part, index] = self.comm.irecv(buffer, self.peer, tag or part)
            self.next = index + 1

    def wait(self, part: str, index: int) -> Tensor:
        """The message of a microbatch, once it is here."""
        with _naming(self.comm, self.peer, part, index):
            return self.pending.pop((part, index)).wait()


class Outbox:
    """Messages of one kind to one peer, of microbatches `first` to `end`-1, of which at most
    `depth` are under way. Methods raise `StageLostError`."""

    def __init__(
        self, comm: Comm, peer: int, part: str, spec: Spec, first: int, end: int, depth: int
    ) -> None:
        self.comm, self.peer, self.part, self.spec = comm, peer, part, spec
        self.next, self.end, self.depth = first, end, depth
        self.sent: deque[tuple[int, Transfer]] = deque()

    def start(self, message: Tensor, tag: str | None) -> None:
        """Start to send the message of the next microbatch."""
        index = self.next
        with _naming(self.comm, self.peer, self.part, index):
            self.sent.append((index, self.comm.isend(message, self.peer, tag or self.part)))
        self.next = index + 1

    def send(self, message: Tensor, tag: str | None) -> None:
        """`start`, and wait for the oldest messages beyond the depth."""
        self.start(message, tag)
        self.drain(self.depth)

    def drain(self, left: int) -> None:
        """Wait until at most `left` are under way."""
        while len(self.sent) > left:
            index, transfer = self.sent.popleft()
            with _naming(self.comm, self.peer, self.part, index):
                transfer.wait()


class Links:
    """What stage `comm.rank` receives and sends while it makes one run of actions.

    `forwards`: for each stage the first and the end of the microbatches that it forwards in it;
    `backwards`: those of the backwards of every stage. `tag`: what all messages are metered under,
    by default their kind.
    """

    def __init__(
        self,
        comm: Comm,
        shapes: Shapes,
        delays: Sequence[int],
        forwards: Sequence[tuple[int, int]],
        backwards: tuple[int, int],
        held: Held,
        tag: str | None = None,
    ) -> None:
        self.comm, self.tag = comm, tag
        self.inboxes: dict[str, Inbox] = {}
        self.outboxes: dict[str, Outbox] = {}
        k, last = comm.rank, comm.world_size - 1

        self.delay = delays[k]

        def span(part: str, sender: int) -> tuple[int, int]:
            return backwards if part == GRADIENTS else forwards[sender]

        def receive(peer: int, parts: dict[str, Spec], ahead: int) -> None:
            inbox = Inbox(comm, peer, parts, *span(next(iter(parts)), peer), ahead)
            self.inboxes |= dict.fromkeys(parts, inbox)

        def send(peer: int, part: str, spec: Spec, depth: int) -> None:
            self.outboxes[part] = Outbox(comm, peer, part, spec, *span(part, k), depth)

        # Asked for ahead is all that the peer can send before it needs something of us, but for
        # gradients at the end of a run (see `poison`). Likewise the depths are such that a wait for
        # the oldest message is over at once.
        if k == last > 0:
            targets = {TARGETS: shapes.targets}
            if k == 1:  # both come from one peer, in this order
                receive(0, targets | {ACTIVATIONS: shapes.inputs}, delays[0] + 1)
            else:
                receive(0, targets, delays[0] + 1)
        if k > 0:
            difference = delays[k - 1] - delays[k]
            if ACTIVATIONS not in self.inboxes:
                receive(k - 1, {ACTIVATIONS: shapes.inputs}, difference + 1)
            send(k - 1, GRADIENTS, shapes.inputs, difference + 1)
        if k < last:
            receive(k + 1, {GRADIENTS: shapes.outputs}, delays[k] - delays[k + 1] + 1)
            if k == 0:
                send(last, TARGETS, shapes.targets, delays[k] + 1)
            send(k + 1, ACTIVATIONS, shapes.outputs, delays[k] + 1)

        for part, messages in held.items():
            for index, message in messages.items():
                self.inboxes[part].pending[part, index] = Transfer(message.to(comm.device))
        for inbox in self.inboxes.values():
            inbox.post(inbox.next + inbox.ahead, tag)

    def take(self, part: str, index: int) -> Tensor:
        """Wait for a message, and ask for another. Raises `StageLostError`, and while the pipeline
        trains `Poisoned`; what an evaluation gives may be NaN."""
        inbox = self.inboxes[part]
        message = inbox.wait(part, index)
        training = self.tag != EVALUATION
        if training and message.is_floating_point() and message.view(-1)[0].isnan():
            raise Poisoned(f"stage {inbox.peer}: its {part} are not finite")
        inbox.post(index + 1 + inbox.ahead, self.tag)
        return message

    def send(self, part: str, index: int, message: Tensor) -> None:
        """Start to send a message, which must not be written to any more. Raises
        `StageLostError`."""
        outbox = self.outboxes[part]
        assert index == outbox.next
        outbox.send(message, self.tag)

    def settle(self) -> Held:
        """Wait for all messages of this run, ours and others', and return what nobody took. Raises
        `StageLostError`."""
        held: Held = {}
        for part, inbox in self.inboxes.items():
            inbox.post(inbox.end, self.tag)
            indices = sorted(index for kind, index in inbox.pending if kind == part)
            held[part] = {index: inbox.wait(part, index) for index in indices}
        for outbox in self.outboxes.values():
            outbox.drain(0)
        return held

    def poison(self) -> None:
        """Make sure that nobody waits for us, and wait for nothing. Raises `StageLostError`.

        NaN goes in place of the next messages. A stage at work stops at the first. One that is done
        with its part of the run, which it was without these messages, waits for at most as many as
        may be under way: it has forwarded all but so many of our microbatches.
        """
        if GRADIENTS in self.inboxes:
            # When we have forwarded the last microbatch of the run, the next stage needs nothing of
            # us to send all gradients; of any other run, those of what we have forwarded.
            inbox = self.inboxes[GRADIENTS]
            inbox.post(inbox.next + self.delay, self.tag)
        most = max((outbox.depth for outbox in self.outboxes.values()), default=0)
        for turn in range(most):  # by microbatch, as a peer that gets two kinds asks for them
            for outbox in self.outboxes.values():
                if turn < outbox.depth and outbox.next < outbox.end:
                    outbox.start(outbox.spec.filled(self.comm.device, torch.nan), self.tag)


@contextmanager
def _naming(comm: Comm, peer: int, part: str, index: int) -> Iterator[None]:
    """Turn what the backend raises into an error that names both stages."""
    try:
        yield
    except RuntimeError as error:
        raise StageLostError(
            f"stage {comm.rank} lost stage {peer} ({part} of microbatch {index}): {one_line(error)}"
        ) from error
