"""Synchronous pipelines to compare with, by torch.distributed.pipelining: GPipe, 1F1B, zero bubble.

An update differentiates the mean loss of M microbatches at one version of the weights, as plain
training with M accumulated microbatches does; between updates the pipeline is empty. Schedules and
their messages are torch's own. Here are the optimizers, the clipping rule of `update`, and what
torch leaves open:

- Shapes are agreed before the first update and given to torch, which then infers none.
- Targets of an update go from the first stage straight to the last.
- Sends are metered where torch asks a stage for them. Its handshake before the first update, a
  number each way over every boundary, is not.
- The trace has an event for each forward, loss, backward and update; where zero bubble splits a
  backward, one for the gradient of the input and one for those of the weights. What lies between
  two of them on a rank is recorded as a wait, so torch's overhead is part of it.
- After each update the ranks tell each other whether all gradients were finite.

Of torch's zero-bubble schedules this takes the interleaved one (ZB1P of 2401.10241; rank k has the
stages k and P+k), since with M = P its bubble is smaller than that of ZB-V, and with 2P the same. A
stage whose output is a view of something fails in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import P2POp
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleavedZeroBubble,
)

from algorithms.async_pipeline import update
from algorithms.async_pipeline.links import ACTIVATIONS, EVALUATION, GRADIENTS, TARGETS, Spec
from algorithms.async_pipeline.pipeline import Batches
from algorithms.async_pipeline.trace import Event, Kind, Trace
from algorithms.async_pipeline.update import BeforeUpdate, Factory, Loss
from algorithms.common.comm import Comm, Transfer
from algorithms.common.errors import InputError, NonFiniteError
from algorithms.common.meter import CONTROL

Schedule = Literal["gpipe", "one_f_one_b", "zero_bubble"]
Record = Callable[[Kind, int], AbstractContextManager[None]]
Step = Callable[[Tensor | None, Tensor | None], None]
"""Of inputs and targets `[M, ...]`, each where it is needed."""


def placement(schedule: Schedule, ranks: int) -> list[list[int]]:
    """The stages of each rank: one of P, or with `zero_bubble` two of 2P."""
    if schedule == "zero_bubble":
        return [[rank, ranks + rank] for rank in range(ranks)]
    return [[rank] for rank in range(ranks)]


@dataclass(frozen=True)
class Flow:
    """Shapes of what travels."""

    hidden: list[Spec]
    """What each stage takes; then what the last gives."""
    targets: Spec


class Synchronous:
    """The stages `placement(schedule, P)[comm.rank]`; all ranks make the same calls in order."""

    def __init__(
        self,
        stages: Sequence[nn.Module],
        optimizer: Factory,
        loss: Loss,
        comm: Comm,
        *,
        schedule: Schedule,
        microbatches: int,
        clip_norm: float = 0.0,
        before_update: BeforeUpdate | None = None,
    ) -> None:
        """Trains `stages`, each a function of one tensor, in place: one optimizer for each, one
        update for `microbatches` (M). A world of one trains plainly, without a schedule.

        Raises `InputError` for another number of stages, for frozen parameters, for fewer
        microbatches than ranks, which only GPipe can have here, and with `zero_bubble` unless M //
        P divides M.
        """
        ranks = comm.world_size
        placed = placement(schedule, ranks)
        self.indices = placed[comm.rank]
        if len(stages) != len(self.indices):
            given = f"{len(stages)} on rank {comm.rank}"
            raise InputError(f"stages: {given}, but {schedule} has {len(self.indices)}")
        least = 1 if schedule == "gpipe" else ranks
        if microbatches < least:
            wanted = f"{schedule} on {ranks} ranks needs at least {least}"
            raise InputError(f"microbatches: {microbatches}, but {wanted}")
        if schedule == "zero_bubble" and microbatches % (rounds := microbatches // ranks):
            wanted = f"{schedule} on {ranks} ranks needs {rounds} equal rounds"
            raise InputError(f"microbatches: {microbatches}, but {wanted}")
        self.stages, self.loss, self.comm = list(stages), loss, comm
        self.schedule, self.microbatches = schedule, microbatches
        self.clip_norm, self.before_update = clip_norm, before_update
        self.owners = {index: rank for rank, own in enumerate(placed) for index in own}
        """The rank of each stage."""
        self.last = len(self.owners) - 1
        self.weights = [update.weights_of(stage) for stage in self.stages]
        self.optimizers = [
            optimizer(list(weights.items()), index, len(self.owners))
            for index, weights in zip(self.indices, self.weights, strict=True)
        ]
        self.trace = Trace(comm.device)
        self.updates = 0
        """How many updates have been made."""
        self.norms: list[list[float]] = [[] for _ in self.stages]
        """Of each stage here the L2 norms of its gradients before clipping, by update of a run."""
        self._flow: Flow | None = None
        self._step: Step = self._plain
        self._losses: list[Tensor] = []
        """Of the update under way, by microbatch, on the rank of the last stage."""
        self._idle_since = 0.0

    def run(self, batches: Batches, until: int) -> list[float]:
        """Train until `until` updates are made in all, update u on the microbatches from u M to
        u M + M - 1; the loss of each microbatch, on every rank.

        Raises `NonFiniteError` on every rank, naming update, stage and parameter, before the stage
        that found it has changed its weights; `InputError` for numbers that do not fit. After an
        error the process group is of no use.
        """
        if until < self.updates:
            raise InputError(f"until: {until} updates, but {self.updates} have been made")
        if self._flow is None:
            self._flow = self._agree(lambda: batches(self.updates * self.microbatches))
            if self.comm.world_size > 1:
                self._step = self._scheduled(self._flow)
        self.norms = [[] for _ in self.stages]
        losses: list[float] = []
        self._idle_since = perf_counter()
        while self.updates < until:
            self._losses = []
            first = self.updates * self.microbatches
            self._step(*self._fetch(batches, first, self.microbatches, self._flow, TARGETS))
            self._update()
            losses += [loss.item() for loss in self._losses]
        everyone: list[float] = self.comm.broadcast_object(losses, src=self.owners[self.last])
        return everyone

    def evaluate(self, batches: Batches, count: int, metric: Loss | None = None) -> list[float]:
        """`metric` (by default the loss) of each of `count` batches at the present weights, on
        every rank. Its messages are metered as `evaluation`."""
        if count == 0:
            return []
        flow = self._agree(lambda: batches(0))
        inputs, targets = self._fetch(batches, 0, count, flow, EVALUATION)
        passed = [] if inputs is None else list(inputs)
        sends: list[Transfer] = []
        for index, stage in zip(self.indices, self.stages, strict=True):
            here = self.comm.rank
            before, after = (self.owners.get(index + step, here) for step in (-1, 1))
            taken, passed = passed, []
            for number in range(count):
                if before == here:
                    hidden = taken[number]
                else:
                    buffer = flow.hidden[index].filled(self.comm.device)
                    hidden = self.comm.recv(buffer, before, EVALUATION)
                with torch.no_grad():
                    passed.append(stage(hidden))
                if after != here:
                    sends.append(self.comm.isend(passed[-1], after, EVALUATION))
        values: list[float] = []
        if self.last in self.indices:
            assert targets is not None
            measure = metric or self.loss
            values = [measure(*pair).item() for pair in zip(passed, targets, strict=True)]
        for send in sends:
            send.wait()
        everyone: list[float] = self.comm.broadcast_object(values, src=self.owners[self.last])
        return everyone

    def traces(self) -> list[list[Event]] | None:
        """On rank 0 the events of every rank since the last call, elsewhere None."""
        return self.comm.gather_objects(self.trace.take())

    # One update

    def _scheduled(self, flow: Flow) -> Step:
        """An update's forwards and backwards by torch's schedule."""
        stages = [
            _Stage(stage, index, flow, self.comm, self._computing)
            for index, stage in zip(self.indices, self.stages, strict=True)
        ]
        settings: dict[str, Any] = {
            "n_microbatches": self.microbatches,
            "loss_fn": self._objective,
            "scale_grads": False,  # the objective is a share of the mean
        }
        schedule: ScheduleGPipe | Schedule1F1B | ScheduleInterleavedZeroBubble
        if self.schedule == "gpipe":
            schedule = ScheduleGPipe(stages[0], **settings)
        elif self.schedule == "one_f_one_b":
            schedule = Schedule1F1B(stages[0], **settings)
        else:
            schedule = ScheduleInterleavedZeroBubble([*stages], **settings)

        def step(inputs: Tensor | None, targets: Tensor | None) -> None:
            whole = [] if inputs is None else [inputs.flatten(0, 1)]  # torch cuts it again
            wanted = None if targets is None else targets.flatten(0, 1)
            schedule.step(*whole, target=wanted, return_outputs=False)

        return step

    def _plain(self, inputs: Tensor | None, targets: Tensor | None) -> None:
        """The same where all stages are here."""
        assert inputs is not None and targets is not None
        for number, hidden in enumerate(inputs):
            with self._computing("forward", number):
                for stage in self.stages:
                    hidden = stage(hidden)
            objective = self._objective(hidden, targets[number])
            with self._computing("backward", number):
                torch.autograd.backward(objective)

    def _objective(self, output: Tensor, targets: Tensor) -> Tensor:
        with self._computing("forward", len(self._losses)):
            value = self.loss(output, targets)
            self._losses.append(value.detach())
            return update.objective(value, self.microbatches)

    def _update(self) -> None:
        """Of all stages. Raises on every rank what any has found."""
        findings = []
        for index, weights, optimizer, norms in zip(
            self.indices, self.weights, self.optimizers, self.norms, strict=True
        ):
            try:
                with self._recorded("update", self.updates):
                    norm = update.apply(
                        weights,
                        optimizer,
                        stage=index,
                        update=self.updates,
                        clip_norm=self.clip_norm,
                        before_update=self.before_update,
                    )
            except NonFiniteError:
                losses = self._losses if index == self.last else []
                found = update.examine(weights, stage=index, update=self.updates, losses=losses)
                findings.append(found)
            else:
                norms.append(norm)
        failed = torch.tensor([len(findings)], dtype=torch.uint8, device=self.comm.device)
        self.comm.all_reduce(failed, CONTROL, op="max")
        if failed.item():
            everyone = self.comm.gather_objects(findings)
            cause = update.cause(each for found in everyone or [] for each in found)
            raise NonFiniteError(self.comm.broadcast_object(cause and cause.text, src=0))
        self.updates += 1

    # What goes in, and when

    def _agree(self, example: Callable[[], tuple[Tensor, Tensor]]) -> Flow:
        """Shapes, found by one forward of zeros; `example` is called on the first stage's rank."""
        pair = tuple(map(Spec.of, example())) if self.comm.rank == 0 else ()
        spec, targets = self.comm.broadcast_object(pair, src=0)
        hidden = [spec]
        local = dict(zip(self.indices, self.stages, strict=True))
        for index, owner in sorted(self.owners.items()):
            if index in local:
                with torch.no_grad():
                    spec = Spec.of(local[index](spec.filled(self.comm.device)))
            spec = self.comm.broadcast_object(spec, src=owner)
            hidden.append(spec)
        return Flow(hidden, targets)

    def _fetch(
        self, batches: Batches, first: int, count: int, flow: Flow, tag: str
    ) -> tuple[Tensor | None, Tensor | None]:
        """Inputs of `count` batches on the rank of the first stage, targets on that of the last."""
        inputs = targets = None
        owner = self.owners[self.last]
        if self.comm.rank == 0:
            pairs = [batches(index) for index in range(first, first + count)]
            for index, (given, _) in enumerate(pairs, first):
                if (found := Spec.of(given)) != flow.hidden[0]:
                    raise InputError(f"batch {index}: is {found}, the first was {flow.hidden[0]}")
            inputs, targets = (torch.stack(each) for each in zip(*pairs, strict=True))
            if owner != 0:
                self.comm.send(targets, owner, tag)
        elif self.comm.rank == owner:
            shape = (count, *flow.targets.shape)
            buffer = torch.empty(shape, dtype=flow.targets.dtype, device=self.comm.device)
            targets = self.comm.recv(buffer, 0, tag)
        return inputs, targets

    def _computing(self, kind: Kind, number: int) -> AbstractContextManager[None]:
        """Record what is done with a microbatch of this update."""
        return self._recorded(kind, self.updates * self.microbatches + number)

    @contextmanager
    def _recorded(self, kind: Kind, index: int) -> Iterator[None]:
        self.trace.events.append(Event("wait", index, self._idle_since, perf_counter()))
        with self.trace.record(kind, index):
            yield
        self._idle_since = perf_counter()


