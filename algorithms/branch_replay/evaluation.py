"""Held-out questions, answered greedily and by samples; the same random numbers every time."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from algorithms.branch_replay.collect import Collector
from algorithms.branch_replay.config import RolloutConfig
from algorithms.branch_replay.job_config import ArmConfig
from algorithms.branch_replay.prompts import Prompt, Question
from algorithms.branch_replay.replay import BranchReplay
from algorithms.branch_replay.task import Scored, Task
from algorithms.common.comm import Comm

SHOWN = 6
"""Prompts of which every evaluation shows a completion of each kind."""


class Evaluation:
    """Of `prompts`, the same on all ranks, which share them out."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        task: Task,
        arm: ArmConfig,
        *,
        samples: int,
        eos: Collection[int],
        seed: int,
        comm: Comm,
    ) -> None:
        self.prompts = prompts
        self.task = task
        self.kinds = {"greedy": (arm.greedy, 1), "sampled": (arm.sampled, samples)}
        self.eos = eos
        self.seed = seed
        self.comm = comm

    def run(self, replay: BranchReplay) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Mean rewards of the weights of `replay`, equal on all ranks; on rank 0, rows of the first
        prompts' completions: prompt_id, prompt, completion, reward, decoding."""
        totals = torch.zeros(len(self.kinds), 2, dtype=torch.float64)
        shown: list[tuple[int, dict[str, Any]]] = []
        for number in range(self.comm.rank, len(self.prompts), self.comm.world_size):
            prompt = self.prompts[number]
            captured = replay.capture(prompt.tokens.to(replay.passes.device))
            for place, (kind, (config, count)) in enumerate(self.kinds.items()):
                scored = self._answer(replay, prompt, captured, config, count)
                totals[place, 0] += sum(each.reward for each in scored)
                totals[place, 1] += len(scored)
                if number < SHOWN:
                    shown.append((number, asdict(scored[0]) | {"decoding": kind}))
        totals = totals.to(self.comm.device)
        self.comm.all_reduce(totals, tag="evaluation")
        greedy, sampled = (totals[:, 0] / totals[:, 1]).tolist()
        everyone = self.comm.gather_objects(shown) or []
        ordered = sorted((pair for own in everyone for pair in own), key=lambda pair: pair[0])
        return {"reward/heldout": sampled, "reward/greedy": greedy}, [row for _, row in ordered]

    def _answer(
        self,
        replay: BranchReplay,
        prompt: Prompt,
        captured: Any,
        config: RolloutConfig,
        count: int,
    ) -> list[Scored]:
        """`count` responses to each question of `prompt`."""
        scored: list[Scored] = []

        def score(question: Question, tokens: Tensor) -> float:
            scored.append(self.task.scored(question, tokens, self.eos))
            return scored[-1].reward

        collector = Collector(replay, self.eos, score, self.seed)
        collector.collect(prompt, config, count, "evaluation", captured)
        return scored
