"""How busy the stages of a pipeline are: asynchronous 1F1B against the synchronous schedules.

    python -m benchmarks.pipeline_schedule [--quick] [--json PATH]

P=8: ranks that sleep 50 ms for each microbatch (`sleeping.py`), with real messages, train 400
microbatches, fill and drain included. 16 layers: two in a stage, or one where zero bubble has two
stages on a rank, whose backward it asks for in halves. Utilisation is compute over (P times wall),
by the events of all ranks (`trace.utilisation`). What is printed as `told` takes the time that
stages were told to sleep for the compute: autograd, the optimizer and late wake-ups are loss.
Synchronous schedules update once in M = P microbatches (`_m8`) and once in 2P (`_m16`, and the keys
without a suffix: their better case); the asynchronous pipeline after each.

P=2: a llama of real compute, one core a rank, in turns with 1F1B at M = P, both for the same number
of microbatches; `async_speedup_p2_real` is the ratio of their times, fill and drain included. The
asynchronous pipeline makes twice the updates.

`bytes_vs_formula_pct` is the largest deviation of metered bytes, of any run, from the formula of
docs/async_pipeline.md.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from algorithms.async_pipeline.pipeline import Pipeline
from algorithms.async_pipeline.synchronous import Schedule, Synchronous, placement
from algorithms.async_pipeline.trace import span, utilisation
from algorithms.async_pipeline.update import Factory, Loss
from algorithms.common.comm import Comm
from benchmarks import sleeping
from benchmarks.ranks import run_ranks
from benchmarks.report import Figures, run
from benchmarks.timing import interleaved, measured, ratio

Named = list[tuple[str, nn.Parameter]]
SYNCHRONOUS: tuple[Schedule, ...] = ("gpipe", "one_f_one_b", "zero_bubble")


@dataclass(frozen=True)
class Sleep:
    """What the sleeping ranks train."""

    ranks: int = 8
    layers: int = 16
    seconds: float = 0.05
    """Of one microbatch on one rank, forward and backward."""
    microbatches: int = 400
    shape: tuple[int, int, int] = (1, 512, 32)
    """Of hidden states: sequences, tokens, width; float32."""


@dataclass(frozen=True)
class Real:
    """What the computing ranks train: a llama, on batches of random tokens."""

    ranks: int = 2
    layers: int = 8
    width: int = 128
    vocabulary: int = 512
    sequences: int = 4
    tokens: int = 128
    microbatches: int = 24
    """In a round."""
    rounds: int = 12


@dataclass(frozen=True)
class Run:
    """One schedule on sleeping ranks."""

    utilisation: float
    told: float
    """The same, if nothing but the sleep that stages were told were compute."""
    wall_s: float
    sent: Sent


@dataclass(frozen=True)
class Sent:
    """Bytes of all ranks together."""

    metered: int
    formula: int

    @property
    def deviation_pct(self) -> float:
        return 100 * abs(self.metered / self.formula - 1)


def main(argv: Sequence[str]) -> int:
    """Command line; returns the exit code."""
    return run("pipeline_schedule", (__doc__ or "").splitlines()[0], measure, argv)


def measure(quick: bool) -> Figures:
    """All figures; the quick form trains less of the same."""
    sleep, real = (Sleep(microbatches=96), Real(rounds=3)) if quick else (Sleep(), Real())
    runs: dict[str, Run] = run_ranks(sleep_on_rank, sleep.ranks, sleep)
    _print_runs(f"{sleep.ranks} ranks, {sleep.microbatches} microbatches", runs)
    seconds: dict[str, list[float]]
    seconds, sent = run_ranks(compute_on_rank, real.ranks, real)
    _print_rounds(f"{real.ranks} ranks, {real.microbatches} microbatches", seconds)
    speedup = ratio(seconds["one_f_one_b"], seconds["async"])
    everything = [run.sent for run in runs.values()] + sent
    return utilisations(sleep.ranks, runs) | {
        f"async_speedup_p{real.ranks}_real": speedup.median,
        f"async_speedup_p{real.ranks}_real_spread": speedup.spread,
        "bytes_vs_formula_pct": max(each.deviation_pct for each in everything),
    }


def arms(ranks: int) -> dict[str, tuple[Schedule | None, int]]:
    """Schedules (None: asynchronous) and microbatches per update, by name."""
    found: dict[str, tuple[Schedule | None, int]] = {"async": (None, 1)}
    for schedule in SYNCHRONOUS:
        found |= {f"{schedule}_m{count}": (schedule, count) for count in (ranks, 2 * ranks)}
    return found


def utilisations(ranks: int, runs: Mapping[str, Run]) -> dict[str, float]:
    """Figures of the arms."""
    figures = {}
    for name, found in runs.items():
        schedule, _, microbatches = name.partition("_m")
        key = f"{schedule}_utilisation_p{ranks}"
        figures[f"{key}_m{microbatches}" if microbatches else key] = found.utilisation
        if microbatches == str(2 * ranks):
            figures[key] = found.utilisation
    return figures


def sleep_on_rank(comm: Comm, sleep: Sleep) -> dict[str, Run] | None:
    """Every arm once; on rank 0 what they came to."""
    inputs = torch.zeros(sleep.shape)
    targets = torch.zeros(sleep.shape[:2], dtype=torch.int64)
    found = {}
    for name, (schedule, microbatches) in arms(sleep.ranks).items():
        own = Comm(comm.group, comm.device)  # its meter starts at 0
        here = 1 if schedule is None else len(placement(schedule, sleep.ranks)[0])
        count = here * sleep.ranks
        layers, width = sleep.layers // count, sleep.shape[-1]
        stages = [sleeping.stage(layers, width, sleep.seconds / here) for _ in range(here)]
        mine = pipeline(stages, _sgd, _mean, own, schedule, microbatches)
        mine.run(lambda index: (inputs, targets), sleep.microbatches // microbatches)
        traces = mine.traces()
        sent = total(own, formula_bytes(count, inputs.nbytes, targets.nbytes, sleep.microbatches))
        if traces is not None and sent is not None:
            wall_s = span(traces)
            told = sleep.microbatches * sleep.seconds / wall_s
            found[name] = Run(utilisation(traces), told, wall_s, sent)
    return found if comm.rank == 0 else None


def compute_on_rank(comm: Comm, real: Real) -> tuple[dict[str, list[float]], list[Sent]] | None:
    """On rank 0 the seconds of each round by schedule, and their bytes."""

    def tokens(index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        size = (real.sequences, real.tokens + 1)
        drawn = torch.randint(real.vocabulary, size, generator=generator)
        return drawn[:, :-1], drawn[:, 1:]

    comms = {name: Comm(comm.group, comm.device) for name in ("async", "one_f_one_b")}
    asynchronous = pipeline([decoder(real, comm)], _adamw, _token_loss, comms["async"], None, 1)
    synchronous = pipeline(
        [decoder(real, comm)], _adamw, _token_loss, comms["one_f_one_b"], "one_f_one_b", real.ranks
    )

    def timed(trained: Pipeline | Synchronous, updates: int) -> Callable[[], float]:
        def round() -> float:
            comm.barrier()
            begun = time.perf_counter()
            trained.run(tokens, trained.updates + updates)
            return time.perf_counter() - begun

        return round

    contestants = {
        "async": timed(asynchronous, real.microbatches),
        "one_f_one_b": timed(synchronous, real.microbatches // real.ranks),
    }
    seconds = interleaved(contestants, real.rounds)
    hidden = 4 * real.sequences * real.tokens * real.width
    targets = 8 * real.sequences * real.tokens
    trained = real.microbatches * (real.rounds + 1)
    expected = formula_bytes(real.ranks, hidden, targets, trained)
    sent = [total(each, expected) for each in comms.values()]
    return (seconds, [each for each in sent if each is not None]) if comm.rank == 0 else None


def pipeline(
    stages: list[nn.Module],
    optimizer: Factory,
    loss: Loss,
    comm: Comm,
    schedule: Schedule | None,
    microbatches: int,
) -> Pipeline | Synchronous:
    """The asynchronous one (`schedule` None) or a synchronous one."""
    if schedule is None:
        return Pipeline(stages[0], optimizer, loss, comm, accumulation=microbatches)
    settings: dict[str, Any] = {"schedule": schedule, "microbatches": microbatches}
    return Synchronous(stages, optimizer, loss, comm, **settings)


def decoder(real: Real, comm: Comm) -> nn.Module:
    """This rank's stage of a llama, cut by its costs."""
    # Sleeping ranks import this module, and no transformers.
    from algorithms.async_pipeline.partition import partition
    from algorithms.async_pipeline.stage import cut
    from algorithms.common.config import ModelConfig
    from algorithms.common.model import build

    config = ModelConfig(
        hidden_size=real.width,
        intermediate_size=3 * real.width,
        num_hidden_layers=real.layers,
        tie_word_embeddings=False,
    )
    model = build(config, vocab_size=real.vocabulary, end_of_text=0, seed=0)
    return cut(model, partition(model, comm.world_size, real.tokens))[comm.rank]


