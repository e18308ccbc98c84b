"""Reinforcement learning by branch replay: rollouts, their objective, and one update.

    learner = Learner(model, optimizer, settings, eos=eos, score=score, seed=0)
    for step in range(steps):
        metrics = learner.update(prompts_of(step), step)

An update samples a group of responses to each question, turns rewards into advantages, and adds the
gradient of one prompt after the other to .grad: denominators count the whole update, on all ranks,
so nothing depends on how it is split. What is sampled is a function of the seed, the step and the
prompt. So the state of a run is its weights, its optimizer and its step.

The log-probabilities at sampling are compared with those of the replay in every update.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from algorithms.branch_replay import reference
from algorithms.branch_replay.collect import Collector, Rolled, Score
from algorithms.branch_replay.config import (
    LearnerConfig,
    ObjectiveConfig,
    ReplayConfig,
    RolloutConfig,
)
from algorithms.branch_replay.criterion import Criterion
from algorithms.branch_replay.errors import SelfCheckError
from algorithms.branch_replay.lora import WithoutAdapters, has_adapters
from algorithms.branch_replay.losses import Branches, PerBranch
from algorithms.branch_replay.objectives import Totals, winning_pairs
from algorithms.branch_replay.passes import TOLERANCE
from algorithms.branch_replay.prompts import SHORT, Prompt, joined
from algorithms.branch_replay.refresh import Captured
from algorithms.branch_replay.replay import BranchReplay
from algorithms.branch_replay.speedup import Speedup
from algorithms.branch_replay.tally import Tally
from algorithms.common.comm import Comm
from algorithms.common.errors import InputError, NonFiniteError

ROUNDED = 1.0
"""Tolerance of log-probabilities between sampling and replay in lower precision, where products of
other shapes round otherwise: in bf16 those of SmolLM2-135M are up to 0.24 from float32's by full
sequences, and up to 0.18 from each other."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Of all parts of an update."""

    rollout: RolloutConfig
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)


