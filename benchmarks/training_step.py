"""What our training loop costs over the obvious loop in plain torch, and what a second rank gains.

The model and batch of params.yaml on random tokens, one thread a rank, the first arm's optimizer.
Each round trains three fresh models for the same few steps: by a plain loop, by `Loop` on one rank,
and by `Loop` on two ranks that share the global batch. The first two must end with the same loss,
bit for bit: they do the same work. Clocked are steps only, with what the loop does between them;
evaluation and checkpoint come once, after the last clocked step. Rank 1 idles through what rank 0
measures alone.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch.nn.functional as F
from torch import nn

from algorithms.common import data
from algorithms.common.checkpoint import Checkpoints
from algorithms.common.comm import Comm
from algorithms.common.config import ModelConfig, OptimizerConfig, TrainingConfig
from algorithms.common.files import write_json
from algorithms.common.loop import Loop, learning_rate
from algorithms.common.model import build, parameter_count
from algorithms.lordo.baselines import DataParallel, adamw
from benchmarks.ranks import run_ranks
from benchmarks.report import Figures, cores, run
from benchmarks.timing import interleaved, measured, ratio
from tasks.config import load_params

LEAD = 2
"""Steps before the clock starts: the optimizer's state is made in the first update."""
CLOCKED = 10
STEPS = LEAD + CLOCKED


@dataclass(frozen=True)
class Case:
    """What to train, and how often."""

    model: ModelConfig
    optimizer: OptimizerConfig
    training: TrainingConfig
    vocab_size: int
    rounds: int

    def on(self, ranks: int) -> TrainingConfig:
        """The training config of one round on so many ranks; nothing but steps before its end."""
        return replace(
            self.training,
            ranks=ranks,
            precision="fp32",
            accumulation=1,
            steps=STEPS,
            warmup_steps=min(self.training.warmup_steps, STEPS),
            eval_every=STEPS,
            eval_sequences=ranks,
            checkpoint_every=STEPS,
        )

    def new_model(self) -> nn.Module:
        seed = self.training.seed
        return build(self.model, vocab_size=self.vocab_size, end_of_text=0, seed=seed)


@dataclass(frozen=True)
class Round:
    """Means over the clocked steps of one round, in seconds, and the last step's loss."""

    step: float
    loss: float
    loader: float = 0.0
    optimizer: float = 0.0
    gradient_bytes: float = 0.0
    """Payload per step."""


def main(argv: Sequence[str]) -> int:
    """Command line; returns the exit code."""
    return run("training_step", (__doc__ or "").splitlines()[0], measure, argv)


def measure(quick: bool) -> Figures:
    """All figures at the sizes of params.yaml."""
    params = load_params()
    arm = next(iter(params.pretrain_lordo.arms.values()))
    training, vocab_size = params.pretrain_lordo.training, params.tokens.vocab_size
    rounds = 4 if quick else 40
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
    """What both ranks do; on rank 1 the figures mean nothing."""

    def alone(contestant: Callable[[], Round]) -> Callable[[], Round]:
        def turn() -> Round:
            comm.barrier()
            result = contestant() if comm.rank == 0 else Round(1.0, 0.0)
            comm.barrier()
            return result

        return turn

    def loop_alone() -> Round:
        return loop_round(case, Comm(None, comm.device), folder)

    def loop_together() -> Round:
        return loop_round(case, Comm(comm.group, comm.device), folder)

    results = interleaved(
        {
            "plain": alone(lambda: plain_round(case, folder)),
            "one": alone(loop_alone),
            "two": loop_together,
        },
        case.rounds,
    )
    plain, one, two = results["plain"], results["one"], results["two"]
    for ours, theirs in zip(one, plain, strict=True):
        if ours.loss != theirs.loss:
            raise RuntimeError(f"loss {ours.loss} of Loop is not {theirs.loss} of the plain loop")
    overhead = ratio([r.step for r in one], [r.step for r in plain])
    speedup = ratio([r.step for r in one], [r.step for r in two])
    step, step_2_ranks = measured([r.step for r in one]), measured([r.step for r in two])
    tokens = case.training.global_batch * case.training.sequence_length
    enough_cores = cores() >= comm.world_size  # else times of two ranks say nothing
    parameters = parameter_count(case.new_model())
    return {
        "parameters": parameters,
        "tokens_per_step": tokens,
        "rounds": case.rounds,
        "loop_overhead_pct": 100 * (overhead.median - 1),
        "loop_overhead_pct_spread": 100 * overhead.spread,
        "step_ms": 1000 * step.median,
        "step_ms_spread": 1000 * step.spread,
        "plain_step_ms": 1000 * measured([r.step for r in plain]).median,
        "tokens_per_s": tokens / step.median,
        "loader_ms": 1000 * measured([r.loader for r in plain]).median,
        "optimizer_ms": 1000 * measured([r.optimizer for r in plain]).median,
        "step_2_ranks_ms": 1000 * step_2_ranks.median if enough_cores else None,
        "speedup_2_ranks": speedup.median if enough_cores else None,
        "speedup_2_ranks_spread": speedup.spread if enough_cores else None,
        "gradient_payload_bytes_per_step": two[0].gradient_bytes,
        "gradient_payload_formula_bytes": 4 * parameters,
        **(checkpoint_figures(case, folder) if comm.rank == 0 else {}),
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
        step=_mean_step(ends),
        loss=loss_value,
        loader=statistics.fmean(loader[LEAD:]),
        optimizer=statistics.fmean(update[LEAD:]),
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
        method=DataParallel(model, case.optimizer, comm),
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
        step=_mean_step(ends),
        loss=result["quality"]["train_loss"],
        gradient_bytes=comm.metrics().get("comm/gradients/payload_bytes", 0) / STEPS,
    )


def _mean_step(ends: list[float]) -> float:
    return (ends[-1] - ends[LEAD - 1]) / CLOCKED


def checkpoint_figures(case: Case, folder: Path) -> Figures:
    """Time of one whole checkpoint on one rank, and its size on disk."""
    model = case.new_model()
    optimizer = adamw(model, case.optimizer)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()  # makes its state
    checkpoints = Checkpoints(
        folder / "checkpoints", case.training.keep_checkpoints, Comm(None, parameter.device)
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
