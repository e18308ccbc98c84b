"""One exact GRPO step behind a prompt of two million positions, on one core.

A Falcon-H1 of two layers, each with attention in a window of 1,024 positions and a Mamba2 beside
it: capture, eight branches, sweep and AdamW. The library's Falcon-H1 has no window, so it is
imposed on every call of attention, in full sequences as well. One of the two heads of each Mamba2
forgets over a million positions, so that the loss depends on the first token, which occurs nowhere
else: its embedding must get a gradient. The same model with the same settings is compared with full
sequences at 4,096 positions, in float64.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, FalconH1Config, FalconH1ForCausalLM

from algorithms.branch_replay.config import ReplayConfig
from algorithms.branch_replay.replay import BranchReplay
from benchmarks.float64 import true_float64
from benchmarks.groups import (
    naive_step,
    pin_to_one_core,
    random_group,
    relative_l2,
    take_gradients,
)
from benchmarks.memory import in_fresh_process, reset_resident_peak, resident, resident_peak
from benchmarks.report import Figures, run
from kernels.shared_prefix_attention.reference import dense

WINDOWED = "dense_windowed"
LONG_MEMORY = 1e-6
"""Decay of a Mamba2 head per position, for a time step of 1."""


@dataclass(frozen=True)
class Case:
    """What to run."""

    positions: int = 2_097_152
    response: int = 64
    branches: int = 8
    window: int = 1024
    chunk: int = 1024
    compared: int = 4096
    """Positions of the prompt in the comparison with full sequences."""

    def model(self) -> Any:
        """The same weights in every process."""
        torch.manual_seed(0)
        config = FalconH1Config(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=2 * self.positions,
            mamba_d_ssm=32,
            mamba_n_heads=2,
            mamba_d_state=8,
            mamba_chunk_size=32,
            mamba_rms_norm=True,
            initializer_range=0.1,
            pad_token_id=None,  # the library gives such a token no gradient
            attn_implementation=WINDOWED,
        )
        model = FalconH1ForCausalLM(config)

        def impose(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
            return args, kwargs | {"sliding_window": self.window, "attention_mask": None}

        for layer in model.model.layers:
            layer.self_attn.register_forward_pre_hook(impose, with_kwargs=True)
            with torch.no_grad():
                layer.mamba.A_log[0] = math.log(LONG_MEMORY)
        return model

    def replay(self, model: Any) -> BranchReplay:
        settings = ReplayConfig(chunk=self.chunk, branches_per_pass=self.branches)
        return BranchReplay(model, settings)


@dataclass(frozen=True)
class Done:
    """One step of the long prompt."""

    seconds: float
    peak: int
    """Bytes of the whole process."""
    added: int
    """Of them, what the step added."""


QUICK = 131_072


def main(argv: Sequence[str]) -> int:
    """Command line; returns the exit code."""
    pin_to_one_core()
    return run("long_context", (__doc__ or "").splitlines()[0], measure, argv)


def measure(quick: bool) -> Figures:
    """All figures."""
    return measure_case(Case(positions=QUICK) if quick else Case())


def measure_case(case: Case) -> Figures:
    """All figures of one case; starts a process.

    Raises `RuntimeError` if the first token's embedding gets no gradient.
    """
    error = exact_error(case)
    print(f"error at {case.compared} positions: {error:.2g}", flush=True)
    done = in_fresh_process(long_step, case)
    return {
        "positions": case.positions,
        "seconds": done.seconds,
        "peak_bytes": done.peak,
        "bytes_per_position": done.added / case.positions,
        f"exact_error_{case.compared}": error,
    }


def long_step(case: Case) -> Done:
    """One step in this process."""
    model = case.model()
    group = random_group(model.config.vocab_size, case.positions, case.response, case.branches)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    before = resident()
    reset_resident_peak()
    begun = time.perf_counter()
    case.replay(model).step(group.prompt, group.responses, group.loss)
    optimizer.step()
    seconds = time.perf_counter() - begun
    peak = resident_peak()
    norm = float(model.get_input_embeddings().weight.grad[0].norm())
    print(f"gradient of the first token's embedding: {norm:.2g}", flush=True)
    if not 0 < norm < math.inf:
        raise RuntimeError(f"the first token's embedding has a gradient of norm {norm}")
    return Done(seconds, peak, peak - before)


def exact_error(case: Case) -> float:
    """Relative L2 over all parameters of the replayed gradient from that of full sequences."""
    model = deepcopy(case.model()).double()
    group = random_group(model.config.vocab_size, case.compared, case.response, case.branches)
    with true_float64(model):
        naive_step(model, group)
        truth = take_gradients(model)
        case.replay(model).step(group.prompt, group.responses, group.loss)
        return relative_l2(take_gradients(model), truth)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    scaling: float,
    sliding_window: int,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """All scores of a full sequence at once."""
    out = dense(query, key, value, scale=scaling, window=sliding_window)
    return out.transpose(1, 2), None


AttentionInterface.register(WINDOWED, _attend)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
