"""What a rank of `benchmarks/thin_network.py` does: train by several arms in turn, clocked.

Each arm trains twice, once with its exchanges and once `alone`: the same work in the same processes
as a world of one, hence without any exchange. Turns are short, so that whatever else slows the
machine down slows all contestants alike. All ranks begin a turn together, and it ends with the
slowest.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from algorithms.common.comm import Comm
from algorithms.common.loop import token_loss
from algorithms.common.model import logits, parameter_count
from algorithms.lordo import methods
from algorithms.lordo.config import ArmConfig
from benchmarks.lordo_study.setting import Setting
from benchmarks.lordo_study.training import new_model
from benchmarks.netns import Port
from benchmarks.study.streams import VOCABULARY

SETTING = Setting()
"""Its model, and its 8 sequences of 64 tokens per worker and step."""
LEARNING_RATE = 1e-3
"""Constant, for all arms: times do not depend on it, and nothing is said of quality."""


@dataclass(frozen=True)
class Plan:
    """What to train."""

    arms: Mapping[str, ArmConfig]
    turns: int
    steps: Mapping[str, int]
    """Steps of an arm in one turn."""
    alone_steps: int
    """The same of an arm alone."""

    def of_turn(self, name: str, alone: bool) -> int:
        return self.alone_steps if alone else self.steps[name]


@dataclass
class Run:
    """What one arm did on one rank."""

    seconds: list[float] = field(default_factory=list)
    """By turn."""
    steps: int = 0
    wire_bytes: int = 0
    """As counted by `Comm`."""
    sent_bytes: int = 0
    """As counted by the interface."""
    calls: int = 0
    """Exchanges."""


@dataclass
class RankRuns:
    """All that a rank has to say."""

    together: dict[str, Run]
    alone: dict[str, Run]
    latency_s: float
    """Of one message: a sum of one value, over the messages that it makes one after the other."""
    parameters: int


class Trainee:
    """One arm on one rank."""

    def __init__(self, arm: ArmConfig, comm: Comm, rank: int) -> None:
        self.comm = comm
        self.rank = rank
        model = new_model(SETTING, seed=0)
        self.parameters = parameter_count(model)
        self.method = methods.build(model, arm, comm, seed=0)
        self.method.prepare(self.batch(0))
        self.method.module.train()
        self.step = 0

    def batch(self, step: int) -> torch.Tensor:
        """Random tokens, int64 `[sequences, tokens + 1]`."""
        generator = torch.Generator().manual_seed(1000 * step + self.rank)
        shape = (SETTING.sequences, SETTING.length + 1)
        return torch.randint(VOCABULARY, shape, generator=generator)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            tokens = self.batch(self.step)
            with self.method.microbatch(last=True):
                scores = logits(self.method.module, tokens[:, :-1])
                token_loss(scores, tokens[:, 1:]).backward()  # type: ignore[no-untyped-call]
            self.method.gradient_norm()
            self.method.update(self.step, LEARNING_RATE)

    def counted(self) -> tuple[int, int]:
        """Wire bytes and exchanges so far, the control plane's too."""
        counters = self.comm.counters.values()
        return sum(c.wire_bytes for c in counters), sum(c.calls for c in counters)


def train_on_rank(port: Port, plan: Plan) -> RankRuns:
    """Every contestant's turns, in turn."""
    rank, device = port.comm.rank, port.comm.device
    runs: dict[bool, dict[str, Run]] = {False: {}, True: {}}
    trainees = {}
    for name, arm in plan.arms.items():
        for alone in (False, True):
            group = None if alone else port.comm.group
            trainees[name, alone] = Trainee(arm, Comm(group, device), rank)
            runs[alone][name] = Run()
    Trainee(next(iter(plan.arms.values())), Comm(None, device), rank).train(2)  # warms torch up
    latency_s = message_latency(port)
    for turn in range(plan.turns):
        for (name, alone), trainee in trainees.items():
            last = turn == plan.turns - 1
            _turn(port, trainee, runs[alone][name], plan.of_turn(name, alone), alone, last)
    parameters = next(iter(trainees.values())).parameters
    return RankRuns(runs[False], runs[True], latency_s, parameters)


def _turn(port: Port, trainee: Trainee, run: Run, steps: int, alone: bool, last: bool) -> None:
    """Train for `steps`, and note what it took; the last turn ends with equal weights."""
    sent = 0 if alone else port.sent_bytes()
    wire_bytes, calls = trainee.counted()
    port.meet()
    begun = time.perf_counter()
    trainee.train(steps)
    if last:
        trainee.method.flush(trainee.step)
    port.meet()
    run.seconds.append(time.perf_counter() - begun)
    run.steps += steps
    if not alone:
        after = trainee.counted()
        run.wire_bytes += after[0] - wire_bytes
        run.calls += after[1] - calls
        run.sent_bytes += port.sent_bytes() - sent


def message_latency(port: Port, rounds: int = 30) -> float:
    """Seconds per message of an all-reduce that hardly has anything to send; the median."""
    value = torch.zeros(1)
    times = []
    for _ in range(rounds):
        port.meet()
        begun = time.perf_counter()
        dist.all_reduce(value, group=port.comm.group)
        times.append(time.perf_counter() - begun)
    return statistics.median(times) / (2 * (port.comm.world_size - 1))
