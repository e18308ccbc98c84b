"""Responses sampled from a captured prompt, or from several that were captured together.

The prompt is not run again and its state not copied: `decoding.py` lets a batch of branches attend
to it. When a branch ends, the next one takes its row, so the batch stays full while any wait. A
branch may begin with tokens of its own that are fed, not sampled: a question on the prompt.

With several prompts each has as many rows; a row idles while another prompt needs as many.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from algorithms.branch_replay.attention import Run, running
from algorithms.branch_replay.config import RolloutConfig
from algorithms.branch_replay.decoding import Rows
from algorithms.branch_replay.inputs import check_captured, check_tokens
from algorithms.branch_replay.path import accumulator
from algorithms.branch_replay.refresh import Captured
from algorithms.branch_replay.replay import BranchReplay
from algorithms.branch_replay.sampling import choose, uniform
from algorithms.branch_replay.versions import require_fresh
from algorithms.common.errors import InputError


@dataclass(frozen=True)
class Branch:
    """What to sample: from `question` int64 [n] on, which may be empty, by numbers of `seed`."""

    seed: int
    question: Tensor
    behind: int = 0
    """Of several prompts, which it follows."""


@dataclass
class Response:
    """What was sampled, its end token included, and log-probabilities float [tokens]."""

    tokens: Tensor
    log_probs: Tensor
    truncated: bool
    """It has `max_tokens` tokens, the last of which is no end."""


class Sampler:
    """Samples from the model of `replay`; `eos` are the ids that end a response."""

    def __init__(self, replay: BranchReplay, config: RolloutConfig, eos: Collection[int]) -> None:
        self.replay = replay
        self.config = config
        self.eos = frozenset(eos)

    def sample(self, prompt: Captured, branches: Sequence[Branch]) -> list[Response]:
        """A response to each of `branches`, in their order.

        Log-probabilities are those of the whole vocabulary at temperature 1. Raises `InputError`
        for tokens that are not the model's, `StaleStateError` as `BranchReplay.step` does.
        """
        replay = self.replay
        check_captured(prompt, replay.config)
        named = [(f"branches[{i}].question", b.question, False) for i, b in enumerate(branches)]
        check_tokens(replay.model, named)
        for i, branch in enumerate(branches):
            if branch.behind not in range(prompt.prompts):
                raise InputError(
                    f"branches[{i}].behind: is {branch.behind}, of {prompt.prompts} prompts"
                )
        if replay.config.refresh_every == 1:
            require_fresh(prompt.version, replay.model)
        with replay.session(), torch.no_grad():
            return _Batch(self, prompt, branches).run() if branches else []


class _Batch:
    """One call of `sample`: which branch is in which row, and what it has so far."""

    def __init__(self, sampler: Sampler, prompt: Captured, branches: Sequence[Branch]) -> None:
        self.sampler = sampler
        self.prompt = prompt
        self.branches = branches
        self.trunk, self.head = sampler.replay.trunk, sampler.replay.passes.engine.head
        self.config = sampler.config
        self.device = prompt.tokens.device
        last = prompt.tokens.view(prompt.prompts, -1)[:, -1].tolist()
        self.fed = [[last[b.behind], *b.question.tolist()] for b in branches]
        """What a branch is fed before its first sampled token."""
        self.tokens: list[list[int]] = [[] for _ in branches]
        self.log_probs: list[list[float]] = [[] for _ in branches]
        self.waiting = [
            deque(i for i, b in enumerate(branches) if b.behind == p) for p in range(prompt.prompts)
        ]
        """The branches of each prompt that have no row yet."""
        count = min(self.config.batch, max(map(len, self.waiting)))
        self.rows_of = [self._next(p) for p in range(prompt.prompts) for _ in range(count)]
        """The branch of each row, None where it idles."""
        state = prompt.states[prompt.length] if prompt.length else {}
        self.rows = Rows(prompt.path, prompt.length, state, prompt.prompts, count, self.device)

    def run(self) -> list[Response]:
        while self.rows_of:
            self._step()
            self._replace()
        dtype = accumulator(self.sampler.replay.passes.dtype)
        return [
            Response(
                torch.tensor(tokens, dtype=torch.long, device=self.device),
                torch.tensor(log_probs, dtype=dtype, device=self.device),
                tokens[-1] not in self.sampler.eos,
            )
            for tokens, log_probs in zip(self.tokens, self.log_probs, strict=True)
        ]

    def _step(self) -> None:
        """Feed each row its next token; sample for those whose question is over."""
        progress = list(zip(self.rows_of, self.rows.lengths.tolist(), strict=True))
        inputs = [0 if b is None else self._input(b, done) for b, done in progress]
        run = Run(self.prompt.path, self.prompt.length, rows=self.rows)
        with running(run):
            feed = torch.tensor(inputs, dtype=torch.long, device=self.device)[:, None]
            hidden, states = self.trunk.forward(feed, run, self.rows.states)
        self.rows.advance(states)
        sampling = {
            row: b
            for row, (b, done) in enumerate(progress)
            if b is not None and done + 1 >= len(self.fed[b])
        }
        if not sampling:
            return
        assert hidden is not None
        logits = self.head.logits(hidden[list(sampling), 0])
        branches = list(sampling.values())
        numbers = [uniform(self.branches[b].seed, len(self.tokens[b])) for b in branches]
        uniforms = torch.tensor(numbers, dtype=torch.float64, device=logits.device)
        chosen = choose(logits, uniforms, self.config.temperature, self.config.top_p)
        taken = logits.gather(-1, chosen[:, None])[:, 0] - logits.logsumexp(-1)
        for branch, token, value in zip(branches, chosen.tolist(), taken.tolist(), strict=True):
            self.tokens[branch].append(token)
            self.log_probs[branch].append(value)

    def _input(self, branch: int, done: int) -> int:
        fed = self.fed[branch]
        return fed[done] if done < len(fed) else self.tokens[branch][done - len(fed)]

    def _replace(self) -> None:
        """Rows whose branch has ended go to those that wait; what no prompt needs is dropped."""
        prompts = len(self.waiting)
        count = len(self.rows_of) // prompts
        for row, branch in enumerate(self.rows_of):
            if branch is None or not self._ended(branch):
                continue
            self.rows_of[row] = self._next(row // count)
            if self.rows_of[row] is not None:
                self.rows.restart(row)
        parts = [range(p * count, (p + 1) * count) for p in range(prompts)]
        # Rows with a branch come first.
        ordered = [sorted(part, key=lambda row: self.rows_of[row] is None) for part in parts]
        needed = max(sum(self.rows_of[row] is not None for row in part) for part in parts)
        if needed < count:
            kept = [row for part in ordered for row in part[:needed]]
            self.rows_of = [self.rows_of[row] for row in kept]
            if kept:
                self.rows.select(kept)

    def _next(self, prompt: int) -> int | None:
        return self.waiting[prompt].popleft() if self.waiting[prompt] else None

    def _ended(self, branch: int) -> bool:
        tokens = self.tokens[branch]
        ended = bool(tokens) and tokens[-1] in self.sampler.eos
        return ended or len(tokens) >= self.config.max_tokens