class Learner:
    """Updates `model` by `optimizer`; `reference_model`, which stays as it is, is what an objective
    with a KL or with pairs holds on to. For a model with adapters it may be None: then that is the
    model without them. An objective with values needs `model.value_head` (`values.py`).

    Raises `InputError` for settings that do not go together, `SelfCheckError` where replay and
    sampling disagree, `NonFiniteError` for a gradient that is inf or NaN; no step is taken then.
    """

    def __init__(
        self,
        model: Any,
        optimizer: torch.optim.Optimizer,
        settings: Settings,
        *,
        eos: Collection[int],
        score: Score,
        seed: int,
        reference_model: Any = None,
        comm: Comm | None = None,
    ) -> None:
        _check(settings, model)
        self.model = model
        self.optimizer = optimizer
        self.settings = settings
        self.value_head = model.value_head if settings.objective.value else None
        self.replay = BranchReplay(model, settings.replay, self.value_head)
        self.collector = Collector(self.replay, eos, score, seed)
        self.criterion = Criterion(settings.objective, settings.rollout.max_tokens)
        self.reference: BranchReplay | WithoutAdapters | None = None
        if settings.objective.needs_reference:
            self.reference = self._reference(reference_model)
        self.comm = comm
        self._speedup: Speedup | None = None
        """Measured when it is first asked for: a model may have been changed until then."""
        self._captured: dict[str, Captured] = {}
        """Prompts that outlive an update, by their first question."""

    def _reference(self, model: Any) -> BranchReplay | WithoutAdapters:
        if model is not None:
            return BranchReplay(model, self.settings.replay)
        if not has_adapters(self.model):
            objective = self.settings.objective
            raise InputError(
                f"objective: {objective.name} with kl {objective.kl} needs a reference"
            )
        return WithoutAdapters(self.replay)

    def resumable(self, step: int) -> bool:
        """Whether weights, optimizer and step are all there is after update `step` (from 0): not
        while captured prompts are older than the weights."""
        return (step + 1) % self.settings.replay.refresh_every == 0

    def update(self, prompts: Sequence[Prompt], step: int) -> dict[str, float]:
        """One update on this rank's `prompts`, of which there may be none. With `refresh_every` K
        give the same prompts for K steps; a state is kept while its prompt is given."""
        return self.learn(self.sample(prompts, step))

    def sample(self, prompts: Sequence[Prompt], step: int) -> list[Rolled]:
        """The rollouts of an update; prompts are joined as `prompts_per_pass` says."""
        known = self._captured if step % self.settings.replay.refresh_every else {}
        rolled = []
        self._captured = {}
        for prompt in joined(prompts, self.settings.replay.prompts_per_pass):
            name = prompt.questions[0].prompt_id
            group = self.settings.learner.group
            config = self.settings.rollout
            rolled.append(
                self.collector.collect(prompt, config, group, f"step {step}", known.get(name))
            )
            if self.settings.replay.refresh_every > 1:
                captured = rolled[-1].captured
                assert captured is not None
                self._captured[name] = captured
        return rolled

    def learn(self, rolled: Sequence[Rolled]) -> dict[str, float]:
        """The optimizer steps of one update on what was sampled, here or elsewhere."""
        rolled = [item for item in rolled if item.responses]
        counts = self._count(rolled)
        tally = Tally(valued=self.value_head is not None)
        for item in rolled:
            tally.rewards(item)
            if self.reference is not None:
                tokens = item.prompt.tokens.to(self.replay.passes.device)
                leaves = self.reference.log_probs(tokens, item.nodes())
                item.ref = _columns(item.of_responses(leaves))[0]
            if not any(group.own or group.recorded is None for group in item.groups):
                item.old = [lp for group in item.groups for lp in group.recorded or ()]
        norm = 0.0
        for epoch in range(self.settings.learner.inner_epochs):
            self.optimizer.zero_grad()
            try:
                for item in rolled:
                    self._differentiate(item, counts, epoch, tally)
            except BaseException:
                self.optimizer.zero_grad()
                raise
            norm = self._step(counts[0])
        metrics = tally.metrics(self.comm)
        metrics["train/loss"] /= self.settings.learner.inner_epochs
        return metrics | {"grad_norm": norm}

    def _count(self, rolled: Sequence[Rolled]) -> tuple[Totals, int]:
        """Responses, tokens and unequal pairs of the update, over all ranks."""
        responses = [r for item in rolled for r in item.responses]
        pairs = sum(len(winning_pairs(g.rewards)) for item in rolled for g in item.groups)
        counts = torch.tensor([len(responses), sum(map(len, responses)), pairs])
        if self.comm is not None:
            counts = counts.to(self.comm.device)
            self.comm.all_reduce(counts, "totals", "sum")
        n, tokens, pairs = counts.tolist()
        return Totals(n, tokens), pairs

    def _differentiate(
        self, item: Rolled, counts: tuple[Totals, int], epoch: int, tally: Tally
    ) -> None:
        """Add the gradient of one prompt's groups to .grad."""
        loss_fn = self._loss(item, counts)
        fresh = item.captured if epoch == 0 else None  # a step makes a captured prompt old
        prompt = item.prompt.tokens.to(self.replay.passes.device)
        recaptured = False
        if self.settings.learner.naive:
            loss, leaves = reference.step(
                self.model, prompt, item.nodes(), loss_fn, self.value_head
            )
        else:
            out = self.replay.step(prompt if fresh is None else fresh, item.nodes(), loss_fn)
            loss, leaves = out.loss, out.log_probs[0]
            tally.replay(out)
            if self._speedup is None:
                self._speedup = Speedup(self.replay, self.settings.objective.pairwise)
            tally.flops(*self._speedup.flops(item))
            recaptured = out.drift is not None and out.drift.recaptured
        new, values = _columns(item.of_responses(leaves))
        if epoch == 0 and not recaptured:
            tally.selfcheck(self._compare(item, new))
        if item.old is None:
            item.old = new
        if values is not None:
            item.values = values if item.values is None else item.values
            _, returns = self.criterion.returns(item.rewards, item.values)
            tally.values(values, returns)
        tally.step(loss, new, item, self.criterion)

    def _loss(self, item: Rolled, counts: tuple[Totals, int]) -> Any:
        totals, pairs = counts
        if self.settings.objective.pairwise:
            assert item.ref is not None
            ref, chosen = item.ref, _pairs(item)
            return lambda leaves: self.criterion.pair_loss(
                item.of_responses(leaves), ref, chosen, pairs
            )
        leading = item.leading()
        of_groups = torch.cat([self.criterion.advantages(g.rewards) for g in item.groups])

        def together(chosen: Sequence[int], leaves: Branches) -> Tensor:
            own = [leaf[leading[i] :] for i, leaf in zip(chosen, leaves, strict=True)]
            new, values = _columns(own)
            old = [leaf.detach() for leaf in new]
            if item.old is not None:
                old = [item.old[i].to(leaf.dtype) for i, leaf in zip(chosen, new, strict=True)]
            ref = None if item.ref is None else [item.ref[i] for i in chosen]
            if values is None:
                return self.criterion.loss(new, old, ref, of_groups[list(chosen)], totals)
            first = [value.detach() for value in values]
            if item.values is not None:
                first = [item.values[i] for i in chosen]
            advantages, returns = self.criterion.returns(item.rewards[list(chosen)], first)
            loss = self.criterion.loss(new, old, ref, advantages, totals)
            return loss + self.criterion.value_loss(values, returns, totals)

        return PerBranch(lambda i, leaf: together([i], [leaf]), together)

    def _compare(self, item: Rolled, new: Sequence[Tensor]) -> float:
        """Largest |difference| from the log-probabilities at sampling, of what was sampled here."""
        worst = 0.0
        tolerance = self.settings.replay.tolerance
        if tolerance is None:
            tolerance = TOLERANCE.get(self.replay.passes.dtype, ROUNDED)
        log_probs = iter(new)
        for group in item.groups:
            scores = [next(log_probs) for _ in group.responses]
            if not group.own or group.recorded is None:
                continue
            apart = (torch.cat(group.recorded) - torch.cat(scores)).abs()
            most = float(apart.max()) if len(apart) else 0.0
            if not most <= tolerance:
                ends = torch.tensor([len(part) for part in scores]).cumsum(0)
                at = int(apart.nan_to_num(nan=float("inf")).argmax())
                response = int((ends <= at).sum())
                raise SelfCheckError(
                    f"prompt {group.question.prompt_id}, response {response}: a log-probability of "
                    f"the replay is {most:.3g} from that at sampling; tolerance {tolerance:g}"
                )
            worst = max(worst, most)
        return worst

    def _step(self, totals: Totals) -> float:
        """Sum gradients over ranks, clip them and take the step; returned is their norm."""
        wanted = [p for p in self.model.parameters() if p.requires_grad]
        for parameter in wanted:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self.comm is not None and self.comm.world_size > 1:
            flat = torch.cat([p.grad.flatten() for p in wanted])
            self.comm.all_reduce(flat, "gradient", "sum")
            for p, part in zip(wanted, torch.split(flat, [p.numel() for p in wanted]), strict=True):
                p.grad.copy_(part.view_as(p))
        limit = self.settings.learner.clip_norm or float("inf")
        norm = float(torch.nn.utils.clip_grad_norm_(wanted, limit))
        if not norm < float("inf"):
            self.optimizer.zero_grad()
            raise NonFiniteError(f"the gradient of the update has norm {norm}")
        if totals.responses:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return norm


