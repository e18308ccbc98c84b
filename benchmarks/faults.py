"""The kill matrix: jobs ended in every way at random moments; nothing is lost or left behind.

    python -m benchmarks.faults [--rounds 50] [--quick] [--json PATH]

A round starts a tiny job of two ranks, strikes, looks 20 seconds later for processes and for what
MLflow says of its runs, starts the job again, and compares weights, losses and steps with those of
a job that was left alone. The kinds take turns; a quarter of the moments lies in a checkpoint
write, a quarter before the first one, the rest is uniform from launch to exit. All figures are
counts, and all but `rounds` and `reconcile_needed` should be 0. The latter counts rounds after
which only the next start of anything could say how a run ended.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from algorithms.common.errors import InputError
from benchmarks.fault_arena import Arena
from benchmarks.fault_rounds import KINDS, SPANS, Rounds, Span, Verdict
from benchmarks.report import Figures, run

ROUNDS = 50
QUICK_ROUNDS = 2
COUNTED = ("orphans", "wrong_status", "resume_mismatch", "duplicate_steps", "reconcile_needed")


def main(argv: Sequence[str]) -> int:
    """Command line; returns the exit code."""
    rounds = {"type": int, "metavar": "N", "help": f"kills in all; {ROUNDS} by default"}
    return run("faults", (__doc__ or "").splitlines()[0], measure, argv, {"rounds": rounds})


def measure(quick: bool, rounds: int | None = None) -> Figures:
    """All figures, over `rounds` rounds."""
    count = rounds if rounds is not None else QUICK_ROUNDS if quick else ROUNDS
    if count < 1:
        raise InputError("--rounds: must be positive")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        arena = Arena(Path(folder) / "project")
        with arena.services():
            verdicts = play_all(Rounds(arena), plan(count))
    figures: dict[str, float | None] = {"rounds": len(verdicts)}
    figures |= {name: sum(getattr(each, name) for each in verdicts) for name in COUNTED}
    print(f"in a checkpoint write: {sum(each.in_write for each in verdicts)}")
    print(f"before the first checkpoint: {sum(each.before_first for each in verdicts)}")
    return figures


def plan(rounds: int) -> list[tuple[str, Span]]:
    """Kind and span of each round. As many kinds as spans have no common factor, all pairs come."""
    names = list(KINDS)
    return [(names[i % len(names)], SPANS[i % len(SPANS)]) for i in range(rounds)]


def play_all(rounds: Rounds, planned: Sequence[tuple[str, Span]]) -> list[Verdict]:
    """One verdict a round, each told as it is known."""
    verdicts = []
    for name, span in planned:
        began = time.monotonic()
        verdict = rounds.play(name, span)
        verdicts.append(verdict)
        found = ", ".join(f"{each} {n}" for each in COUNTED if (n := getattr(verdict, each)))
        where = " in a write" if verdict.in_write else ""
        where += " before the first checkpoint" if verdict.before_first else ""
        print(
            f"{len(verdicts)}/{len(planned)} {name} at {verdict.moment_s:.2f} s{where}: gone after"
            f" {verdict.gone_s:.1f} s, {found or 'all well'} ({time.monotonic() - began:.0f} s)",
            flush=True,
        )
    return verdicts


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
