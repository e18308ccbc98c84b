"""What our training loop costs over the obvious loop in plain torch, and what a second rank gains.

The model and batch of params.yaml on random tokens, one thread a rank, the first arm's optimizer.
Each round trains three fresh models for the same few steps: by a plain loop, by `Loop` on one rank,
and by `Loop` on two ranks that share the global batch. The first two must end with the same loss,
bit for bit: they do the same work. A round's time is that of its best step, for other work on the
machine can only add to it; `Loop` writes its row of metrics in every step, so the best has it too.
Evaluation and checkpoint come once, after the clock has stopped. Rank 1 idles through what rank 0
measures alone.
"""

from __future__ import annotations

import itertools
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from algorithms.common import data
from algorithms.common.adamw import adamw
from algorithms.common.checkpoint import Checkpoints
from algorithms.common.comm import Comm
from algorithms.common.config import ModelConfig, OptimizerConfig, TrainingConfig
from algorithms.common.files import write_json
from algorithms.common.loop import Loop, learning_rate
from algorithms.common.model import build, parameter_count
from algorithms.lordo import methods
from algorithms.lordo.config import ArmConfig
from benchmarks.ranks import run_ranks
from benchmarks.report import Figures, cores, run
from benchmarks.timing import interleaved, measured, ratio
from tasks.config import load_params

LEAD = 2
"""Steps before the clock starts: the optimizer's state is made in the first update."""
STEPS = LEAD + 10


@dataclass(frozen=True)
class Case:
    """What to train, and how often."""

    model: ModelConfig
    optimizer: OptimizerConfig
    training: TrainingConfig
    vocab_size: int
    rounds: int

    @property
    def tokens_per_step(self) -> int:
        return self.training.global_batch * self.training.sequence_length

    def on(self, ranks: int) -> TrainingConfig:
        """The training config of one round on so many ranks; nothing but steps before its end."""
        return replace(
            self.training,
            ranks=ranks,
            precision="fp32",
            accumulation=1,
            steps=STEPS,
            warmup_steps=min(self.training.warmup_steps, STEPS),
            log_every=1,
            eval_every=STEPS,
            eval_sequences=ranks,
            checkpoint_every=STEPS,
        )

    def new_model(self) -> nn.Module:
        seed = self.training.seed
        return build(self.model, vocab_size=self.vocab_size, end_of_text=0, seed=seed)


@dataclass(frozen=True)
class Round:
    """Best times among the clocked steps of one round, in seconds, and the last step's loss."""

    step: float
    loss: float
    loader: float = 0.0
    optimizer: float = 0.0
    gradient_bytes: float = 0.0
    """Payload per step."""


IDLE = Round(math.nan, math.nan)
"""What a rank has to say of a round that it only waited through."""


def main(argv: Sequence[str]) -> int:
    """Command line; returns the exit code."""
    return run("training_step", (__doc__ or "").splitlines()[0], measure, argv)


def measure(quick: bool) -> Figures:
    """All figures at the sizes of params.yaml."""
    params = load_params()
    arm = next(iter(params.pretrain_lordo.arms.values()))
    training, vocab_size = params.pretrain_lordo.training, params.tokens.vocab_size
    rounds = 3 if quick else 24
    return measure_case(Case(params.model, arm.optimizer, training, vocab_size, rounds))


def measure_case(case: Case) -> Figures:
    """All figures of one case; starts two processes."""
    with tempfile.TemporaryDirectory(prefix="training-step-") as folder:
        write_tokens(Path(folder), case)
        figures: Figures = run_ranks(_measure_on_rank, 2, case, Path(folder))
    return figures


def write_tokens(folder: Path, case: Case) -> None:
    """Shards of random tokens: each step of a round has windows of its own."""
    generator = np.random.default_rng(0)
    sequences = {"train": STEPS * case.training.global_batch, "val": 2}
    splits = {}
    for split, count in sequences.items():
        tokens = generator.integers(
            case.vocab_size, size=count * case.training.sequence_length + 1, dtype=np.uint16
        )
        (folder / split).mkdir()
        tokens.astype("<u2").tofile(folder / split / "00000.bin")
        splits[split] = {"shards": [{"file": f"{split}/00000.bin", "tokens": len(tokens)}]}
    np.save(folder / "token_bytes.npy", np.ones(case.vocab_size, dtype=np.int32))
    manifest = {
        "vocab_size": case.vocab_size,
        "dtype": "uint16",
        "end_of_text_id": 0,
        "bytes_per_token_bytes": 1.0,
        "splits": splits,
    }
    write_json(folder / "MANIFEST.json", manifest)


def _measure_on_rank(comm: Comm, case: Case, folder: Path) -> Figures:
    """What both ranks do; rank 0 has the figures."""

    def alone(contestant: Callable[[], Round]) -> Callable[[], Round]:
        def turn() -> Round:
            comm.barrier()
            result = contestant() if comm.rank == 0 else IDLE
            comm.barrier()
            return result

        return turn

    contestants = {
        "plain": alone(lambda: plain_round(case, folder)),
        "one": alone(lambda: loop_round(case, Comm(None, comm.device), folder)),
        "two": lambda: loop_round(case, Comm(comm.group, comm.device), folder),
    }
    results = interleaved(contestants, case.rounds)
    if comm.rank != 0:
        return {}
    return {
        "rounds": case.rounds,
        **step_figures(case, results["plain"], results["one"]),
        **two_rank_figures(case, results["one"], results["two"]),
        **checkpoint_figures(case, folder),
    }


