"""Configs of stages `policy` and `post_train`, and names of what their jobs leave; `config.py` has
the configs of engine and updates."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from algorithms.branch_replay.config import (
    LearnerConfig,
    LoRAConfig,
    ObjectiveConfig,
    ReplayConfig,
    RolloutConfig,
)
from algorithms.branch_replay.lookup import LookupConfig
from algorithms.common.config import (
    AdamWConfig,
    Config,
    RunConfig,
    SharedJobConfig,
    require,
    require_positive,
)

COMPLETIONS = "completions.jsonl"
"""In the run directory, a row a completion: what held-out prompts were answered."""
ROLLOUTS = "rollouts"
"""Likewise, a file a rank: what was learned from."""
GIVEN = "given.jsonl"
"""Likewise: rollouts or preferences to learn from, which the parent process writes."""


@dataclass(frozen=True, kw_only=True)
class WarmStartConfig(Config):
    """A supervised start on the lookup task, through prompts that grow; see `warm_start.py`."""

    stages: list[list[int]] = field(default_factory=lambda: [[3, 0], [4, 0]])
    """[records, filler] of its prompts, one after the other."""
    accuracy: float = 0.85
    """Share of right answers, a running mean, at which a stage ends."""
    further: list[int] = field(default_factory=lambda: [6, 4])
    """[records, filler] of the last steps."""
    further_steps: int = 10
    most_steps: int = 2000
    """Steps after which the stages end whatever was learned."""
    lr: float = 3e-3

    def __post_init__(self) -> None:
        require_positive(self, "most_steps", "lr")
        require(self.further_steps >= 0, "further_steps", "must not be negative")
        require(0 < self.accuracy < 1, "accuracy", "must be in (0, 1)")
        for name, stages in (("stages", self.stages), ("further", [self.further])):
            known = all(len(s) == 2 and s[0] > 0 and s[1] >= 0 for s in stages)
            require(known, name, "must be records, at least 1, and filler, not negative")


@dataclass(frozen=True, kw_only=True)
class PostTrainingConfig(RunConfig):
    """What the arms of `post_train` share."""

    ranks: int
    """Processes; prompts are split over them, a rank may have none."""
    backend: Literal["gloo", "nccl"] = "gloo"
    """Chosen here, recorded in env.json, never swapped silently. gloo: CPU, nccl: CUDA."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Of weights, and so of all else; no autocast."""
    reward: str = "exact_match"
    """`module:function`, or one of exact_match, number, regex."""
    prompts: int
    """Texts per update over all ranks, each with all of its questions."""
    eval_prompts: int
    """Size of the fixed held-out set: the first texts of the split."""
    eval_samples: int = 4
    """Responses that are sampled to each held-out question, beside the greedy one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "ranks", "prompts", "eval_prompts", "eval_samples")
        require(":" in self.reward or self.reward.isidentifier(), "reward", "is not a name")


@dataclass(frozen=True, kw_only=True)
class ArmConfig(Config):
    """One way to learn from rewards."""

    optimizer: AdamWConfig
    rollout: RolloutConfig
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    lora: LoRAConfig | None = None
    """Adapters to train in place of the weights; they are merged into what is published."""
    given: str | None = None
    """A jsonl or Parquet file to learn from: rollouts with log-probabilities, of another engine or
    a log; for dpo and ipo also preferences. None: responses are sampled."""

    def __post_init__(self) -> None:
        known = self.given is None or self.replay.refresh_every == 1
        require(known, "given", "needs replay.refresh_every 1: nothing is captured to be kept")

    @property
    def greedy(self) -> RolloutConfig:
        """How held-out questions are answered once."""
        return replace(self.rollout, temperature=0.0, top_p=1.0)

    @property
    def sampled(self) -> RolloutConfig:
        """How they are answered by the policy as it is."""
        return replace(self.rollout, temperature=1.0, top_p=1.0)


@dataclass(frozen=True, kw_only=True)
class PolicyJobConfig(SharedJobConfig):
    """The whole config.json of `tasks.jobs.policy`."""

    INPUTS: ClassVar[tuple[str, ...]] = ("prompts_dir",)

    prompts_dir: str
    """Folder that the stage `prompts` wrote, absolute."""
    seed: int
    """Of the initial weights, where there are none to load, and of the warm start."""
    lookup: LookupConfig | None
    """The task of the warm start."""
    warm_start: WarmStartConfig | None
    """None: the model as it is."""

    @property
    def steps(self) -> int:
        if self.warm_start is None:
            return 0
        return self.warm_start.most_steps + self.warm_start.further_steps

    @property
    def ranks(self) -> int:
        return 1


@dataclass(frozen=True, kw_only=True)
class JobConfig(SharedJobConfig):
    """The whole config.json of `tasks.jobs.post_train`."""

    INPUTS: ClassVar[tuple[str, ...]] = ("prompts_dir", "policy_dir")

    prompts_dir: str
    """Folder that the stage `prompts` wrote, absolute."""
    policy_dir: str
    """What all arms start from, and refer to: the folder that the stage `policy` wrote."""
    training: PostTrainingConfig
    arm: ArmConfig

    @property
    def steps(self) -> int:
        return self.training.steps

    @property
    def ranks(self) -> int:
        return self.training.ranks

    @property
    def gpus(self) -> int:
        return self.training.ranks if self.training.backend == "nccl" else 0
