"""Real jobs of `pretrain_lordo` under the launcher in which workers die and stall."""

import json
import os
import re
import signal
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import AutoModelForCausalLM

from algorithms.common.files import read_json
from algorithms.common.metrics import read_rows
from algorithms.common.model import weights_sha256
from algorithms.lordo.config import JobConfig
from tasks.jobs.restarts import WORKER
from tasks.processes import alive
from tasks.torchrun import JobFailed, run_job
from tests import toys
from tests.processes import environment, living

pytestmark = pytest.mark.slow

TIMEOUT_S = 60.0
"""More than a worker takes to start again on a busy machine."""
STEPS = 240


class Stop(Exception):
    """Raised in a tick, it stops the job as Ctrl-C does."""


class Job:
    """A job of a toy model in a folder of its own."""

    def __init__(self, folder: Path, arm: str, *, ranks: int = 4, **sync: Any) -> None:
        self.run_dir = folder / "job"
        self.run_dir.mkdir()
        self.job_id = uuid.uuid4().hex
        self.ranks = ranks
        tokens = toys.write_tokens(folder / "tokens")
        config = toys.RANKS_DIFFER[arm]
        assert config.sync is not None
        job = JobConfig(
            stage="pretrain_lordo",
            arm_name=arm,
            job_id=self.job_id,
            tokens_dir=str(tokens),
            model=toys.MODEL,
            training=toys.training(
                ranks=ranks, steps=STEPS, log_every=4, eval_every=60, checkpoint_every=50
            ),
            arm=replace(config, sync=replace(config.sync, **sync)),
        )
        (self.run_dir / "config.json").write_text(json.dumps(job.to_dict()))

    def run(self, tick: Callable[[], None] = lambda: None, stop_s: float = 10) -> None:
        run_job(
            "tasks.jobs.pretrain_lordo",
            self.run_dir,
            ranks=self.ranks,
            job_id=self.job_id,
            deadline_s=400,
            stop_s=stop_s,
            on_tick=tick,
        )

    def rows(self) -> list[dict[str, Any]]:
        return read_rows(self.run_dir / "metrics.jsonl")

    def log(self, rank: int, attempt: int = 1) -> str:
        path = self.run_dir / "logs" / f"attempt_{attempt}" / f"rank_{rank}.log"
        return path.read_text()

    def returns(self, rank: int) -> int:
        """How often it has joined a run that was under way."""
        pattern = rf"rank {rank} goes on after step [1-9]\d* with the others' state"
        return len(re.findall(pattern, self.log(rank)))

    def worker(self, rank: int, elastic: bool) -> psutil.Process:
        """The process that trains as `rank`."""
        for process in living(alive(self.job_id)):
            variables = environment(process)
            if variables.get("RANK") == str(rank) and elastic == (WORKER in variables):
                return process
        raise AssertionError(f"rank {rank} has no worker")

    def check(self, attempt: int = 1) -> dict[str, Any]:
        """The job is complete, and all ranks ended with the weights of its model; its result."""
        result: dict[str, Any] = read_json(self.run_dir / "result.json")
        model = AutoModelForCausalLM.from_pretrained(self.run_dir / "model")
        assert weights_sha256(model) == result["weights_sha256"]
        for rank in range(self.ranks):
            ends = re.findall(rf"rank {rank} ends with weights (\w+)", self.log(rank, attempt))
            assert ends == [result["weights_sha256"]], f"rank {rank}"
        steps = [row["step"] for row in self.rows()]
        assert steps == sorted(set(steps)), "each row once"
        assert steps[-1] == STEPS
        assert [row["step"] for row in self.rows() if "val/loss" in row] == [60, 120, 180, 240]
        assert result["quality"]["val_loss"] == self.rows()[-1]["val/loss"]
        assert result["quality"]["val_loss"] < self.rows()[0]["train/loss"] - 0.5
        paid = [row["comm/payload_bytes"] for row in self.rows()]
        assert paid == sorted(paid)
        assert alive(self.job_id) == []
        return result


