"""The one recursion: capture a node, visit its children, recompute it, pass cotangents up.

A chunked prompt is a chain of nodes, a group of branches are leaves, several turns are a deeper
tree. A node's state (keys and values in `Path`, recurrent states in `State`) is the only thing that
its children see of it, so reverse order of visits is ordinary reverse-mode differentiation: when a
node is recomputed, every later use of its state has already added its cotangent. At most one
segment or one batch of leaves is in the autograd graph at any time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from algorithms.branch_replay.attention import Run, running
from algorithms.branch_replay.config import ReplayConfig
from algorithms.branch_replay.head import Head
from algorithms.branch_replay.losses import PerBranch, derivative
from algorithms.branch_replay.moe import Calls, Decision, Decisions, Routing
from algorithms.branch_replay.refresh import Captured
from algorithms.branch_replay.state import (
    State,
    add_cotangents,
    clones,
    leaves,
    zero_cotangents,
)
from algorithms.branch_replay.tree import Segment
from algorithms.branch_replay.trunk import Trunk
from algorithms.common.errors import InputError


@dataclass
class Engine:
    """What every visit needs."""

    trunk: Trunk
    head: Head
    routing: Routing
    config: ReplayConfig


@dataclass
class Terms:
    """A loss by branches, and which branch's leaf starts at an offset."""

    loss: PerBranch
    leaves: Mapping[int, int]


