"""One run: a warm start, updates on prompts never seen before, and a held-out curve.

Seconds are those that the process had of its core, in updates alone: one thread, and neither
evaluation nor other processes count.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from algorithms.branch_replay.collect import Collector, Rolled
from algorithms.branch_replay.config import LearnerConfig, ReplayConfig, RolloutConfig
from algorithms.branch_replay.learner import Learner, Settings
from algorithms.branch_replay.lookup import END, LookupConfig, rows, vocabulary
from algorithms.branch_replay.prompts import Prompt, Question, joined
from algorithms.branch_replay.refresh import cosine
from algorithms.branch_replay.replay import BranchReplay
from algorithms.branch_replay.warm_start import warm_start
from algorithms.common import model as models
from benchmarks.rl_study import naive
from benchmarks.rl_study.setting import Arm, Job, Setting, Start
from benchmarks.study.code import code_hash
from benchmarks.study.queue import Result

LONGEST = 3
"""Tokens of an answer: two values and the end."""
TOGETHER = 32
"""Prompts run as one batch."""
WARM_UP = 10
"""Updates."""
CHUNK = 16
"""Tokens; mode `truncated` differentiates the last 16 of the prompt."""
STEP, HOTTEST = 1.05, 20.0
"""By which a temperature moves in an update, and its highest; 1 is the lowest."""
NEVER = 1e9
"""No drift is large enough to recapture a prompt before its time."""


class Run:
    """A model in training; `update` trains on the next prompts."""

    def __init__(self, arm: Arm, setting: Setting, seed: int, folder: Path) -> None:
        self.arm, self.setting, self.seed = arm, setting, seed
        self.model, self.started_s = started(setting.start, seed, folder)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.0
        )
        self.learner = learner(self.model, self.optimizer, arm, setting, seed)
        self.done = 0
        self.selfcheck = 0.0

    def update(self, prompts: Sequence[Prompt]) -> None:
        """One update of the arm's."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.arm.lr * schedule(self.done, self.setting.updates)
        rolled = self.learner.sample(prompts, self.done)
        if self.arm.reward is not None:
            self._adapt(rolled, self.arm.reward)
        if self.arm.shuffled:
            shuffle(rolled, f"{self.seed}/{self.done}")
        if self.arm.mode == "naive":
            naive.learn(self.model, self.optimizer, self.learner.criterion, rolled)
        else:
            metrics = self.learner.learn(rolled)
            self.selfcheck = max(self.selfcheck, metrics["selfcheck/max"])
        self.done += 1

    def prompts(self, step: int) -> list[Prompt]:
        """Of an update, equal for all arms."""
        step -= step % self.arm.reuse
        tasks = self.setting.mixed or (self.setting.task,)
        count = self.setting.prompts // len(tasks)
        return [
            prompt
            for i, task in enumerate(tasks)
            for prompt in lookups(task, count, self.seed, f"train {step}/{i}")
        ]

    def _adapt(self, rolled: Sequence[Rolled], reward: float) -> None:
        """Set the temperature of the next update's rollouts."""
        settings = self.learner.settings
        found = torch.cat([group.rewards for item in rolled for group in item.groups]).mean()
        factor = STEP if found > reward else 1 / STEP
        temperature = min(HOTTEST, max(1.0, settings.rollout.temperature * factor))
        rollout = replace(settings.rollout, temperature=temperature)
        self.learner.settings = replace(settings, rollout=rollout)


