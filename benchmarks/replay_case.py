"""What `benchmarks.branch_replay` measures: the model, the groups and a step of ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from algorithms.branch_replay.config import ReplayConfig
from algorithms.branch_replay.planner import Work
from algorithms.branch_replay.replay import BranchReplay
from benchmarks.groups import Group, random_group
from benchmarks.timing import Measured

EIGHT = 8
"""Branches of the measured naive group, and of a pass of ours."""
MOST = 32
LEAST = 2
"""Branches of the smallest group, and of a pass where memory is compared between groups."""

Step = Callable[[], None]
Found = dict[str, Measured | None]
"""Figures before they are flat."""


@dataclass(frozen=True)
class Case:
    """What to measure."""

    width: int = 128
    layers: int = 4
    prompt: int = 4096
    response: int = 64
    chunk: int = 1024
    rounds: int = 5
    long_prompt: int | None = 16384
    long_rounds: int = 2
    error_prompt: int = 1024
    processes: int = 3
    """Fresh ones for each size of group."""
    planned: tuple[tuple[int, int, Work, ReplayConfig], ...] = (
        (192, 3, Work(3000, 96, 6), ReplayConfig(chunk=512, branches_per_pass=3)),
        (64, 6, Work(2500, 200, 4), ReplayConfig(chunk=700, branches_per_pass=4)),
        (256, 2, Work(2048, 33, 12), ReplayConfig(chunk=256, branches_per_pass=12)),
        (192, 3, Work(3000, 96, 6), ReplayConfig(chunk=600, keep_attention=True)),
        (192, 3, Work(3000, 96, 6), ReplayConfig(mode="response_only", chunk=512)),
        (64, 6, Work(5000, 40, 16), ReplayConfig(mode="response_only", chunk=1024)),
    )
    """What the planner is tested with: width, layers, group and settings. None of them is among the
    shapes that its constants were chosen by."""

    def model(self) -> Any:
        """The same weights in every process."""
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=512,
            hidden_size=self.width,
            intermediate_size=11 * self.width // 4,
            num_hidden_layers=self.layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32768,
            attn_implementation="sdpa",
        )
        return LlamaForCausalLM(config)

    def group(self, model: Any, prompt: int, branches: int) -> Group:
        return random_group(model.config.vocab_size, prompt, self.response, branches)

    def replay(self, model: Any, group: Group, mode: Any, branches_per_pass: int = EIGHT) -> Step:
        config = ReplayConfig(
            mode=mode,
            chunk=self.chunk,
            branches_per_pass=branches_per_pass,
            keep_attention=mode == "exact",
        )
        return replay_step(model, group, config)


def replay_step(model: Any, group: Group, config: ReplayConfig) -> Step:
    """Adds the gradient of the group's loss to .grad; made once, called often."""
    replay = BranchReplay(model, config)

    def step() -> None:
        replay.step(group.prompt, group.responses, group.loss)

    return step