class Traversal:
    """One pass over one tree. Pass 1 (neither `coefficients` nor `terms`) fills `log_probs`; pass 2
    adds the gradient of sum(coefficients * log_probs) to the parameters and fills `log_probs`
    again. With `terms` there is no other pass."""

    def __init__(
        self,
        engine: Engine,
        prompt: Captured,
        log_probs: Tensor,
        decisions: Decisions,
        coefficients: Tensor | None = None,
        terms: Terms | None = None,
    ) -> None:
        self.trunk, self.head = engine.trunk, engine.head
        self.routing, self.config = engine.routing, engine.config
        self.decisions = decisions
        self.path = prompt.path
        self.prompts = prompt.prompts
        self.captured = prompt.states
        self.outputs = prompt.outputs
        """Of attention, by the ends of the prompt's pieces and, with gradient, of open nodes."""
        self.kept_decisions = prompt.decisions
        self.log_probs = log_probs
        self.coefficients = coefficients
        self.terms = terms
        self.scoring = coefficients is None and terms is None
        self.loss = 0.0
        """Sum of the terms."""
        self.tokens_without_graph = 0
        self.tokens_with_graph = 0

    def capture(self, pieces: Iterable[Segment]) -> None:
        """Only capture the pieces of a prompt."""
        state: State = {}
        for piece in pieces:
            state = self._capture(piece, state)

    def run(self, roots: list[Segment]) -> None:
        """Visit the whole tree."""
        self._children(roots, {}, gradient=False)

    def _chain(self, first: Segment, state: State) -> State | None:
        """Visit `first` and what is below; the cotangent of `state`, None if it gets none."""
        chain = [first]
        while len(chain[-1].children) == 1 and chain[-1].children[0].children:
            chain.append(chain[-1].children[0])
        states = [state]
        for segment in chain:
            states.append(self._capture(segment, states[-1]))
        cotangents = self._children(chain[-1].children, states[-1], chain[-1].gradient)
        if self.scoring:
            return None
        for segment, entry in zip(reversed(chain), reversed(states[:-1]), strict=True):
            if not segment.gradient:
                return None  # nor have those before it
            cotangents = self._recompute(segment, entry, cotangents)
        return cotangents

    def _children(self, children: list[Segment], state: State, gradient: bool) -> State:
        """Visit all children of a node that ends in `state`; the sum of its cotangents."""
        total = zero_cotangents(state)
        for child in children:
            if child.children:
                given = self._chain(child, state)
                if given is not None:
                    for key, cotangent in given.items():
                        total[key] += cotangent
        ends = [c for c in children if not c.children]
        for batch in self._batches(ends):
            entry = self._leaves(batch, state, gradient)
            add_cotangents(total, entry)
        return total

    def _batches(self, ends: list[Segment]) -> Iterator[list[list[Segment]]]:
        """Leaves by prompt, those of like length together for the sake of padding."""
        scored = [segment for segment in ends if segment.targets is not None]
        # What is not scored matters to the auxiliary loss only.
        others = [s for s in ends if s.targets is None] if self.config.aux_loss else []
        size = self.config.branches_per_pass
        for kind in (scored, others):
            kind.sort(key=lambda segment: len(segment.inputs), reverse=True)
            queues: list[list[Segment]] = [[] for _ in range(self.prompts)]
            for segment in kind:
                queues[segment.behind].append(segment)
            for i in range(0, max(map(len, queues)), size):
                yield [queue[i : i + size] for queue in queues]

    def _capture(self, segment: Segment, entry: State) -> State:
        """Run a node without gradient; its keys and values go to `path`."""
        if segment.gradient and not self.scoring:
            self.path.clear_cotangents(segment.start, segment.end)
        if segment.prompt and segment.end in self.captured:
            self._reuse(segment)
            return self.captured[segment.end]
        scoring = self.scoring and segment.targets is not None
        run = self._run(segment, to_the_end=scoring)
        if self._keeps(segment):
            run.outputs = self.outputs[segment.end] = {}
        with torch.no_grad(), running(run), self.routing.recording() as calls:
            hidden, state = self.trunk.forward(segment.rows, run, clones(entry))
        for layer, key in run.keys.items():
            self.path.write(layer, segment.start, key, run.values[layer])
        self._route([segment], calls, None)
        if scoring:
            assert hidden is not None
            self._keep([segment], self.head.log_probs(hidden[0], _targets([segment])))
        self.tokens_without_graph += segment.inputs.numel()
        if segment.prompt:
            self.captured[segment.end] = state
        return state

    def _leaves(self, by_prompt: list[list[Segment]], state: State, gradient: bool) -> State:
        """Run leaves, right-padded and as many rows for each prompt, from the same state; returned
        are the leaves of its graph, with their cotangents in pass 2."""
        batch = [segment for part in by_prompt for segment in part]
        rows = max(map(len, by_prompt))
        longest = max(len(segment.inputs) for segment in batch)
        inputs = batch[0].inputs.new_zeros((len(by_prompt) * rows, longest))
        real = torch.zeros_like(inputs, dtype=torch.bool)
        for i, part in enumerate(by_prompt):
            for row, segment in enumerate(part, i * rows):
                inputs[row, : len(segment.inputs)] = segment.inputs
                real[row, : len(segment.inputs)] = True
        run = self._run(batch[0], to_the_end=True)
        entry = leaves(state, rows, gradient and not self.scoring)
        if self.scoring:
            with torch.no_grad(), running(run), self.routing.recording() as calls:
                hidden, _ = self.trunk.forward(inputs, run, entry)
            assert hidden is not None
            self._route(batch, calls, real.flatten())
            self._score(batch, hidden[real])
            self.tokens_without_graph += int(real.sum())
        else:
            with self.trunk.graph(run, longest):
                with self.routing.recording() as calls:
                    hidden, _ = self.trunk.forward(inputs, run, clones(entry))
                assert hidden is not None
                aux = self._route(batch, calls, real.flatten())
                self._differentiate(batch, hidden[real], [], [], aux)
            self.tokens_with_graph += int(real.sum())
        return entry

    def _recompute(self, segment: Segment, entry: State, cotangents: State) -> State:
        """Run a node with gradient and push the cotangents of its state to what came before:
        keys and values in `path`, recurrent states in the result."""
        given = leaves(entry, 1, gradient=True)
        run = self._run(segment, to_the_end=segment.targets is not None)
        if self._keeps(segment):
            take = self.outputs.get if segment.prompt else self.outputs.pop  # a prompt's are reused
            run.outputs = take(segment.end, None)
        with self.trunk.graph(run, segment.inputs.shape[-1]):
            with self.routing.recording() as calls:
                hidden, state = self.trunk.forward(segment.rows, run, clones(given))
            outputs: list[Tensor] = []
            grads: list[Tensor] = []
            for layer, key in run.keys.items():
                outputs += [key, run.values[layer]]
                grads += self.path.cotangents(layer, segment.start, segment.end, key)
            for name, output in state.items():
                outputs.append(output)
                grads.append(cotangents[name].to(output.dtype))
            aux = self._route([segment], calls, None)
            rows = None if hidden is None else hidden[0]
            self._differentiate([segment], rows, outputs, grads, aux)
        self.tokens_with_graph += segment.inputs.numel()
        below = zero_cotangents(entry)
        add_cotangents(below, given)
        return below

    def _differentiate(
        self,
        batch: list[Segment],
        rows: Tensor | None,
        outputs: list[Tensor],
        grads: list[Tensor],
        aux: Tensor | None,
    ) -> None:
        """Backward from the log-probabilities of `batch`, whose hidden states are `rows`, from
        `outputs` with cotangents `grads`, and from the auxiliary loss."""
        if rows is not None and batch[0].targets is not None:
            targets = _targets(batch)
            coefficients = self._coefficients(batch, rows.detach(), targets)
            log_probs, cotangent = self.head.backward(rows, targets, coefficients)
            self._keep(batch, log_probs)
            outputs, grads = [*outputs, rows], [*grads, cotangent]
        if aux is not None:
            outputs, grads = [*outputs, aux], [*grads, torch.ones_like(aux)]
        wanted = [(o, g) for o, g in zip(outputs, grads, strict=True) if o.requires_grad]
        if wanted:
            torch.autograd.backward([o for o, _ in wanted], [g for _, g in wanted])

    def _coefficients(self, batch: list[Segment], rows: Tensor, targets: Tensor) -> Tensor:
        """Derivative of the loss by the log-probabilities of `batch`."""
        if self.coefficients is not None:
            spans = [self.coefficients[s.offset : s.offset + len(s.inputs)] for s in batch]
            return torch.cat(spans)
        assert self.terms is not None
        loss, leaves = self.terms.loss, [self.terms.leaves[s.offset] for s in batch]
        lengths = [len(segment.inputs) for segment in batch]

        def loss_fn(log_probs: Tensor) -> Tensor:
            return loss.some(leaves, list(torch.split(log_probs, lengths)))

        value, found = derivative(loss_fn, self.head.log_probs(rows, targets))
        self.loss += value
        return found

    def _run(self, segment: Segment, to_the_end: bool) -> Run:
        everything = to_the_end or self.config.aux_loss > 0
        stop: frozenset[tuple[int, str]] = frozenset() if everything else self.trunk.top
        return Run(self.path, segment.start, stop, self.prompts)

    def _keeps(self, segment: Segment) -> bool:
        """Whether what attention gives for a node is kept from its capture to its recomputation."""
        later = segment.prompt or not self.scoring  # pass 2 captures other nodes anew
        return self.config.keep_attention and segment.gradient and later

    def _score(self, batch: list[Segment], rows: Tensor) -> None:
        if batch[0].targets is not None:
            self._keep(batch, self.head.log_probs(rows, _targets(batch)))

    def _keep(self, batch: list[Segment], log_probs: Tensor) -> None:
        position = 0
        for segment in batch:
            n = len(segment.inputs)
            span = log_probs[position : position + n]
            self.log_probs[segment.offset : segment.offset + n] = span
            position += n

    def _route(self, batch: list[Segment], calls: Calls, real: Tensor | None) -> Tensor | None:
        """Check and count what routers did; in pass 2 the auxiliary loss's term."""
        if not self.routing.routers:
            return None
        segment = batch[0]
        experts = self.routing.experts(calls)
        decision = self.decisions.by_segment.setdefault(id(segment), Decision(experts))
        decision.check(experts)
        if segment.prompt:
            self.kept_decisions[segment.end] = decision
        if not self.config.aux_loss:
            return None
        rows = slice(None) if real is None else real
        if self.scoring:
            decision.tally = self.routing.tally(calls, rows)
            self.decisions.tally.add(decision.tally, segment.branches)
            return None
        logits = [layer for layer, _ in calls]
        term = self.decisions.tally.linear_loss(logits, rows, segment.branches)
        return None if term is None or not term.requires_grad else self.config.aux_loss * term

    def _reuse(self, segment: Segment) -> None:
        """Take over what the routers did when the prompt's piece `segment` was captured."""
        decision = self.kept_decisions.get(segment.end)
        if decision is None:
            return
        self.decisions.by_segment.setdefault(id(segment), decision)
        if self.scoring and self.config.aux_loss:
            if decision.tally is None:
                raise InputError("aux_loss: the prompt was captured without it")
            self.decisions.tally.add(decision.tally, segment.branches)


def _targets(batch: list[Segment]) -> Tensor:
    return torch.cat([segment.targets for segment in batch if segment.targets is not None])