def formula_bytes(stages: int, hidden: int, targets: int, microbatches: int) -> int:
    """Of all ranks, given the bytes of a message of hidden states and of one of targets."""
    return microbatches * (2 * (stages - 1) * hidden + targets)


def total(comm: Comm, formula: int) -> Sent | None:
    """On rank 0, of what `comm` has metered on all ranks."""
    everyone = comm.gather_objects(comm.payload_bytes)
    return None if everyone is None else Sent(sum(everyone), formula)


def _sgd(named: Named, stage: int, stages: int) -> Optimizer:
    return SGD([weight for _, weight in named], lr=1e-3)


def _adamw(named: Named, stage: int, stages: int) -> Optimizer:
    return AdamW([weight for _, weight in named], lr=1e-3, fused=True)


def _mean(output: Tensor, targets: Tensor) -> Tensor:
    return output.mean()


def _token_loss(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def _print_runs(title: str, runs: Mapping[str, Run]) -> None:
    table = Table("schedule")
    for column in ("wall s", "utilisation", "told", "bytes", "off %"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, each in runs.items():
        table.add_row(
            name,
            f"{each.wall_s:.1f}",
            f"{each.utilisation:.3f}",
            f"{each.told:.3f}",
            f"{each.sent.metered:,}",
            f"{each.sent.deviation_pct:g}",
        )
    _print(title, table)


def _print_rounds(title: str, seconds: Mapping[str, list[float]]) -> None:
    table = Table("schedule")
    for column in ("s", "spread s"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, rounds in seconds.items():
        found = measured(rounds)
        table.add_row(name, f"{found.median:.3f}", f"{found.spread:.3f}")
    _print(title, table)


def _print(title: str, table: Table) -> None:
    """At once: what follows takes its time."""
    print(title, flush=True)
    Console(file=sys.stdout).print(table)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