@pytest.mark.parametrize(("victim", "arm"), [(2, "lordo_global"), (0, "lordo_ns")])
def test_one_of_four_is_killed_twice(tmp_path: Path, victim: int, arm: str) -> None:
    """Rank 0 is the one that writes; lordo_ns keeps what its wire lost in weights and parts."""
    job = Job(tmp_path, arm, timeout_s=TIMEOUT_S, elastic=True)
    killed: list[int] = []

    def tick() -> None:
        rows = job.rows()
        if not rows or rows[-1]["workers"] < 4 or len(killed) == 2:
            return
        if job.returns(victim) == len(killed):
            killed.append(rows[-1]["step"])
            job.worker(victim, elastic=True).kill()

    job.run(tick)
    assert len(killed) == 2
    result = job.check()
    workers = [row["workers"] for row in job.rows()]
    # Killed between a sync and an evaluation, it is back for the next sync.
    assert re.fullmatch("4+(3+4+){1,2}", "".join(map(str, workers))), workers
    assert job.log(victim).count("was killed by SIGKILL; start") == 2
    assert job.returns(victim) == 2
    plain = {"val_loss", "val_perplexity", "val_bits_per_byte", "train_loss", "steps", "tokens"}
    assert set(result["quality"]) == plain | {"parameters", "payload_bytes", "wire_bytes"}
    times = {"seconds", "device_hours", "gpu_hours", "tokens_per_s", "peak_bytes"}
    assert set(result["timing"]) == times | {"optimizer_bytes", "oversubscribed"}
    assert read_json(job.run_dir / "env.json")["world_size"] == 4
    assert not list((job.run_dir / "logs" / "attempt_1").glob("*.error.json"))


def test_a_worker_that_stalls_is_left_behind_and_comes_back(tmp_path: Path) -> None:
    job = Job(tmp_path, "lordo_global", timeout_s=5.0, elastic=True)
    state: dict[str, Any] = {}

    def tick() -> None:
        rows = job.rows()
        workers = rows[-1]["workers"] if rows else 0
        if not state and workers == 4:
            state["process"] = job.worker(1, elastic=True)
            state["process"].send_signal(signal.SIGSTOP)
        elif len(state) == 1 and workers == 3:
            state["process"].send_signal(signal.SIGCONT)
            state["woken"] = True

    job.run(tick)
    job.check()
    workers = "".join(str(row["workers"]) for row in job.rows())
    assert re.fullmatch("4+3+4+", workers), workers
    assert "the others went on without this rank; joining again" in job.log(1)
    assert "was killed" not in job.log(1)


def test_a_worker_that_stays_stalled_does_not_hold_up_the_end(tmp_path: Path) -> None:
    job = Job(tmp_path, "diloco", ranks=2, timeout_s=5.0, elastic=True)
    stopped: list[int] = []

    def tick() -> None:
        if not stopped and job.rows():
            process = job.worker(1, elastic=True)
            process.send_signal(signal.SIGSTOP)
            stopped.append(process.pid)

    job.run(tick)
    assert job.rows()[-1]["workers"] == 1
    assert (job.run_dir / "result.json").exists()
    assert f"worker {stopped[0]} is stalled, but the job is done; killed" in job.log(1)
    assert alive(job.job_id) == []


def test_stopped_all_begin_again_from_the_last_round(tmp_path: Path) -> None:
    job = Job(tmp_path, "lordo_global", timeout_s=TIMEOUT_S, elastic=True)

    def tick() -> None:
        if job.rows():
            raise Stop

    with pytest.raises(Stop):
        job.run(tick)
    assert alive(job.job_id) == []
    assert not (job.run_dir / "result.json").exists()
    [said] = re.findall(r"stopped after step (\d+); its checkpoint is written", job.log(0))
    error = read_json(job.run_dir / "logs" / "attempt_1" / "rank_0.error.json")
    assert error["kind"] == "preempted"
    folder = job.run_dir / "checkpoints" / f"step_{int(said):08}"
    assert (folder / "seal.json").is_file()
    job.run()
    assert f"training from step {said} of {STEPS}" in job.log(0, attempt=2)
    job.check(attempt=2)


def test_without_elastic_a_rank_that_stalls_is_named_in_one_line(tmp_path: Path) -> None:
    timeout_s = 15.0
    job = Job(tmp_path, "lordo_global", timeout_s=timeout_s)
    stopped: list[float] = []

    def tick() -> None:
        if not stopped and job.rows():
            job.worker(2, elastic=False).send_signal(signal.SIGSTOP)
            stopped.append(time.monotonic())

    with pytest.raises(JobFailed) as failed:
        job.run(tick, stop_s=2)
    took = time.monotonic() - stopped[0]
    assert took < timeout_s + 45
    # It may be stopped in the middle of an exchange: then that is what fails, for all.
    absent = r"rank 2 did not come to the exchange within 15 s"
    stuck = r"the exchange failed, rank 2 died or stalled in it: .+"
    line = rf"step (\d+): (?:({absent})|({stuck}))"
    assert re.search(rf"rank [013] exited with code 4 \({line}\)", str(failed.value))
    assert "Traceback" not in str(failed.value)
    logs = job.run_dir / "logs" / "attempt_1"
    said = [read_json(path) for path in sorted(logs.glob("rank_[013].error.json"))]
    assert said, os.listdir(logs)
    assert all(each["kind"] == "missing" for each in said)
    lines = [re.fullmatch(line, each["message"]) for each in said]
    assert all(lines), said
    assert len({found and (found[1], found[2]) for found in lines}) == 1
    assert alive(job.job_id) == []