def train(job: Job, folder: Path) -> Result:
    """Run `job`. `curve` holds updates, seconds and sampled accuracy on the test prompts;
    `validation` is the mean of the last points on others."""
    begun = time.process_time()
    setting = job.setting
    run = Run(job.arm, setting, job.seed, folder)
    test, validation = (
        lookups(setting.task, setting.held_out, job.seed, split) for split in ("test", "validation")
    )
    curve = [(0, 0.0, accuracy(run, test))]
    cosines = [compare(run, 0)] if job.arm.compared else []
    chosen: list[float] = []
    seconds, each = 0.0, []
    end = setting.until or setting.updates
    while run.done < end:
        prompts = run.prompts(run.done)
        before = time.process_time()
        run.update(prompts)
        each.append(time.process_time() - before)
        seconds += each[-1]
        if run.done % setting.evaluate_every == 0:
            curve.append((run.done, seconds, accuracy(run, test)))
            if run.done > end - 3 * setting.evaluate_every:
                chosen.append(accuracy(run, validation))
        if job.arm.compared and run.done in (end // 2, end):
            cosines.append(compare(run, run.done))
    return {
        "curve": curve,
        "validation": statistics.fmean(chosen),
        "greedy": accuracy(run, test, greedy=True),
        "alike": accuracy(run, [p for p in test if alike(p)]),
        "others": accuracy(run, [p for p in test if not alike(p)]),
        "cosines": cosines,
        "selfcheck": run.selfcheck,
        "update_s": statistics.median(each),
        "started_s": run.started_s,
        "seconds": time.process_time() - begun,
    }


def schedule(done: int, updates: int) -> float:
    """Of the learning rate, as a share of its peak: warm-up, then linear to a tenth."""
    return min(1.0, (done + 1) / WARM_UP) * (1 - 0.9 * done / updates)


def learner(
    model: nn.Module, optimizer: torch.optim.Optimizer, arm: Arm, setting: Setting, seed: int
) -> Learner:
    """The learner of an arm; its reference is the model as it is now."""
    replay = ReplayConfig(
        mode="exact" if arm.mode == "naive" else arm.mode,
        truncated_chunks=1 if arm.mode == "truncated" else 0,
        chunk=CHUNK if arm.mode == "truncated" else 1024,
        branches_per_pass=setting.group,
        prompts_per_pass=TOGETHER,
        refresh_every=1 if arm.recapture else arm.reuse,
        refresh_bound=NEVER,
    )
    settings = Settings(
        rollout=RolloutConfig(max_tokens=LONGEST, batch=setting.group),
        replay=replay,
        objective=arm.objective,
        learner=LearnerConfig(group=setting.group, inner_epochs=arm.inner_epochs),
    )
    reference = copy.deepcopy(model) if arm.objective.needs_reference else None
    return Learner(
        model,
        optimizer,
        settings,
        eos=[eos()],
        score=right,
        seed=seed,
        reference_model=reference,
    )


def accuracy(run: Run, prompts: Sequence[Prompt], greedy: bool = False) -> float:
    """The share of right responses, sampled at temperature 1 by numbers that never change."""
    config = RolloutConfig(
        max_tokens=LONGEST, batch=run.setting.samples, temperature=0.0 if greedy else 1.0
    )
    replay = BranchReplay(run.model)
    collector = Collector(replay, [eos()], right, run.seed)
    rewards = [
        group.rewards
        for prompt in joined(prompts, 4 * TOGETHER)
        for group in collector.collect(
            prompt, config, 1 if greedy else run.setting.samples, "held out", None
        ).groups
    ]
    return float(torch.cat(rewards).mean())


class Kept(torch.optim.SGD):
    """Takes no step, but keeps the gradient that it would take it by."""

    gradient: list[Tensor]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        self.gradient = [parameter.grad.clone() for parameter in group["params"]]


def compare(run: Run, step: int) -> float:
    """Cosine between the gradients of `response_only` and `exact` on the model as it is: the mean
    over three batches that no update sees."""
    model = copy.deepcopy(run.model)
    found = []
    for i in range(3):
        prompts = lookups(run.setting.task, run.setting.gradients, run.seed, f"compared {step}/{i}")
        gradients = []
        for mode in ("response_only", "exact"):
            optimizer = Kept(model.parameters(), lr=0.0)
            arm = Arm(lr=0.0, mode=mode)
            learner(model, optimizer, arm, run.setting, run.seed).update(prompts, step)
            gradients.append(optimizer.gradient)
        found.append(cosine(*gradients))
    return statistics.fmean(found)


def lookups(config: LookupConfig, count: int, seed: int, split: str) -> list[Prompt]:
    """`count` prompts with a question each, in one piece. Symbols are those of the whole task, of
    which `config` may use fewer."""
    places = {symbol: i for i, symbol in enumerate(vocabulary(LookupConfig()))}
    nothing = torch.zeros(0, dtype=torch.long)
    found = []
    for row in rows(config, count, seed, split):
        ids = [places[s] for s in f"{row['prompt']} {row['question']}".split()]
        answer = torch.tensor([places[s] for s in f"{row['answer']} {END}".split()])
        question = Question(row["prompt_id"], nothing, {"answer": answer})
        found.append(Prompt(torch.tensor(ids), [question]))
    return found


def alike(prompt: Prompt) -> bool:
    """Whether another record has the same first value: then what followed it before is no answer,
    and the key has to be looked up for the second value as well."""
    symbols = vocabulary(LookupConfig())
    tokens = prompt.tokens.tolist()
    (question,) = prompt.questions
    value = int(question.row["answer"][0])
    pairs = zip(tokens, tokens[1:], strict=False)
    return sum(1 for a, b in pairs if b == value and symbols[a].startswith("k")) > 1


def right(question: Question, tokens: Tensor) -> float:
    """1 for both values and the end."""
    return float(torch.equal(tokens, question.row["answer"]))


def eos() -> int:
    return vocabulary(LookupConfig()).index(END)


def shuffle(rolled: Sequence[Rolled], tag: str) -> None:
    """Deal the rewards of an update anew over all of its responses."""
    groups = [group for item in rolled for group in item.groups]
    rewards = torch.cat([group.rewards for group in groups]).tolist()
    random.Random(f"shuffled/{tag}").shuffle(rewards)
    for group in groups:
        own = [rewards.pop() for _ in group.responses]
        group.rewards = torch.tensor(own, dtype=group.rewards.dtype)


def started(start: Start, seed: int, folder: Path) -> tuple[nn.Module, float]:
    """A warm start and the seconds it took; made once, kept in `folder`."""
    task = LookupConfig()
    model = models.build(
        start.model, vocab_size=len(vocabulary(task)), end_of_text=eos(), seed=seed
    )
    told = json.dumps([start.to_dict(), seed, _code()], sort_keys=True)
    path = folder / f"start-{hashlib.sha256(told.encode()).hexdigest()[:20]}.pt"
    if not path.is_file():
        begun = time.process_time()
        warm_start(
            model,
            task,
            seed=seed,
            stages=start.stages,
            accuracy=start.accuracy,
            further=start.further,
            further_steps=start.steps,
        )
        kept = {"model": model.state_dict(), "seconds": time.process_time() - begun}
        temporary = path.with_suffix(f".{os.getpid()}")
        torch.save(kept, temporary)
        temporary.replace(path)
    kept = torch.load(path)
    model.load_state_dict(kept["model"])
    return model, kept["seconds"]


_code = lru_cache(maxsize=1)(lambda: code_hash("algorithms.branch_replay.warm_start"))
