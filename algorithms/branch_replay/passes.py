"""Coefficient replay: score all branches, differentiate the loss by log-probabilities, replay.

Every loss that is a function of log-probabilities has the gradient sum_t c_t * grad(log_prob_t)
with c = d loss / d log_prob. Pass 1 finds the log-probabilities without a graph, autograd finds c
on that vector alone, pass 2 replays the branches with the linear loss. Both passes see the same
weights, so their log-probabilities must agree; a state restored wrongly would show here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from algorithms.branch_replay.errors import SelfCheckError
from algorithms.branch_replay.losses import Branches, PerBranch, derivative
from algorithms.branch_replay.moe import Decisions
from algorithms.branch_replay.path import Path
from algorithms.branch_replay.refresh import Captured, Drift
from algorithms.branch_replay.traversal import Engine, Terms, Traversal
from algorithms.branch_replay.tree import Node, Plan, plan, walk
from algorithms.branch_replay.versions import Fingerprint, fingerprint, require_fresh

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Of log-probabilities between the passes; 0.1 in lower precision."""


@dataclass
class StepOutput:
    """What a step found; gradients are in the parameters' .grad."""

    loss: float
    """Without the auxiliary loss."""
    log_probs: list[Branches]
    """By tree."""
    aux_loss: float
    """Load-balancing loss of the routers, without its coefficient."""
    pass_difference: float | None
    """Largest |difference| of a log-probability between the two passes; None where one sufficed."""
    tokens_without_graph: int
    tokens_with_graph: int
    drift: Drift | None = None
    """How far a reused prompt was behind; None when it was fresh."""


