"""What the house costs a job: tracking, the watching parent, the launcher, the flow around it.

    python -m benchmarks.overhead [--quick] [--json PATH]

Tracking costs a job while rows are sent, for some tenths of a second in each period, and nothing in
between. So the steps of two seconds from then on are compared with their neighbours, before and
behind, in one training job of two ranks with the model and the rows of metrics of params.yaml;
`every_step.` is a second job that writes ten times as many. Windows so close see the same machine,
whose speed drifts by more than what is measured. The rest is a difference of whole commands that
take turns: `run_job` and torchrun with a job that does nothing, a flow run and `--plain`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from pathlib import Path

from algorithms.common.files import read_json
from algorithms.common.metrics import read_rows
from benchmarks.fault_arena import Arena
from benchmarks.report import Figures, run
from benchmarks.timing import interleaved, measured
from tasks import environment, mlflow_courier, torchrun
from tasks.config import load_params
from tasks.follower import Follower
from tasks.mlflow_run import PERIOD_S, TrackedRun
from tasks.paths import PROJECT

PAIRS, QUICK_PAIRS = 25, 6
LAUNCHES, QUICK_LAUNCHES = 8, 1
FLOWS, QUICK_FLOWS = 3, 1
ROUND_S = PERIOD_S + 0.1
"""Between two rounds of sending: a little more, so that `forward` finds its own period over."""
PATIENCE_S = 60.0
"""How long a round may take on a busy machine."""
SENDING_S, BESIDE_S = 2.0, 1.5
"""Windows with tracking, and on either side of them without; less than a round in all."""
WARM_UP_ROWS = 5
RANKS = 2
DEADLINE_S = 3600.0
MODEL = [
    "model.hidden_size=128",
    "model.intermediate_size=344",
    "model.num_hidden_layers=4",
    "model.num_attention_heads=4",
    "model.num_key_value_heads=4",
    "pretrain_lordo.training.sequence_length=64",
    "pretrain_lordo.training.steps=1000000",
    "pretrain_lordo.training.checkpoint_every=1000000",
    "pretrain_lordo.training.eval_every=1000000",
]
"""That of params.yaml, over that of the sandbox, which is too small to be slowed down, with a
quarter of its tokens in a sequence; and a job without end, checkpoint or evaluation."""


class Over(Exception):
    """All rounds are done."""


class Rounds:
    """The job's `on_tick`: from warm-up on, has the new rows sent once in a period."""

    def __init__(self, run_dir: Path, tracked: TrackedRun, wanted: int) -> None:
        self.moments: list[float] = []
        """When sending began; seconds since the epoch, as in metrics.jsonl."""
        self.cpu_s: list[float] = []
        """What this process had used by then."""
        self._rows = Follower(run_dir / "metrics.jsonl")
        self._state = run_dir / mlflow_courier.STATE
        self._tracked = tracked
        self._wanted = wanted
        self._seen = 0
        self._newest = 0
        self._to_send = 0
        """Step of the newest row when sending last began."""

    def tick(self) -> None:
        """Raises `Over` at the end, `RuntimeError` when a round did not send what was due."""
        for line in self._rows.lines():
            self._newest = json.loads(line)["step"]
            self._seen += 1
        now = time.time()
        if self._seen < WARM_UP_ROWS or (self.moments and now < self.moments[-1] + ROUND_S):
            return
        if self.moments and read_json(self._state)["sent_step"] < self._to_send:
            if now > self.moments[-1] + PATIENCE_S:
                raise RuntimeError(f"step {self._to_send} was not sent within {PATIENCE_S} s")
            return
        if len(self.moments) > self._wanted:
            raise Over
        self._to_send = self._newest
        self.moments.append(now)
        self.cpu_s.append(time.process_time())
        self._tracked.forward()


def main(argv: Sequence[str]) -> int:
    """Command line; returns the exit code."""
    return run("overhead", (__doc__ or "").splitlines()[0], measure, argv)


def measure(quick: bool) -> Figures:
    """All figures; the full form takes at most ten minutes."""
    shipped = load_params().pretrain_lordo.training.log_every
    pairs = QUICK_PAIRS if quick else PAIRS
    environment.set_defaults()
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
        os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder}/mlflow.db"
        arena = Arena(Path(folder) / "project")
        _succeed(arena, "prepare", "--plain")
        try:
            return {
                **measure_tracking(arena, pairs, shipped),
                **{
                    f"every_step.{name}": value
                    for name, value in measure_tracking(arena, pairs, log_every=1).items()
                },
                "launcher_overhead_s": measure_launcher(
                    Path(folder), QUICK_LAUNCHES if quick else LAUNCHES
                ),
                "flow_overhead_s": measure_flow(arena, QUICK_FLOWS if quick else FLOWS),
            }
        finally:
            arena.kill()


