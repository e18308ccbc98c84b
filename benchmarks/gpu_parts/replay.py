"""One replay step of a random model of the shape of Qwen3-0.6B, and the same by full sequences."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from algorithms.branch_replay.config import ReplayConfig
from algorithms.branch_replay.losses import PerBranch
from algorithms.branch_replay.replay import BranchReplay
from benchmarks.gpu import GROUPS, MODES
from benchmarks.gpu_parts.part import Part
from kernels import dispatch
from kernels.shared_prefix_attention import OP

QWEN3 = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
}
TOY = QWEN3 | {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


@dataclass(frozen=True)
class Size:
    """Of a step, in tokens."""

    prompt: int
    response: int = 256
    chunk: int = 2048
    head_chunk: int = 512


@dataclass(frozen=True)
class Taken:
    """What a step took; peak bytes with weights and gradients, None on a CPU."""

    seconds: float
    peak_bytes: int | None


def replay(part: Part, name: str, prompt: int) -> None:
    """Steps of each mode and group size, and of full sequences where they fit."""
    steps = Steps(part, Size(21, 4, 16, 16) if part.dry else Size(prompt))
    part.attempt("warm up", steps.warm_up)
    smallest = GROUPS[0]
    naive = part.attempt(f"{name} naive G={smallest}", lambda: steps.naive(smallest))
    truth: list[Tensor] = []
    if naive is not None:
        part.figure(f"{name}_naive_s_per_branch", naive.seconds / smallest)
        part.figure(f"{name}_naive_peak_bytes", naive.peak_bytes)
        truth = steps.gradients()
    last: dict[str, float] = {}
    for group in GROUPS:
        for mode in MODES:
            # The prompt takes most of a step, so four times the branches take less than twice.
            taken = part.attempt(
                f"{name} {mode} G={group}",
                partial(steps.replay, mode, group),
                2 * last.get(mode, 0.0),
            )
            if taken is None:
                continue
            last[mode] = taken.seconds
            step = f"{name}_{mode}_g{group}"
            part.figure(f"{step}_s", taken.seconds)
            part.figure(f"{step}_peak_bytes", taken.peak_bytes)
            if naive is not None:
                speedup = group / smallest * naive.seconds / taken.seconds
                part.figure(f"{step}_speedup", speedup)
            if truth and (mode, group) == ("exact", smallest):
                error = _distance(steps.gradients(), truth)
                part.figure(f"{name}_gradient_error_vs_naive", error)
    steps.check_twin()


class Steps:
    """A model, a prompt and responses; each step starts without gradients."""

    def __init__(self, part: Part, size: Size) -> None:
        self.part = part
        self.size = size
        torch.manual_seed(0)
        config = Qwen3Config(**(TOY if part.dry else QWEN3), tie_word_embeddings=True)
        dtype = torch.float32 if part.dry else torch.bfloat16
        with torch.device(part.device):
            self.model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
            vocabulary = self.model.config.vocab_size
            self.prompt = torch.randint(vocabulary, (size.prompt,))
            self.responses = list(torch.randint(vocabulary, (max(GROUPS), size.response)))

    def warm_up(self) -> None:
        """Compile what the measured steps run, on the start of the prompt."""
        whole, self.prompt = self.prompt, self.prompt[: self.size.chunk + 17]
        for mode in MODES:
            self.replay(mode, GROUPS[0])
        self.naive(GROUPS[0])
        self.prompt = whole

    def replay(self, mode: str, group: int) -> Taken:
        """A step of the engine."""
        config = ReplayConfig(
            mode=mode,  # type: ignore[arg-type]
            chunk=self.size.chunk,
            head_chunk=self.size.head_chunk,
        )
        engine = BranchReplay(self.model, config)

        loss = PerBranch(partial(self._loss, group))
        return self._taken(lambda: engine.step(self.prompt, self.responses[:group], loss))

    def naive(self, group: int) -> Taken:
        """The same by a full sequence for each branch, one at a time, the head on the response."""
        self.model.set_attn_implementation("sdpa")

        def run() -> None:
            for i, response in enumerate(self.responses[:group]):
                inputs = torch.cat([self.prompt, response[:-1]])[None]
                logits = self.model(
                    input_ids=inputs, use_cache=False, logits_to_keep=len(response)
                ).logits[0]
                log_probs = logits.float().log_softmax(-1).gather(-1, response[:, None])[:, 0]
                self._loss(group, i, log_probs).backward()  # type: ignore[no-untyped-call]

        return self._taken(run)

    def gradients(self) -> list[Tensor]:
        """Copies in host memory, so that they are in nobody's peak."""
        return [p.grad.cpu() for p in self.model.parameters() if p.grad is not None]

    def check_twin(self) -> None:
        """Note a failure unless every attention of the replays ran as Triton, or all on a CPU."""
        calls = dict(dispatch.counters[OP])
        self.part.say(f"attention ran as {calls}")
        if set(calls) != {"cpu" if self.part.dry else "triton"}:
            self.part.failed.append("attention ran as another twin")

    def _loss(self, group: int, branch: int, log_probs: Tensor) -> Tensor:
        """GRPO's on-policy gradient for advantages 1 and -1 in turn."""
        return (-1.0) ** (branch + 1) * log_probs.mean() / group

    def _taken(self, run: Callable[[], object]) -> Taken:
        self.model.zero_grad(set_to_none=True)
        self.part.wait()
        if not self.part.dry:
            torch.cuda.reset_peak_memory_stats()
        begun = time.perf_counter()
        run()
        self.part.wait()
        seconds = time.perf_counter() - begun
        return Taken(seconds, None if self.part.dry else torch.cuda.max_memory_allocated())


def _distance(a: list[Tensor], b: list[Tensor]) -> float:
    """Relative L2 over all parameters, from `b`."""
    apart = sum(float((x.float() - y.float()).square().sum()) for x, y in zip(a, b, strict=True))
    return math.sqrt(apart / sum(float(y.float().square().sum()) for y in b))