def step_figures(case: Case, plain: list[Round], one: list[Round]) -> Figures:
    """`Loop` on one rank against the plain loop. Raises `RuntimeError` if their losses differ."""
    for ours, theirs in zip(one, plain, strict=True):
        if ours.loss != theirs.loss:
            raise RuntimeError(f"loss {ours.loss} of Loop is not {theirs.loss} of the plain loop")
    overhead = ratio([r.step for r in one], [r.step for r in plain])
    step = measured([r.step for r in one])
    return {
        "tokens_per_step": case.tokens_per_step,
        "loop_overhead_pct": 100 * (overhead.median - 1),
        "loop_overhead_pct_spread": 100 * overhead.spread,
        "step_ms": 1000 * step.median,
        "step_ms_spread": 1000 * step.spread,
        "plain_step_ms": 1000 * measured([r.step for r in plain]).median,
        "tokens_per_s": case.tokens_per_step / step.median,
        "loader_ms": 1000 * measured([r.loader for r in plain]).median,
        "optimizer_ms": 1000 * measured([r.optimizer for r in plain]).median,
    }


def two_rank_figures(case: Case, one: list[Round], two: list[Round]) -> Figures:
    """Two ranks against one at the same global batch; no times where they share a core."""
    speedup = ratio([r.step for r in one], [r.step for r in two])
    step = measured([r.step for r in two])
    timed = cores() >= 2
    parameters = parameter_count(case.new_model())
    return {
        "parameters": parameters,
        "step_2_ranks_ms": 1000 * step.median if timed else None,
        "tokens_per_s_2_ranks": case.tokens_per_step / step.median if timed else None,
        "speedup_2_ranks": speedup.median if timed else None,
        "speedup_2_ranks_spread": speedup.spread if timed else None,
        "gradient_payload_bytes_per_step": two[0].gradient_bytes,
        "gradient_payload_formula_bytes": 4 * parameters,
    }


def plain_round(case: Case, tokens_dir: Path) -> Round:
    """The obvious loop: what one would write without this project, but for its batches."""
    config = case.on(ranks=1)
    model = case.new_model()
    optimizer = adamw(model, case.optimizer)
    shards = data.TokenShards(tokens_dir, "train")
    loss_value, loader, update, ends = 0.0, [], [], []
    for step in range(1, STEPS + 1):
        begun = time.perf_counter()
        tokens = data.batch(
            shards,
            seed=config.seed,
            step=step - 1,
            rank=0,
            world_size=1,
            global_batch=config.global_batch,
            length=config.sequence_length,
        )
        loader.append(time.perf_counter() - begun)
        scores = model(input_ids=tokens[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), case.optimizer.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, case.optimizer.lr, config)
        begun = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        ends.append(time.perf_counter())
        update.append(ends[-1] - begun)
        loss_value = loss.item()
    return Round(
        step=_best_step(ends),
        loss=loss_value,
        loader=min(loader[LEAD:]),
        optimizer=min(update[LEAD:]),
    )


def loop_round(case: Case, comm: Comm, folder: Path) -> Round:
    """The same steps by `Loop` and arm `ddp`, on all ranks of `comm`."""
    ends: list[float] = []

    def stop_requested() -> bool:
        """Asked once in every step, so from one call to the next is one step."""
        ends.append(time.perf_counter())
        return False

    run_dir = folder / "run"
    if comm.rank == 0:
        run_dir.mkdir()
    model = case.new_model()
    loop = Loop(
        case.on(comm.world_size),
        peak_lr=case.optimizer.lr,
        model=model,
        method=methods.build(model, ArmConfig(optimizer=case.optimizer), comm, seed=0),
        tokens_dir=folder,
        run_dir=run_dir,
        comm=comm,
        stop_requested=stop_requested,
    )
    result = loop.run()
    comm.barrier()
    if comm.rank == 0:
        shutil.rmtree(run_dir)
    comm.barrier()
    return Round(
        step=_best_step(ends),
        loss=result["quality"]["train_loss"],
        gradient_bytes=comm.metrics().get("comm/gradients/payload_bytes", 0) / STEPS,
    )


def _best_step(ends: list[float]) -> float:
    return min(end - begin for begin, end in itertools.pairwise(ends[LEAD - 1 :]))


def checkpoint_figures(case: Case, folder: Path) -> Figures:
    """Time of one whole checkpoint on one rank, and its size on disk."""
    model = case.new_model()
    optimizer = adamw(model, case.optimizer)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()  # makes its state
    checkpoints = Checkpoints(
        folder / "checkpoints", case.training.keep_checkpoints, Comm(None, torch.device("cpu"))
    )
    seconds = []
    for step in range(1, case.rounds + 2):
        begun = time.perf_counter()
        checkpoints.save(step, model, optimizer, {})
        seconds.append(time.perf_counter() - begun)
    newest = max((folder / "checkpoints").glob("step_*"))
    size = sum(file.stat().st_size for file in newest.iterdir())
    return {
        "checkpoint_save_ms": 1000 * measured(seconds[1:]).median,
        "checkpoint_bytes_per_parameter": size / parameter_count(model),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