class _Stage(PipelineStage):
    """A stage of torch's schedules that records what it computes and meters what it sends."""

    def __init__(
        self, stage: nn.Module, index: int, flow: Flow, comm: Comm, record: Record
    ) -> None:
        inputs, outputs = (
            spec.filled(comm.device).requires_grad_(spec.dtype.is_floating_point)
            for spec in flow.hidden[index : index + 2]
        )
        super().__init__(
            stage,
            index,
            len(flow.hidden) - 1,
            comm.device,
            input_args=inputs,
            output_args=outputs,
            group=comm.group,
        )
        self.comm, self.record = comm, record
        self._sent: dict[int, int] = {}
        """Where the gradients of inputs lie that were sent last, by microbatch of an update."""

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **settings: Any) -> Any:
        with self.record("forward", fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **settings)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **settings: Any) -> None:
        with self.record("backward", bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, *args, **settings)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with self.record("backward", bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
            # Unlike `backward`, torch assigns what autograd gives, and adds to it in place.
            update.separate(self.submod.parameters(), self._sent.values())

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[P2POp]:
        return self.comm.metered(super().get_fwd_send_ops(fwd_chunk_id), ACTIVATIONS)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[P2POp]:
        sends = self.comm.metered(super().get_bwd_send_ops(bwd_chunk_id), GRADIENTS)
        for each in sends:
            self._sent[bwd_chunk_id] = update.memory(each.tensor)
        return sends
