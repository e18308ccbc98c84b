"""Asynchronous 1F1B on a real rank: one stage, its optimizer, its messages.

Runs the actions of `schedule` with the semantics that `reference` states, bit for bit. An update
writes into the stage's weights while microbatches are under way, so a forward whose backward comes
after an update goes through a copy of the weights (`stash` device, where autograd keeps the
activations), or keeps its input alone and is recomputed in the backward: at a copy on the device
(`recompute`), at one on the host (`stash` host), or at the newest weights (`stash` none).

A stage may pause after any update without draining: what is under way stays under way, held here.
There, ranks may evaluate or write a checkpoint, and the run goes on as if nothing had been.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from algorithms.async_pipeline import schedule, update
from algorithms.async_pipeline.links import (
    ACTIVATIONS,
    EVALUATION,
    GRADIENTS,
    TARGETS,
    Held,
    Links,
    Poisoned,
    Shapes,
    Spec,
    agree,
)
from algorithms.async_pipeline.trace import Event, Trace
from algorithms.async_pipeline.update import BeforeUpdate, Factory, Finding, Kind, Loss, Weights
from algorithms.common.comm import Comm
from algorithms.common.errors import InputError, NonFiniteError

Stash = Literal["device", "host", "none"]
Batches = Callable[[int], tuple[Tensor, Tensor]]
"""Inputs of the first stage and targets of the last, of a microbatch: a pure function, called on
the first stage alone."""


@dataclass
class Flight:
    """A microbatch between its forward and its backward."""

    inputs: Tensor
    weights: Weights | None
    """Those of its backward; None: the stage's own, as they then are."""
    output: Tensor | None = None
    """With its graph; None: the backward recomputes it."""


