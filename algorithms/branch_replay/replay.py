"""Branch replay: the gradient of any loss on the log-probabilities of branches that share a prompt.

    replay = BranchReplay(model, ReplayConfig(mode="exact", chunk=1024, branches_per_pass=8))
    out = replay.step(prompt, responses, loss_fn)      # gradients are added to .grad
    optimizer.step()

Memory is that of one chunk or one batch of branches in the autograd graph, plus the prompt's keys
and values and their cotangents; it does not grow with the number of branches. How it works:
`traversal.py` (the recursion), `passes.py` (any loss), `attention.py` (any model).

LongStraw (whose report treats the prompt's state as a constant) is mode `response_only`. This
departs from it by being exact by default, by trees of any depth, and by refusing what it cannot
prove.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from algorithms.branch_replay.attention import our_attention
from algorithms.branch_replay.config import ReplayConfig
from algorithms.branch_replay.gradients import take_gradients, whole_step
from algorithms.branch_replay.head import Head
from algorithms.branch_replay.inputs import (
    check_autocast,
    check_captured,
    check_model,
    check_tokens,
    of_group,
    of_prompt,
    of_trees,
)
from algorithms.branch_replay.losses import Branches, PerBranch, require_callable
from algorithms.branch_replay.moe import Decisions, Routing
from algorithms.branch_replay.passes import Passes, StepOutput
from algorithms.branch_replay.refresh import (
    Captured,
    Drift,
    cosine,
    mean_change,
    state_change,
)
from algorithms.branch_replay.traversal import Engine
from algorithms.branch_replay.tree import Node, copied, group, plan
from algorithms.branch_replay.trunk import Trunk
from algorithms.branch_replay.values import ValuedHead
from algorithms.branch_replay.versions import fingerprint, require_fresh
from algorithms.common.errors import InputError

Loss = Callable[[Branches], Tensor]
"""`PerBranch` is one that takes a single pass."""


class BranchReplay:
    """Replays trees of branches on `model`, any causal language model of transformers (of a
    `PeftModel`, what its `get_base_model` returns).

    Raises `InputError` for a model it cannot serve, dropout, gradient checkpointing, autocast,
    tokens that are not the model's, and a loss whose derivative would be lost; `SelfCheckError`
    when one of its checks fails; `StaleStateError` for a captured prompt older than the weights.
    Whether the caller turned gradients off (`no_grad`, `inference_mode`) makes no difference.

    With a `value_head`, a part of `model` (`values.py`), what is called `log_probs` below has two
    columns, [tokens, 2]: log-probabilities and values.
    """

    def __init__(
        self, model: Any, config: ReplayConfig | None = None, value_head: Any = None
    ) -> None:
        check_model(model)
        check_autocast(model)
        if not isinstance(config, ReplayConfig | None):
            raise InputError(f"config: must be a ReplayConfig, not a {type(config).__name__}")
        self.model = model
        self.config = ReplayConfig() if config is None else config
        routing = Routing(model)
        if self.config.aux_loss and not routing.routers:
            raise InputError("aux_loss: the model has no router that transformers can record")
        head = Head(model, self.config.head_chunk)
        if value_head is not None:
            head = ValuedHead(model, self.config.head_chunk, value_head)
        self.trunk = Trunk(model, self.config.window)
        self.passes = Passes(Engine(self.trunk, head, routing, self.config))

    def step(
        self, prompt: Tensor | Captured, responses: Sequence[Tensor | Node], loss_fn: Loss
    ) -> StepOutput:
        """Add the gradient of the scalar `loss_fn(log_probs)` to .grad.

        `log_probs` has a tensor [tokens] per response, float32 or float64. Prompt and responses are
        int64 [tokens], unpadded; a response may be empty. A captured prompt is not run again. In
        place of a response a node may stand, with others below: then there is one for each leaf.

        Prompts of equal length may be run as one batch, int64 [prompts, tokens]. Responses are then
        nodes without others below, each `behind` one of them.
        """
        require_callable("loss_fn", loss_fn)

        def loss_of_trees(branches: list[Branches]) -> Tensor:
            return loss_fn(branches[0])

        captured = prompt if isinstance(prompt, Captured) else None
        with self.session(), whole_step(self.model):
            trees = self._group(prompt, responses)
            if captured is not None and captured.version != fingerprint(self.model):
                if self.config.refresh_every == 1:
                    require_fresh(captured.version, self.model)
                return self._step_behind(captured, trees, loss_of_trees)
            out = None
            if isinstance(loss_fn, PerBranch):
                out = self.passes.step_per_branch(trees[0], loss_fn, captured)
            return out or self.passes.step(trees, loss_of_trees, captured)

    def step_trees(
        self, trees: Sequence[Node], loss_fn: Callable[[list[Branches]], Tensor]
    ) -> StepOutput:
        """The same for several trees of any depth; `loss_fn` gets the branches of each."""
        require_callable("loss_fn", loss_fn)
        if isinstance(loss_fn, PerBranch):
            raise InputError("loss_fn: PerBranch is for step, step_trees takes a plain function")
        with self.session(), whole_step(self.model):
            check_tokens(self.model, of_trees(trees))
            return self.passes.step([copied(tree) for tree in trees], loss_fn, None)

    def log_probs(self, prompt: Tensor | Captured, responses: Sequence[Tensor | Node]) -> Branches:
        """Score responses without gradient, under the present weights: [tokens] each."""
        captured = prompt if isinstance(prompt, Captured) else None
        with self.session():
            trees = self._group(prompt, responses)
            if captured is not None:
                require_fresh(captured.version, self.model)
            plans = self.passes.plans(trees)
            scores, _ = self.passes.score(plans, [captured], trees, Decisions())
            return plans[0].branches(scores)

    def capture(self, prompt: Tensor) -> Captured:
        """Run a prompt int64 [tokens], or several [prompts, tokens], once, for several calls of
        `log_probs` and `step`."""
        with self.session():
            check_tokens(self.model, of_prompt(prompt))
            captured = self.passes.empty(prompt.clone(), fingerprint(self.model))
            self.passes.capture(captured)
        return captured

    def _step_behind(
        self,
        captured: Captured,
        trees: Sequence[Node],
        loss_fn: Callable[[list[Branches]], Tensor],
    ) -> StepOutput:
        """A step with a prompt that is older than the weights, or the recapture of it."""
        version = fingerprint(self.model)
        if captured.seen != version:
            captured.seen = version
            captured.age += 1
        if captured.length and not captured.states:  # an earlier recapture was interrupted
            self.passes.capture(captured)
            captured.version, captured.age = version, 0
            return self.passes.step(trees, loss_fn, captured)
        pieces = plan(trees[0], self.config).roots
        change = state_change(self.trunk, captured, pieces[0]) if captured.length else 0.0
        drift = Drift(captured.age, change, recaptured=False)
        if captured.age < self.config.refresh_every and change <= self.config.refresh_bound:
            out = self.passes.step(trees, loss_fn, captured)
            out.drift = drift
            return out
        stale = self.passes.step(trees, loss_fn, captured)
        stale_gradients = take_gradients(self.model)
        self.passes.capture(captured)
        captured.version, captured.age = version, 0
        out = self.passes.step(trees, loss_fn, captured)
        drift.recaptured = True
        drift.gradient_cosine = cosine(stale_gradients, [p.grad for p in self.model.parameters()])
        drift.log_prob_change = mean_change(stale.log_probs[0], out.log_probs[0])
        out.drift = drift
        return out

    def _group(self, prompt: Tensor | Captured, responses: Sequence[Tensor | Node]) -> list[Node]:
        """The tree of a group, checked, of tokens that the caller cannot write to."""
        if isinstance(prompt, Captured):
            check_captured(prompt, self.config)
        tokens = prompt.tokens if isinstance(prompt, Captured) else prompt
        check_tokens(self.model, of_group(tokens, responses))
        return [copied(group(tokens, responses))]

    @contextmanager
    def session(self) -> Iterator[None]:
        """Around every call: settings may have changed since the last."""
        self.trunk.check_settings()
        check_autocast(self.model)
        # A state made in inference mode could not be differentiated later.
        with torch.inference_mode(False), our_attention(self.model):
            yield
