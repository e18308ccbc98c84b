"""Training over a thin network: wall-clock of every arm on wires of 10, 100 and 1000 Mbit/s.

    python -m benchmarks.thin_network [--mbit 100] [--quick] [--json PATH]      (root)

Two, then four workers in network namespaces (`netns.py`) train a GPT-2 of 120,640 parameters on
random tokens, 512 per worker and step, by the arms of `benchmarks.lordo`. The time of an arm's step
is set against c + t: c is the same step without any exchange, measured in the same processes, and
t the time of its counted bytes by the ring model (`ring_model.py`). Interface counters say what
really went over each wire. Figures are the worst of two and four workers. "Ours" is `lordo_ns`; the
paper's arm `lordo_global` has the same figures behind `paper.`. One arm more, `des_loc_delayed`,
has half a round of time for each exchange; no time by the model is held against it.

The model is tiny, but in t / c its size cancels: what matters is the speed of a worker, over its
tokens per step and the rate of its wire. The last table has the exchanges of full-sized models.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from algorithms.common.errors import InputError
from algorithms.lordo.config import ArmConfig
from benchmarks import ring_model
from benchmarks.lordo_study.arms import ARMS
from benchmarks.lordo_study.figures import OURS, PAPER
from benchmarks.netns import FRAME_BYTES, SEGMENT_BYTES, Network
from benchmarks.report import Figures, run
from benchmarks.thin_training import Plan, RankRuns, train_on_rank
from benchmarks.timing import ratio

NAMES = ("ddp", "lowrank_ddp", "des_loc", "lordo_global", "lordo_ns")
DELAYED = "des_loc_delayed"
MBITS = (10, 100, 1000)
QUICK_MBIT = 100
RANKS = (2, 4)
PREFIXES = {"": OURS, "paper.": PAPER}
FIGURES = [
    "model_error_pct",
    "counted_vs_wire_pct",
    *(
        f"{prefix}{name}"
        for prefix in PREFIXES
        for name in ("speedup_vs_ddp", "speedup_vs_ddp_spread", "speedup_limit_fraction")
    ),
    "delay_gain_pct",
]
"""Of one rate."""
TURNS = 12
TURN_STEPS = 40
"""Of the arms that meet once in many steps: in all, two whole periods of the paper's arm."""
STEADY_STEPS = 12
"""Of `ddp` and `lowrank_ddp`, whose steps are all alike."""
ALONE_STEPS = 20
LARGE_BYTES = 400_000
"""Buffers from here on are compared with model and counters as they are."""
BACKBONE_BITS = 10e9
BACKBONE_RANKS = 4


@dataclass(frozen=True)
class Line:
    """One arm on one network: all that the figures need."""

    step_s: float
    """Measured."""
    turns: list[float]
    """The same by turn."""
    alone_s: float
    """A step without exchange: c of this arm."""
    exchange_s: float
    """t by the ring model."""
    counted_vs_wire_pct: float
    """Worst over ranks, small buffers after `ring_model.MESSAGE_BYTES` per message."""

    @property
    def model_error_pct(self) -> float:
        return 100 * abs((self.alone_s + self.exchange_s) / self.step_s - 1)


Lines = Mapping[str, Line]


def main(argv: Sequence[str]) -> int:
    """Command line; returns the exit code."""
    mbit = {"type": float, "metavar": "RATE", "help": "this rate only, in Mbit/s"}
    text = (__doc__ or "").splitlines()[0]
    return run("thin_network", text, measure, argv, {"mbit": mbit})


def measure(quick: bool, mbit: float | None = None) -> Figures:
    """All figures, of one rate, or with a suffix each of all three; the quick form has one."""
    if mbit is not None and not 0 < mbit < math.inf:
        raise InputError("--mbit: must be positive")
    figures: dict[str, float | None] = {}
    if mbit is not None:
        figures |= measure_rate(mbit, quick)
    else:
        for rate in MBITS:
            if quick and rate != QUICK_MBIT:
                found: Figures = dict.fromkeys(FIGURES)
            else:
                found = measure_rate(rate, quick)
            figures |= {f"{name}_{rate}": value for name, value in found.items()}
    _print_backbone()
    return figures


def measure_rate(mbit: float, quick: bool) -> Figures:
    """The figures of one rate."""
    plan = make_plan(arms(), turns=1 if quick else TURNS)
    networks = []
    for ranks in RANKS:
        with Network(ranks, mbit) as network:
            networks.append(lines(plan, network.run(train_on_rank, plan), mbit))
        _print_lines(f"{ranks} workers at {mbit:g} Mbit/s", networks[-1])
    return worst(networks)