def measure_tracking(arena: Arena, pairs: int, log_every: int) -> dict[str, float | None]:
    """Tracking on against off, and what this process, the job's parent, used of a core."""
    changes = [*MODEL, f"pretrain_lordo.training.log_every={log_every}"]
    settings = [word for change in changes for word in ("--set", change)]
    _succeed(arena, "pretrain", "--arm", "ddp", "--dry-run", *settings)
    run_dir = arena.run_dir()
    assert run_dir is not None
    tracked = TrackedRun.open(None, "overhead", "ddp", run_dir, {}, {})
    rounds = Rounds(run_dir, tracked, pairs)
    try:
        torchrun.run_job(
            "tasks.jobs.pretrain_lordo",
            run_dir,
            job_id=run_dir.name,
            ranks=RANKS,
            deadline_s=DEADLINE_S,
            stop_s=5.0,
            on_tick=rounds.tick,
        )
    except Over:
        tracked.close("KILLED")
    times = [row["time"] for row in read_rows(run_dir / "metrics.jsonl")]
    arena.forget()
    # The first round sends what the warm-up has left, the last one only ends the one before.
    wall_s = rounds.moments[-1] - rounds.moments[1]
    share = (rounds.cpu_s[-1] - rounds.cpu_s[1]) / wall_s
    return {**slower(times, rounds.moments[1:-1]), "parent_cpu_share_pct": 100 * share}


def slower(times: Sequence[float], moments: Sequence[float]) -> dict[str, float | None]:
    """What sending that begins at `moments` costs a job whose rows come at `times`."""
    found = measured([100 * _lost(times, moment) / ROUND_S for moment in moments])
    return {"tracking_overhead_pct": found.median, "tracking_overhead_spread": found.spread}


def _lost(times: Sequence[float], moment: float) -> float:
    """Seconds that the rows written while rows are sent take longer than their neighbours do.

    With tracking: from the last row before `moment` to the first one `SENDING_S` later; without:
    `BESIDE_S` before and behind that.
    """
    begin = bisect_right(times, moment) - 1
    end = bisect_left(times, moment + SENDING_S)
    before = bisect_right(times, moment - BESIDE_S) - 1
    behind = bisect_left(times, moment + SENDING_S + BESIDE_S)
    beside = times[begin] - times[before] + times[behind] - times[end]
    pace = beside / (begin - before + behind - end)
    return times[end] - times[begin] - (end - begin) * pace


def measure_launcher(folder: Path, rounds: int) -> float:
    """Seconds of `run_job` beyond those of torchrun, both with a job that does nothing."""
    run_dir = folder / "null"
    run_dir.mkdir()
    (run_dir / "config.json").write_text("{}")
    program = str(Path(sys.executable).with_name("torchrun"))
    options = ["--standalone", f"--nproc-per-node={RANKS}", "-m", "benchmarks.null_job"]

    def ours() -> float:
        began = time.perf_counter()
        torchrun.run_job(
            "benchmarks.null_job",
            run_dir,
            job_id="null",
            ranks=RANKS,
            deadline_s=DEADLINE_S,
            stop_s=5.0,
        )
        return time.perf_counter() - began

    def theirs() -> float:
        began = time.perf_counter()
        command = [program, *options, str(run_dir / "config.json")]
        done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(done.stderr)
        return time.perf_counter() - began

    return _difference(interleaved({"ours": ours, "theirs": theirs}, rounds), "ours", "theirs")


def measure_flow(arena: Arena, rounds: int) -> float:
    """Seconds of a flow run, with the temporary server that it starts, beyond the bare stage's."""

    def timed(*options: str) -> float:
        arena.forget()
        began = time.perf_counter()
        _succeed(arena, "pretrain", "--arm", "ddp", *options)
        return time.perf_counter() - began

    found = interleaved({"flow": timed, "plain": lambda: timed("--plain")}, rounds)
    return _difference(found, "flow", "plain")


def _difference(found: dict[str, list[float]], above: str, below: str) -> float:
    pairs = zip(found[above], found[below], strict=True)
    return measured([a - b for a, b in pairs]).median


def _succeed(arena: Arena, *arguments: str) -> None:
    done = arena.flows(*arguments)
    if done.returncode != 0:
        raise RuntimeError(done.stdout + done.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