class Passes:
    """The two passes over a list of trees; each tree's prompt is captured when it is first met."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.config = engine.config
        self.model = engine.trunk.model
        weight = self.model.get_input_embeddings().weight
        self.weight: Tensor = weight
        self.dtype: torch.dtype = weight.dtype
        self.device: torch.device = weight.device

    def plans(self, trees: Sequence[Node]) -> list[Plan]:
        """Cut trees into segments; their log-probabilities follow each other in one vector."""
        plans: list[Plan] = []
        offset = 0
        for tree in trees:
            plans.append(plan(tree, self.config, offset))
            offset += plans[-1].scored
        return plans

    def empty(self, tokens: Tensor, version: Fingerprint) -> Captured:
        """A prompt of which nothing is captured yet."""
        offload, bf16 = self.config.offload, self.config.kv_dtype == "bf16"
        path = Path(0, offload=offload, bf16=bf16)
        return Captured(tokens, path, {}, version, version, self.config)

    def capture(self, captured: Captured) -> None:
        """Run the whole prompt, from its start. If that fails, nothing of it is captured."""
        root = Node(captured.tokens, scored=False)
        pieces = plan(root, self.config)
        captured.states.clear()
        captured.outputs.clear()
        captured.decisions.clear()
        captured.path.reserve(captured.length)
        traversal = self._traversal(captured, self._zeros(0), Decisions())
        try:
            traversal.capture(walk(pieces.roots))
        except BaseException:
            captured.states.clear()
            raise

    def score(
        self,
        plans: list[Plan],
        prompts: list[Captured | None],
        trees: Sequence[Node],
        decisions: Decisions,
    ) -> tuple[Tensor, int]:
        """Pass 1. Log-probabilities of all trees and how many tokens were run. A missing prompt is
        captured; that of the last tree is left in `prompts`, the others' are dropped again."""
        scores = self._zeros(sum(p.scored for p in plans))
        version = fingerprint(self.model)
        tokens = 0
        for i, (p, tree) in enumerate(zip(plans, trees, strict=True)):
            prompt = prompts[i] or self.empty(tree.tokens, version)
            traversal = self._traversal(prompt, scores, decisions)
            self._visit(p, traversal)
            tokens += traversal.tokens_without_graph
            if i == len(plans) - 1:
                prompts[i] = prompt
        return scores, tokens

    def step(
        self,
        trees: Sequence[Node],
        loss_fn: Callable[[list[Branches]], Tensor],
        captured: Captured | None,
    ) -> StepOutput:
        """Both passes; `captured`: the prompt of the only tree."""
        version = fingerprint(self.model)
        plans = self.plans(trees)
        prompts: list[Captured | None] = [captured] * len(plans)
        decisions = Decisions()
        scores, without_graph = self.score(plans, prompts, trees, decisions)
        loss, coefficients = derivative(
            lambda log_probs: loss_fn([p.branches(log_probs) for p in plans]), scores
        )
        require_fresh(version, self.model)
        again = torch.full_like(scores, float("nan"))
        with_graph = 0
        for p, tree, prompt in reversed(list(zip(plans, trees, prompts, strict=True))):
            prompt = prompt or self.empty(tree.tokens, version)
            traversal = self._traversal(prompt, again, decisions, coefficients)
            self._visit(p, traversal)
            without_graph += traversal.tokens_without_graph
            with_graph += traversal.tokens_with_graph
        return StepOutput(
            loss=loss,
            log_probs=[p.branches(scores) for p in plans],
            aux_loss=decisions.tally.loss(),
            pass_difference=self._compare(scores, again),
            tokens_without_graph=without_graph,
            tokens_with_graph=with_graph,
        )

    def step_per_branch(
        self, tree: Node, loss_fn: PerBranch, captured: Captured | None
    ) -> StepOutput | None:
        """One pass instead of both; None where it takes two: a response that is cut into pieces,
        an auxiliary loss that has to be counted first."""
        (p,) = self.plans([tree])
        if self.config.aux_loss or any(s.targets is not None and s.children for s in walk(p.roots)):
            return None
        version = fingerprint(self.model)
        scores = self._zeros(p.scored)
        leaves = {path[0][0]: i for i, path in enumerate(p.paths) if path}
        none = scores[:0]
        unscored = [i for i, path in enumerate(p.paths) if not path]
        constant = sum(derivative(partial(loss_fn.one, i), none)[0] for i in unscored)
        prompt = captured or self.empty(tree.tokens, version)
        traversal = self._traversal(prompt, scores, Decisions(), terms=Terms(loss_fn, leaves))
        self._visit(p, traversal)
        require_fresh(version, self.model)
        return StepOutput(
            loss=traversal.loss + constant,
            log_probs=[p.branches(scores)],
            aux_loss=0.0,
            pass_difference=None,
            tokens_without_graph=traversal.tokens_without_graph,
            tokens_with_graph=traversal.tokens_with_graph,
        )

    def _visit(self, p: Plan, traversal: Traversal) -> None:
        path = traversal.path
        path.reserve(p.longest)
        # Without a node to recompute, nobody asks for cotangents of keys and values.
        if not traversal.scoring and any(s.gradient and s.children for s in walk(p.roots)):
            path.open_cotangents(self.dtype)
        try:
            traversal.run(p.roots)
        finally:
            path.close_cotangents()

    def _compare(self, first: Tensor, second: Tensor) -> float:
        """Largest difference; raises `SelfCheckError` past the tolerance or for a missing value."""
        if not len(first):
            return 0.0
        tolerance = self.config.tolerance
        if tolerance is None:
            tolerance = TOLERANCE.get(self.dtype, 0.1)
        apart = (first - second).abs()
        worst = float(apart.max())
        if not worst <= tolerance:
            at = int(apart.nan_to_num(nan=float("inf")).argmax())
            values = [float(scores.flatten()[at]) for scores in (first, second)]
            raise SelfCheckError(
                f"log-probability {at} of {first.numel()} was {values[0]:.6g} in pass 1 and "
                f"{values[1]:.6g} in pass 2; tolerance {tolerance:g}"
            )
        return worst

    def _traversal(
        self,
        prompt: Captured,
        log_probs: Tensor,
        decisions: Decisions,
        coefficients: Tensor | None = None,
        terms: Terms | None = None,
    ) -> Traversal:
        return Traversal(self.engine, prompt, log_probs, decisions, coefficients, terms)

    def _zeros(self, n: int) -> Tensor:
        return self.engine.head.zeros(n, self.weight)