def arms() -> dict[str, ArmConfig]:
    """What is trained."""
    known = ARMS["des_loc"]
    assert known.sync is not None
    delayed = replace(known.sync, delay=known.sync.every // 2)
    return {**{name: ARMS[name] for name in NAMES}, DELAYED: replace(known, sync=delayed)}


def make_plan(arms: Mapping[str, ArmConfig], turns: int) -> Plan:
    """Arms that meet in every step take fewer of them."""
    steps = {n: STEADY_STEPS if arm.sync is None else TURN_STEPS for n, arm in arms.items()}
    return Plan(arms, turns, steps, ALONE_STEPS)


def lines(plan: Plan, ranks: Sequence[RankRuns], mbit: float) -> dict[str, Line]:
    """What the ranks of one network found, by arm."""
    found = {}
    bits_per_second = 1e6 * mbit * SEGMENT_BYTES / FRAME_BYTES
    first = ranks[0]
    for name, arm in plan.arms.items():
        run, alone = first.together[name], first.alone[name]
        found[name] = Line(
            step_s=sum(run.seconds) / run.steps,
            turns=[seconds / plan.steps[name] for seconds in run.seconds],
            alone_s=sum(alone.seconds) / alone.steps,
            exchange_s=ring_model.exchange_seconds(
                run.wire_bytes / run.steps,
                len(ranks),
                bits_per_second,
                calls=run.calls / run.steps,
                latency_s=first.latency_s,
            ),
            counted_vs_wire_pct=max(_deviation_pct(each, name, arm, len(ranks)) for each in ranks),
        )
    return found


def _deviation_pct(runs: RankRuns, name: str, arm: ArmConfig, ranks: int) -> float:
    """Of what the interface sent from what was counted."""
    run = runs.together[name]
    expected: float = run.wire_bytes
    buffer_bytes = runs.parameters * ring_model.bytes_per_value(arm)
    if arm.method == "lowrank_ddp" or buffer_bytes < LARGE_BYTES:
        # gloo cuts each of the 2 (M - 1) messages of a ring in two. An exchange is an all-to-all
        # and an all-gather, two calls, each with a message to every other rank.
        per_call = (4 if arm.sync is None else 1) * (ranks - 1)
        expected += ring_model.MESSAGE_BYTES * per_call * run.calls
    return 100 * abs(run.sent_bytes / expected - 1)


def worst(networks: Sequence[Lines]) -> dict[str, float | None]:
    """The figures of one rate, each the worst over its networks."""
    figures: dict[str, float | None] = {}
    every = [(name, line) for network in networks for name, line in network.items()]
    modelled = [line.model_error_pct for name, line in every if name != DELAYED]
    figures["model_error_pct"] = max(modelled)
    figures["counted_vs_wire_pct"] = max(line.counted_vs_wire_pct for _, line in every)
    for prefix, arm in PREFIXES.items():
        speedups = [ratio(each["ddp"].turns, each[arm].turns) for each in networks]
        figures[f"{prefix}speedup_vs_ddp"] = min(speedup(each, arm) for each in networks)
        figures[f"{prefix}speedup_vs_ddp_spread"] = max(each.spread for each in speedups)
        fractions = [speedup(each, arm) / limit(each, arm) for each in networks]
        figures[f"{prefix}speedup_limit_fraction"] = min(fractions)
    shares = [each[DELAYED].step_s / each["des_loc"].step_s for each in networks]
    figures["delay_gain_pct"] = 100 * (1 - max(shares))
    return figures


def speedup(network: Lines, arm: str) -> float:
    """DDP's time over the arm's, for the same number of steps."""
    return network["ddp"].step_s / network[arm].step_s


def limit(network: Lines, arm: str) -> float:
    """The same by the model, if the arm computed no more in a step than DDP does."""
    compute = network["ddp"].alone_s
    return (compute + network["ddp"].exchange_s) / (compute + network[arm].exchange_s)


def _print_lines(title: str, network: Lines) -> None:
    table = Table("arm")
    for column in ("step ms", "alone ms", "model ms", "speed-up", "limit", "wire %"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, line in network.items():
        times = (line.step_s, line.alone_s, line.exchange_s)
        table.add_row(
            name,
            *(f"{1000 * each:.1f}" for each in times),
            f"{speedup(network, name):.2f}",
            f"{limit(network, name):.2f}",
            f"{line.counted_vs_wire_pct:.2f}",
        )
    _print(title, table)


def _print_backbone() -> None:
    """What the arms would wait for the network in a step, at full size."""
    table = Table("arm")
    for shape in ring_model.SHAPES:
        table.add_column(shape, justify="right", no_wrap=True)
    for name in NAMES:
        times = [
            ring_model.seconds_per_step(ARMS[name], shape, BACKBONE_RANKS, BACKBONE_BITS)
            for shape in ring_model.SHAPES.values()
        ]
        table.add_row(name, *(f"{seconds:.4f}" for seconds in times))
    bits = BACKBONE_BITS / 1e9
    _print(f"Exchanges, s per step: {BACKBONE_RANKS} workers at {bits:g} Gbit/s", table)


def _print(title: str, table: Table) -> None:
    """Now, for the next one takes minutes; a table's own title would be wrapped to its width."""
    print(title, flush=True)
    Console(file=sys.stdout).print(table)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
