"""How many times the FLOPs of full sequences an update saves: by `costs.py`, not measured."""

from __future__ import annotations

import torch

from algorithms.branch_replay.collect import Rolled
from algorithms.branch_replay.costs import naive_flops, replay_flops
from algorithms.branch_replay.measure import describe
from algorithms.branch_replay.replay import BranchReplay


class Speedup:
    """FLOPs of gradients by `replay`; objectives of pairs (`pairwise`) take two passes.

    A question is counted in each of its branches and a capture in each step, so where questions are
    long or a capture is used for several steps replay takes less than this says.
    """

    def __init__(self, replay: BranchReplay, pairwise: bool) -> None:
        self.config = replay.config
        self.pairwise = pairwise
        with replay.session(), torch.enable_grad():
            self.shape = describe(replay.trunk)

    def flops(self, item: Rolled) -> tuple[float, float]:
        """Of one optimizer step on an item's groups: by full sequences, and by replay."""
        behind: dict[int | None, list[int]] = {}
        for group in item.groups:
            question = group.question
            branches = behind.setdefault(question.behind, [])
            branches += [len(question.tokens) + len(response) for response in group.responses]
        prompt = item.prompt.tokens.shape[-1]
        found = [self._of_prompt(prompt, branches) for branches in behind.values()]
        return sum(naive for naive, _ in found), sum(replay for _, replay in found)

    def _of_prompt(self, prompt: int, branches: list[int]) -> tuple[float, float]:
        inputs = prompt - 1
        open_tokens = {"exact": inputs, "response_only": 0}.get(
            self.config.mode, self.config.truncated_chunks * self.config.chunk
        )
        twice = self.pairwise or max(branches, default=0) > self.config.chunk
        replay = replay_flops(
            self.shape,
            prompt,
            branches,
            open_tokens=open_tokens,
            passes=2 if twice else 1,
            keep_attention=self.config.keep_attention,
        )
        return naive_flops(self.shape, prompt, branches), replay