class Pipeline:
    """Stage `comm.rank` of `comm.world_size`; all ranks make the same calls in the same order."""

    def __init__(
        self,
        stage: nn.Module,
        optimizer: Factory,
        loss: Loss,
        comm: Comm,
        *,
        delays: Sequence[int] | None = None,
        stash: Stash = "device",
        recompute: bool = False,
        accumulation: int = 1,
        clip_norm: float = 0.0,
        before_update: BeforeUpdate | None = None,
    ) -> None:
        """Trains `stage`, a function of one tensor without randomness, in place. `delays` (forwards
        ahead, for each stage) are P-1-k by default; other arguments are those of `reference`.

        Raises `InputError` for delays that cannot be, for frozen parameters, and for NCCL, where a
        receive posted ahead would hold up every send to the same rank.
        """
        if comm.backend == "nccl":
            raise InputError("backend: an asynchronous pipeline needs gloo")
        self.stage, self.loss, self.comm = stage, loss, comm
        self.k, self.stages = comm.rank, comm.world_size
        self.last = self.stages - 1
        natural = schedule.natural(self.stages)
        self.delays = natural if delays is None else schedule.check_delays(delays, self.stages)
        self.delay = self.delays[self.k]
        self.stash: Stash = stash
        self.recompute = recompute or stash != "device"
        self.accumulation = accumulation
        self.clip_norm = clip_norm
        self.before_update = before_update
        self.weights = update.weights_of(stage)
        self.optimizer = optimizer(list(self.weights.items()), self.k, self.stages)
        self.trace = Trace(comm.device)
        self.norms: list[float] = []
        """L2 norms of this stage's gradients before clipping, by update since the last pause."""
        self.start = self.stop = self.done = 0
        """The run under way has microbatches `start`..`stop`-1; the backwards of all below `done`
        are over."""
        self.flights: dict[int, Flight] = {}
        self.targets: dict[int, Tensor] = {}
        """Of microbatches under way where the only stage is both first and last."""
        self.held: Held = {}
        """Messages that came before a pause and belong behind it."""
        self._copy: Weights | None = None
        """Of the present weights, once a forward has needed it."""
        self._shapes: Shapes | None = None
        self._losses: list[Tensor] = []

    @property
    def updates(self) -> int:
        """How many updates this stage has made; at a pause, every stage."""
        return self.done // self.accumulation

    @property
    def drained(self) -> bool:
        """Whether no microbatch is under way on any stage."""
        return self.done == self.stop

    def run(self, batches: Batches, until: int, drain_at: int | None = None) -> list[float]:
        """Train until `until` updates are made in all; the loss of each microbatch since the last
        pause, on every rank. If the run goes on to `drain_at` (by default it ends at `until`),
        microbatches behind `until` are under way then, and the next call must name the same end.

        Raises `NonFiniteError` on every rank, naming update, stage and parameter, before the stage
        that found it has changed its weights; `StageLostError` where another stage is gone;
        `InputError` for numbers that do not fit. After an error the process group is of no use.
        """
        until, stop = until * self.accumulation, (drain_at or until) * self.accumulation
        start = self.done if self.drained else self.start
        if not self.drained and stop != self.stop:
            raise InputError(f"drain_at: {stop} microbatches, but this run ends at {self.stop}")
        if not self.done <= until <= stop:
            raise InputError(f"until: {until} microbatches are not in [{self.done}, {stop}]")
        self.start, self.stop = start, stop
        self.norms, self._losses = [], []
        if self._shapes is None:
            self._shapes = agree(self.stage, self.comm, lambda: batches(start))
        span = {"done": self.done, "until": until}
        plan = schedule.actions(self.delay, start, stop, self.accumulation, **span)
        forwards = self._forwards(until)
        backwards = self.done, until
        links = Links(self.comm, self._shapes, self.delays, forwards, backwards, self.held)
        finding = None
        try:
            for action in plan:
                if action.kind == "forward":
                    self._forward(action.index, batches, links)
                elif action.kind == "backward":
                    self._backward(action.index, links)
                else:
                    self._update(action.index)
            with self.trace.record("wait", until):
                self.held = links.settle()
        except (NonFiniteError, Poisoned) as error:
            links.poison()
            finding = self._finding(error)
        return self._meet(finding)

    def evaluate(self, batches: Batches, count: int, metric: Loss | None = None) -> list[float]:
        """`metric` (by default the loss) of each of `count` batches at the present weights, on
        every rank, NaN where the weights give that. Call it at a pause; its messages are metered
        as `evaluation`."""
        shapes = agree(self.stage, self.comm, lambda: batches(0))
        forwards = [(0, count)] * self.stages
        links = Links(self.comm, shapes, self.delays, forwards, (0, 0), {}, EVALUATION)
        values = []
        for index in range(count):
            with torch.no_grad():
                inputs, targets = self._inputs(index, batches, links)
                output = self.stage(inputs)
            if self.k < self.last:
                links.send(ACTIVATIONS, index, output)
            else:
                targets = links.take(TARGETS, index) if targets is None else targets
                values.append((metric or self.loss)(output, targets).item())
        links.settle()
        everyone: list[float] = self.comm.broadcast_object(values, src=self.last)
        return everyone

    def traces(self) -> list[list[Event]] | None:
        """On rank 0 the events of every stage since the last call, elsewhere None."""
        return self.comm.gather_objects(self.trace.take())

    def relaunch(self) -> None:
        """Forward again what is under way, from its inputs, after `flights` was restored: a
        checkpoint holds no graphs."""
        if not self.recompute:
            for flight in self.flights.values():
                assert flight.weights is not None
                flight.output = functional_call(self.stage, dict(flight.weights), (flight.inputs,))

    # Actions

    def _inputs(self, index: int, batches: Batches, links: Links) -> tuple[Tensor, Tensor | None]:
        """What this stage forwards; on a stage that is first and last, the targets too."""
        if self.k > 0:
            return links.take(ACTIVATIONS, index), None
        inputs, targets = batches(index)
        if self.last == 0:
            return inputs, targets
        links.send(TARGETS, index, targets)
        return inputs, None

    def _forward(self, index: int, batches: Batches, links: Links) -> None:
        with self.trace.record("wait", index):
            inputs, targets = self._inputs(index, batches, links)
        assert self._shapes is not None
        if (found := Spec.of(inputs)) != self._shapes.inputs:
            raise InputError(f"batch {index}: is {found}, the first was {self._shapes.inputs}")
        if targets is not None:
            self.targets[index] = targets
        inputs = inputs.detach().requires_grad_(self.k > 0)
        flight = Flight(inputs, self._copied() if self.delay else None)
        output = None
        with self.trace.record("forward", index):
            if not self.delay:
                output = flight.output = self.stage(inputs)
            elif not self.recompute:
                assert flight.weights is not None
                output = flight.output = functional_call(
                    self.stage, dict(flight.weights), (inputs,)
                )
            elif self.k < self.last:  # nobody needs the output of the last
                with torch.no_grad():
                    output = self.stage(inputs)
        self.flights[index] = flight
        if self.k < self.last:
            assert output is not None
            links.send(ACTIVATIONS, index, output)

    def _backward(self, index: int, links: Links) -> None:
        flight = self.flights.pop(index)
        with self.trace.record("wait", index):
            if self.k < self.last:
                arrived = links.take(GRADIENTS, index)
            elif self.last > 0:
                arrived = links.take(TARGETS, index)
            else:
                arrived = self.targets.pop(index)
        with self.trace.record("backward", index):
            weights, output = flight.weights, flight.output
            cotangent: Tensor | None = arrived
            if output is None:
                weights = weights and _on(weights, self.comm.device)
                called = dict(weights or self.weights)
                output = functional_call(self.stage, called, (flight.inputs,))
            weights = weights or self.weights
            if self.k == self.last:
                value = self.loss(output, arrived)
                self._losses.append(value.detach())
                output, cotangent = update.objective(value, self.accumulation), None
            wanted = [*weights.values(), *([flight.inputs] if self.k else [])]
            gradients = torch.autograd.grad(output, wanted, cotangent, allow_unused=True)
        if self.k > 0:
            assert gradients[-1] is not None
            links.send(GRADIENTS, index, gradients[-1])
        update.accumulate(
            self.weights, gradients[: len(weights)], gradients[-1] if self.k else None
        )
        self.done = index + 1

    def _update(self, index: int) -> None:
        with self.trace.record("update", index):
            norm = update.apply(
                self.weights,
                self.optimizer,
                stage=self.k,
                update=index,
                clip_norm=self.clip_norm,
                before_update=self.before_update,
            )
        self.norms.append(norm)
        self._copy = None

    def _copied(self) -> Weights | None:
        """The weights at which a microbatch that is forwarded now will be differentiated."""
        if self.stash == "none":
            return None
        if self._copy is None:
            device = torch.device("cpu") if self.stash == "host" else self.comm.device
            self._copy = {
                name: weight.detach().to(device, copy=True).requires_grad_()
                for name, weight in self.weights.items()
            }
        return self._copy

    # What holds a run together

    def _forwards(self, until: int) -> list[tuple[int, int]]:
        """The first and the end of what each stage forwards between this pause and the next."""
        ends = [
            [schedule.forwarded(delay, self.start, self.stop, done) for done in (self.done, until)]
            for delay in self.delays
        ]
        return [(first, end) for first, end in ends]

    def _finding(self, error: Exception) -> Finding:
        poisoned = isinstance(error, Poisoned)
        number = self.done // self.accumulation - (not poisoned)
        bad = update.bad_weight(self.weights) or update.bad_gradient(self.weights)
        if poisoned and not bad:
            return Finding(Kind.MESSAGE, self.done, self.k, f"update {number}: {error}")
        begun = self.done - number * self.accumulation  # microbatches of the update under way
        losses = self._losses[-begun:] if begun else []
        return update.examine(self.weights, stage=self.k, update=number, losses=losses)

    def _meet(self, finding: Finding | None) -> list[float]:
        """All ranks come here, after a pause or in distress; the losses, or the cause."""
        losses = torch.stack(self._losses).tolist() if self._losses else []
        everyone = self.comm.gather_objects((finding, losses))
        findings, losses = [], []
        if everyone is not None:
            findings = [found for found, _ in everyone if found is not None]
            losses = everyone[-1][1]
        cause = update.cause(findings)
        text, losses = self.comm.broadcast_object((cause and cause.text, losses), src=0)
        if text is not None:
            raise NonFiniteError(text)
        result: list[float] = losses
        return result


def _on(weights: Weights, device: torch.device) -> Weights:
    return {name: weight.detach().to(device).requires_grad_() for name, weight in weights.items()}
