"""Groups of responses with their rewards: sampled here, or given by another engine or a log."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from algorithms.branch_replay.config import RolloutConfig
from algorithms.branch_replay.prompts import SHORT, Prompt, Question
from algorithms.branch_replay.refresh import Captured
from algorithms.branch_replay.replay import BranchReplay
from algorithms.branch_replay.rollout_row import Rollout
from algorithms.branch_replay.rollouts import Branch, Response, Sampler
from algorithms.branch_replay.tree import Node
from algorithms.common.errors import InputError
from algorithms.common.seeding import mix

Score = Callable[[Question, Tensor], float]
"""The reward of a response int64 [tokens], its end token included if there is one."""


@dataclass
class Group:
    """The responses to one question."""

    question: Question
    responses: list[Tensor]
    rewards: Tensor
    """float64 [responses]"""
    truncated: list[bool]
    recorded: list[Tensor] | None
    """Log-probabilities at sampling; None where nobody told, as in preferences."""
    own: bool
    """Sampled by the weights that learn from it."""

    def to_rollouts(self) -> list[Rollout]:
        """As they are kept in rows."""
        recorded = self.recorded or [torch.zeros(0)] * len(self.responses)
        columns = zip(self.responses, recorded, self.rewards.tolist(), self.truncated, strict=True)
        return [
            Rollout(self.question.prompt_id, i, tokens.tolist(), log_probs.tolist(), reward, cut)
            for i, (tokens, log_probs, reward, cut) in enumerate(columns)
        ]


@dataclass
class Rolled:
    """A prompt and the groups of its questions."""

    prompt: Prompt
    groups: list[Group]
    captured: Captured | None = None
    """Of the weights that sampled them."""
    ref: list[Tensor] | None = None
    """Log-probabilities of the reference, by response of all groups."""
    old: list[Tensor] | None = None
    """What ratios are taken to, likewise; None: the weights of the first step."""
    values: list[Tensor] | None = None
    """Of the first step, likewise; None before it, or without a value head."""

    @property
    def responses(self) -> list[Tensor]:
        return [response for group in self.groups for response in group.responses]

    @property
    def rewards(self) -> Tensor:
        """float64 [responses]"""
        return torch.cat([group.rewards for group in self.groups])

    def nodes(self) -> list[Node]:
        """Below the prompt; their leaves are the responses of all groups in order."""
        below: list[Node] = []
        for group in self.groups:
            if not group.responses:
                continue
            question = group.question.tokens.to(group.responses[0].device)
            if len(question) <= SHORT:
                below += [
                    Node(torch.cat([question, response]), behind=group.question.behind)
                    for response in group.responses
                ]
            else:
                below.append(Node(question, [Node(r) for r in group.responses], scored=False))
        return below

    def leading(self) -> list[int]:
        """How many log-probabilities of each leaf come before those of its response."""
        found = []
        for group in self.groups:
            n = len(group.question.tokens)
            found += [n if n <= SHORT else 0] * len(group.responses)
        return found

    def of_responses(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """The log-probabilities of leaves without those of questions."""
        return [leaf[n:] for leaf, n in zip(leaves, self.leading(), strict=True)]


class Collector:
    """Samples groups from the model of `replay`, by numbers of `seed`, and scores them."""

    def __init__(self, replay: BranchReplay, eos: Collection[int], score: Score, seed: int) -> None:
        self.replay = replay
        self.eos = eos
        self.score = score
        self.seed = seed

    def collect(
        self, prompt: Prompt, config: RolloutConfig, count: int, tag: str, captured: Captured | None
    ) -> Rolled:
        """`count` responses to each question of `prompt`; `tag` names the occasion, a step or an
        evaluation: the same is sampled again only under the same tag."""
        device = self.replay.passes.device
        if captured is None:
            captured = self.replay.capture(prompt.tokens.to(device))
        branches = [
            Branch(
                mix("rollout", self.seed, tag, q.prompt_id, i), q.tokens.to(device), q.behind or 0
            )
            for q in prompt.questions
            for i in range(count)
        ]
        found = Sampler(self.replay, config, self.eos).sample(captured, branches)
        groups = [
            self._group(question, found[count * i : count * (i + 1)])
            for i, question in enumerate(prompt.questions)
        ]
        return Rolled(prompt, groups, captured)

    def _group(self, question: Question, found: list[Response]) -> Group:
        rewards = [self.score(question, response.tokens) for response in found]
        return Group(
            question,
            [response.tokens for response in found],
            torch.tensor(rewards, dtype=torch.float64),
            [response.truncated for response in found],
            [response.log_probs for response in found],
            own=True,
        )


def given(
    prompts: Iterable[Prompt], rollouts: Iterable[Rollout], device: torch.device
) -> list[Rolled]:
    """Rollouts of another engine by the prompts that they answer; prompts without are left out.

    Raises `InputError` for a rollout of an unknown prompt, and a branch that is there twice.
    """
    by_prompt: dict[str, dict[int, Rollout]] = defaultdict(dict)
    for rollout in rollouts:
        branches = by_prompt[rollout.prompt_id]
        if rollout.branch in branches:
            raise InputError(
                f"branch {rollout.branch} of prompt_id {rollout.prompt_id!r} is there twice"
            )
        branches[rollout.branch] = rollout
    rolled = []
    for prompt in prompts:
        found = [(q, by_prompt.pop(q.prompt_id, None)) for q in prompt.questions]
        groups = [_given(q, [of[b] for b in sorted(of)], device) for q, of in found if of]
        if groups:
            rolled.append(Rolled(prompt, groups))
    for prompt_id in by_prompt:
        raise InputError(f"prompt_id {prompt_id!r} is none of the prompts'")
    return rolled


def preference(question: Question, chosen: Tensor, rejected: Tensor) -> Group:
    """A pair of responses, for `dpo` and `ipo`."""
    rewards = torch.tensor([1.0, 0.0], dtype=torch.float64)
    return Group(question, [chosen, rejected], rewards, [False, False], None, own=False)


def _given(question: Question, rollouts: Sequence[Rollout], device: torch.device) -> Group:
    return Group(
        question,
        [torch.tensor(r.tokens, dtype=torch.long, device=device) for r in rollouts],
        torch.tensor([r.reward for r in rollouts], dtype=torch.float64),
        [r.truncated for r in rollouts],
        [torch.tensor(r.log_probs, dtype=torch.float64, device=device) for r in rollouts],
        own=False,
    )