def _columns(parts: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor] | None]:
    """Log-probabilities and values of scores [tokens] or [tokens, 2]."""
    if parts and parts[0].ndim == 1:
        return list(parts), None
    return [part[:, 0] for part in parts], [part[:, 1] for part in parts]


def _pairs(item: Rolled) -> Tensor:
    """Unequal pairs of each group, as places among the responses of all."""
    found, first = [], 0
    for group in item.groups:
        found.append(winning_pairs(group.rewards) + first)
        first += len(group.responses)
    return torch.cat(found)


def _check(settings: Settings, model: Any) -> None:
    objective, learner = settings.objective, settings.learner
    if objective.value and not hasattr(model, "value_head"):
        raise InputError("objective.value: the model has no value head, see add_value_head")
    longest = settings.rollout.max_tokens + SHORT
    if settings.replay.prompts_per_pass > 1 and longest > settings.replay.chunk:
        raise InputError(
            f"replay.chunk: must be at least {longest} (rollout.max_tokens and a short question) "
            "with prompts_per_pass above 1"
        )
    if objective.name == "rloo" and learner.inner_epochs > 1:
        raise InputError("learner.inner_epochs: must be 1 with rloo, which has no ratio")
    if settings.replay.refresh_every > 1 and learner.inner_epochs > 1:
        raise InputError("learner.inner_epochs: must be 1 with refresh_every above 1")
    if learner.naive and settings.replay.mode != "exact":
        raise InputError(f"learner.naive: has no mode {settings.replay.mode}")
