"""The config of an arm of `post_train` -> its run, and the model that it publishes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from algorithms.branch_replay.collect import Rolled, given
from algorithms.branch_replay.evaluation import Evaluation
from algorithms.branch_replay.job_config import GIVEN, ArmConfig, JobConfig
from algorithms.branch_replay.learner import Learner, Settings
from algorithms.branch_replay.lora import add_lora, merged, require_mergeable
from algorithms.branch_replay.prompts import Prompt
from algorithms.branch_replay.rollout_row import Rollout
from algorithms.branch_replay.task import Task
from algorithms.branch_replay.training import Training
from algorithms.branch_replay.values import add_value_head
from algorithms.common import model
from algorithms.common.adamw import adamw
from algorithms.common.comm import Comm
from algorithms.common.config import ModelConfig
from algorithms.common.errors import InputError
from algorithms.common.metrics import read_rows


def build(
    config: JobConfig,
    run_dir: Path,
    comm: Comm,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Training:
    """The run of one rank. Raises `InputError`."""
    training, arm = config.training, config.arm
    task = Task(Path(config.prompts_dir), training.reward)
    policy = _load(config, task, comm.device)
    if arm.lora is not None:
        add_lora(policy, arm.lora, training.seed)
        require_mergeable(policy)
    if arm.objective.value:
        add_value_head(policy)
    eos = task.eos(policy)
    learner = Learner(
        policy,
        adamw(policy, arm.optimizer),
        Settings(
            rollout=arm.rollout, replay=arm.replay, objective=arm.objective, learner=arm.learner
        ),
        eos=eos,
        score=lambda question, tokens: task.scored(question, tokens, eos).reward,
        seed=training.seed,
        reference_model=_load(config, task, comm.device) if _needs_another(arm) else None,
        comm=comm,
    )
    prompts, held_out = task.prompts("train"), task.prompts("val")[: training.eval_prompts]
    if len(held_out) < training.eval_prompts:
        raise InputError(
            f"post_train.training.eval_prompts: is {training.eval_prompts}, there are "
            f"{len(held_out)} held-out prompts"
        )
    _require_room([*prompts, *held_out], arm.rollout.max_tokens, policy.config)
    source: Sequence[Prompt] | Sequence[Rolled] = prompts
    if arm.given is not None:
        source = _given(arm, task, prompts, run_dir / GIVEN, comm.device)
        for item in source:
            longest = max(map(len, item.responses), default=0)
            _require_room([item.prompt], longest, policy.config)
    return Training(
        training,
        learner=learner,
        peak_lr=arm.optimizer.lr,
        source=source,
        evaluation=Evaluation(
            held_out,
            task,
            arm,
            samples=training.eval_samples,
            eos=eos,
            seed=training.seed,
            comm=comm,
        ),
        run_dir=run_dir,
        comm=comm,
        stop_requested=stop_requested,
    )


def _given(
    arm: ArmConfig, task: Task, prompts: Sequence[Prompt], path: Path, device: torch.device
) -> list[Rolled]:
    """The rollouts or preferences in `path`, a copy of the file that the arm names. Raises
    `InputError` with the name of that."""
    rows = read_rows(path)
    try:
        if not any("chosen" in row for row in rows):
            found = [Rollout.from_row(row, f"row {n}") for n, row in enumerate(rows, start=1)]
            return given(prompts, found, device)
        if not arm.objective.pairwise:
            raise InputError(
                f"holds preferences, which {arm.objective.name} cannot learn from; dpo and ipo can"
            )
        return task.preferences(rows, device)
    except InputError as error:
        raise InputError(f"{arm.given}: {error}") from error


def published(policy: Any) -> Any:
    """The trained policy as an ordinary model: adapters merged, no value head."""
    if hasattr(policy, "value_head"):
        del policy.value_head
    return merged(policy)


def _needs_another(arm: ArmConfig) -> bool:
    """Whether a second model must be the reference; with adapters it is the first without them."""
    return arm.objective.needs_reference and arm.lora is None


def _require_room(prompts: Sequence[Prompt], max_tokens: int, config: Any) -> None:
    """Raise `InputError` for the first prompt whose responses could outgrow the model."""
    most = getattr(config, "max_position_embeddings", None)
    for prompt in prompts:
        for question in prompt.questions:
            length = len(prompt.tokens) + len(question.tokens)
            if most is not None and length + max_tokens > most:
                raise InputError(
                    f"prompt {question.prompt_id}: {length} tokens and {max_tokens} of a response "
                    f"are more than the model's {most} positions"
                )


def _load(config: JobConfig, task: Task, device: torch.device) -> Any:
    """The policy as it was before any update."""
    policy = model.build(
        ModelConfig(path=config.policy_dir),
        vocab_size=len(task.tokenizer),
        end_of_text=task.tokenizer.eos_token_id,
        seed=config.training.seed,
    )
    dtype = torch.bfloat16 if config.training.precision == "bf16" else torch.float32
    return policy.to(device, dtype)
