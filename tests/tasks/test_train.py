"""An arm from config to published model: how jobs are named, what lands where; killed and resumed.

The slow tests run the command line in projects of their own and compare each run's weights, bit for
bit, with those of one that was left alone.
"""

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from algorithms.common.config import ModelConfig
from algorithms.common.errors import InputError
from algorithms.common.files import read_json
from algorithms.common.metrics import read_rows
from algorithms.lordo.config import ArmConfig
from tasks import paths, train
from tasks.config import Params, load_params
from tasks.paths import PROJECT, Workspace
from tests import toys
from tests.project import Project
from tests.tasks.runs import await_true

CODE = ("algorithms/common", "algorithms/lordo", "tasks/jobs/pretrain_lordo.py", "tasks/train.py")
STEPS = 300
PRETRAIN = ["./run", "-m", "flows", "pretrain", "--arm", "ddp"]
LONG = [
    *("--set", f"pretrain_lordo.training.steps={STEPS}"),
    *("--set", "pretrain_lordo.training.log_every=1"),
    *("--set", "pretrain_lordo.training.eval_every=50"),
    *("--set", "pretrain_lordo.training.checkpoint_every=40"),
]
"""Long enough to be caught in the middle, and not only between two checkpoints."""


@pytest.fixture
def tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(paths, "RUNS", tmp_path / "runs")
    return toys.write_tokens(tmp_path / "tokens")


def prepare(params: Params, tokens: Path, arm: str = "ddp") -> train.Job:
    return train.prepare(params, arm, {"tokens_dir": tokens}, CODE)


def changed(params: Params, **training: object) -> Params:
    settings = replace(params.pretrain_lordo.training, **training)
    return replace(params, pretrain_lordo=replace(params.pretrain_lordo, training=settings))


def test_what_decides_the_result_names_the_job(tokens: Path, tmp_path: Path) -> None:
    params = load_params()
    job = prepare(params, tokens)
    name = job.config.job_id
    assert job.run_dir == tmp_path / "runs" / "pretrain_lordo" / "ddp" / name
    assert read_json(job.run_dir / "config.json") == job.config.to_dict()
    assert prepare(params, tokens) == job
    moved = shutil.copytree(tokens, tmp_path / "the same elsewhere")
    assert prepare(params, moved).config.job_id == name
    patient = replace(params, launch=replace(params.launch, stop_seconds=60.0))
    assert prepare(patient, tokens).config.job_id == name

    arm = params.pretrain_lordo.arms["ddp"]
    faster = ArmConfig(method=arm.method, optimizer=replace(arm.optimizer, lr=1.0))
    others = [
        changed(params, seed=1),
        changed(params, steps=7, warmup_steps=0),
        replace(params, model=ModelConfig(hidden_size=64)),
        replace(params, pretrain_lordo=replace(params.pretrain_lordo, arms={"ddp": faster})),
    ]
    names = {prepare(other, tokens).config.job_id for other in others}
    manifest = read_json(tokens / "MANIFEST.json")
    manifest["splits"]["train"]["shards"][0]["sha256"] = "0" * 64
    (tokens / "MANIFEST.json").write_text(json.dumps(manifest))
    names.add(prepare(params, tokens).config.job_id)
    assert len(names - {name}) == len(others) + 1


def test_other_code_of_the_job_is_another_job(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, clone = load_params(), tmp_path / "clone"
    for folder in ("algorithms", "kernels", "tasks"):
        shutil.copytree(
            PROJECT / folder, clone / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    name = prepare(params, tokens).config.job_id
    monkeypatch.setattr(train, "PROJECT", clone)
    assert prepare(params, tokens).config.job_id == name
    with (clone / "tasks" / "figures.py").open("a") as file:
        file.write("# what draws the report decides nothing\n")
    assert prepare(params, tokens).config.job_id == name
    with (clone / "algorithms" / "common" / "loop.py").open("a") as file:
        file.write("# what trains does\n")
    assert prepare(params, tokens).config.job_id != name


def test_missing_tokens_and_unknown_arms_are_refused(tokens: Path, tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"nothing: missing; `prepare` with the same --set makes it$"
    ):
        prepare(load_params(), tmp_path / "nothing")
    with pytest.raises(InputError, match="no arm 'dpp' in params.yaml; known arms: ddp"):
        prepare(load_params(), tokens, "dpp")
    assert not (tmp_path / "runs").exists()


def finish(job: train.Job, loss: float, *files: str) -> None:
    """Leave in the run directory what a finished job leaves."""
    rows = [
        {
            "step": step,
            "time": 1e9 + step,
            "elapsed": 0.5 * step,
            "tokens": 128 * step,
            "train/loss": loss,
            "lr": 0.1,
            "grad_norm": 1.0,
            "tokens_per_s": 256.0,
            "device_hours": step / 3600,
            "comm/payload_bytes": 4 * step,
            "comm/wire_bytes": 4 * step,
        }
        for step in (1, 2)
    ]
    rows[-1]["val/loss"] = loss + 1
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (job.run_dir / "metrics.jsonl").write_text(lines)
    result = {"quality": {"val_loss": loss + 1}, "timing": {"seconds": 1.0}, "weights_sha256": "0"}
    (job.run_dir / "result.json").write_text(json.dumps(result))
    (job.run_dir / "model").mkdir()
    for name in files:
        (job.run_dir / "model" / name).write_text(str(loss))


def test_publish_puts_each_thing_in_its_place(tokens: Path, tmp_path: Path) -> None:
    job, out = prepare(load_params(), tokens), Workspace(tmp_path / "out")
    finish(job, 2.0, "config.json", "model.safetensors")
    made = (job.run_dir / "model").stat().st_ino
    assert train.publish(job, out) == {"val_loss": 3.0}
    model, metrics = out.model("pretrain_lordo", "ddp"), out.metrics("pretrain_lordo", "ddp")
    assert model.stat().st_ino == made, "moved in one rename, so never half there"
    assert not (job.run_dir / "model").exists()
    assert read_json(metrics / "quality.json") == {"val_loss": 3.0}
    first, second = read_json(metrics / "curve.json")["rows"]
    assert set(first) == {"step", "tokens", "train/loss", "comm/payload_bytes", "comm/wire_bytes"}
    assert second["val/loss"] == 3.0
    timing = read_json(metrics / "timing.json")
    assert timing["seconds"] == 1.0
    assert timing["rows"][1] == {"step": 2, "elapsed": 1.0, "device_hours": 2 / 3600}
    everything = {file.relative_to(out.root).as_posix() for file in out.root.rglob("*.*")}
    assert everything == {
        "models/pretrain_lordo/ddp/config.json",
        "models/pretrain_lordo/ddp/model.safetensors",
        "metrics/pretrain_lordo/ddp/quality.json",
        "metrics/pretrain_lordo/ddp/curve.json",
        "metrics/pretrain_lordo/ddp/timing.json",
    }


def test_a_new_model_takes_the_whole_place_of_an_old_one(tokens: Path, tmp_path: Path) -> None:
    params, out = load_params(), Workspace(tmp_path / "out")
    first = prepare(params, tokens)
    finish(first, 2.0, "config.json", "model-00001.safetensors", "model-00002.safetensors")
    train.publish(first, out)
    second = prepare(changed(params, seed=1), tokens)
    finish(second, 1.0, "config.json", "model.safetensors")
    train.publish(second, out)
    folder = out.model("pretrain_lordo", "ddp")
    assert {file.name for file in folder.iterdir()} == {"config.json", "model.safetensors"}
    assert (folder / "config.json").read_text() == "1.0"
    assert [path.name for path in folder.parent.iterdir()] == ["ddp"], "nothing is left beside it"
    # A crash between the two renames of an earlier attempt is no obstacle.
    folder.rename(folder.with_name(".ddp.old"))
    finish(second, 0.5, "config.json")
    train.publish(second, out)
    assert [path.name for path in folder.parent.iterdir()] == ["ddp"]


# Slow: killed, stopped and started by hand, against a run that was left alone.


def start(project: Project, *arguments: str) -> subprocess.Popen[str]:
    return project.start(*PRETRAIN, *LONG, *arguments)


def run_dir(project: Project) -> Path:
    [folder] = (project.root / "runs" / "pretrain_lordo" / "ddp").iterdir()
    return folder


def await_step(project: Project, step: int) -> None:
    """Wait until a run is past `step`, and make sure that it has more to do."""

    def reached() -> int:
        files = project.root.glob("runs/pretrain_lordo/ddp/*/metrics.jsonl")
        return max((row["step"] for file in files for row in read_rows(file)), default=0)

    await_true(lambda: reached() >= step, timeout_s=180)
    assert reached() < STEPS - 20, "too fast to be caught in the middle"


def outcome(project: Project) -> tuple[str, list[dict[str, float]]]:
    """Hash of the weights, and what of metrics.jsonl must repeat."""
    folder = run_dir(project)
    keys = ("step", "tokens", "train/loss", "grad_norm", "lr", "val/loss", "comm/payload_bytes")
    rows = [{key: row.get(key) for key in keys} for row in read_rows(folder / "metrics.jsonl")]
    return read_json(folder / "result.json")["weights_sha256"], rows


def resumed_from(project: Project) -> int:
    log = (run_dir(project) / "logs" / "attempt_2" / "rank_0.log").read_text()
    found = re.search(rf"training from step (\d+) of {STEPS}", log)
    assert found is not None, log
    return int(found[1])


def mlflow(project: Project, sql: str) -> list[tuple[Any, ...]]:
    return project.query(".mlflow/mlflow.db", sql)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project with tokens, for others to start from."""
    project = Project(tmp_path_factory.mktemp("train") / "whole")
    done = project.flows("prepare", "--plain")
    assert done.returncode == 0, done.stderr
    return project


@pytest.fixture(scope="module")
def whole(prepared: Project) -> tuple[str, list[dict[str, float]]]:
    """The outcome of a run that nobody disturbed."""
    done = prepared.execute(*PRETRAIN, *LONG, "--plain")
    assert done.returncode == 0, done.stderr
    sha256, rows = outcome(prepared)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    return sha256, rows


@pytest.fixture
def project(prepared: Project, tmp_path: Path) -> Iterator[Project]:
    project = Project(tmp_path / "project")
    shutil.copytree(prepared.root / "data", project.root / "data")
    yield project
    project.kill()


@pytest.mark.slow
def test_killed_with_all_its_ranks_it_resumes_to_the_same_weights(
    project: Project, whole: tuple[str, list[dict[str, float]]]
) -> None:
    flow = start(project, "--plain")
    await_step(project, 60)
    family = [psutil.Process(flow.pid), *psutil.Process(flow.pid).children(recursive=True)]
    assert len(family) >= 5, "flow, supervisor, agent and two ranks"
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    flow.communicate()
    assert flow.returncode == -signal.SIGKILL
    await_true(lambda: not project.processes())
    assert not (run_dir(project) / "result.json").exists()

    again = start(project, "--plain")
    said, _ = again.communicate(timeout=400)
    assert again.returncode == 0, said
    assert resumed_from(project) % 40 == 0 < resumed_from(project)
    assert outcome(project) == whole
    # MLflow: one child, of which the second start knows that it is the same.
    assert mlflow(project, "SELECT status FROM runs WHERE name = 'ddp'") == [("FINISHED",)]
    assert_each_metric_once(project, whole[1])


CLOCK = """
import os, time
now = time.time
time.time = lambda: now() - 7200 * os.path.exists({mark!r})
"""
"""A sitecustomize.py, imported by every Python before anything else."""


@pytest.mark.slow
def test_a_clock_that_is_set_back_and_a_checkpoint_that_is_cut_off(
    project: Project, whole: tuple[str, list[dict[str, float]]], tmp_path: Path
) -> None:
    """Two hours back while it trains; killed, its newest checkpoint is cut off; started again."""
    (tmp_path / "site").mkdir()
    mark = tmp_path / "set back"
    (tmp_path / "site" / "sitecustomize.py").write_text(CLOCK.format(mark=str(mark)))
    command = [*PRETRAIN, *LONG, "--plain"]
    flow = project.start(*command, PYTHONPATH=str(tmp_path / "site"))
    await_step(project, 60)
    mark.touch()
    await_step(project, 100)
    flow.kill()
    flow.communicate()
    await_true(lambda: not project.processes())
    *_, older, newest = sorted((run_dir(project) / "checkpoints").glob("step_*"))
    largest = max(newest.iterdir(), key=lambda file: file.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)

    again = project.execute(*command, PYTHONPATH=str(tmp_path / "site"))
    assert again.returncode == 0, again.stderr
    assert f"{newest.name} is passed over: {largest.name} has" in again.stdout + again.stderr
    assert resumed_from(project) == int(older.name.removeprefix("step_"))
    assert outcome(project) == whole
    rows = read_rows(run_dir(project) / "metrics.jsonl")
    wall, elapsed = ([row[key] for row in rows] for key in ("time", "elapsed"))
    assert wall[-1] < wall[0] - 3600, "the clock was set back"
    steps = [later - earlier for earlier, later in itertools.pairwise(elapsed)]
    assert min(steps) > 0 and max(steps) < 60
    timing = read_json(run_dir(project) / "result.json")["timing"]
    assert timing["seconds"] >= elapsed[-1]
    assert timing["device_hours"] == pytest.approx(2 * timing["seconds"] / 3600)
    assert mlflow(project, "SELECT status FROM runs WHERE name = 'ddp'") == [("FINISHED",)]
    assert_each_metric_once(project, whole[1])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["plain", "prefect"])
def test_sigterm_leaves_a_checkpoint_and_no_process(
    mode: str, project: Project, whole: tuple[str, list[dict[str, float]]]
) -> None:
    arguments = ["--plain"] if mode == "plain" else []
    flow = start(project, *arguments)
    await_step(project, 60)
    flow.send_signal(signal.SIGTERM)
    said, _ = flow.communicate(timeout=60)
    assert flow.returncode == 128 + signal.SIGTERM, said
    assert "Traceback" not in said
    await_true(lambda: not project.processes(), timeout_s=5)
    log = (run_dir(project) / "logs" / "attempt_1" / "rank_0.log").read_text()
    stopped = re.search(r"stopped after step (\d+); its checkpoint is written", log)
    assert stopped is not None, log
    assert (run_dir(project) / "checkpoints" / f"step_{int(stopped[1]):08}" / "seal.json").is_file()
    [(child, status)] = mlflow(project, "SELECT run_uuid, status FROM runs WHERE name = 'ddp'")
    assert status == "KILLED"
    assert ("KILLED",) in mlflow(project, "SELECT status FROM runs WHERE name = 'pretrain'")

    again = start(project, *arguments)
    said, _ = again.communicate(timeout=400)
    assert again.returncode == 0, said
    assert resumed_from(project) == int(stopped[1])
    assert outcome(project) == whole
    after = mlflow(project, "SELECT run_uuid, status FROM runs WHERE name = 'ddp'")
    assert after == [(child, "FINISHED")]
    assert_each_metric_once(project, whole[1])
    await_true(lambda: not project.processes(), timeout_s=5)


def assert_each_metric_once(project: Project, rows: list[dict[str, float]]) -> None:
    twice = "SELECT key, step FROM metrics GROUP BY run_uuid, key, step HAVING COUNT(*) > 1"
    assert mlflow(project, twice) == []
    losses = mlflow(
        project, "SELECT step, value FROM metrics WHERE key = 'train/loss' ORDER BY step"
    )
    assert losses == [(row["step"], row["train/loss"]) for row in rows]


@pytest.mark.slow
def test_the_command_of_a_dry_run_trains_to_the_same_weights(
    project: Project, whole: tuple[str, list[dict[str, float]]]
) -> None:
    dry = project.execute(*PRETRAIN, *LONG, "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert {path.name for path in run_dir(project).iterdir()} == {"config.json"}
    done = project.execute("bash", "-c", dry.stdout)
    assert done.returncode == 0, done.stderr
    assert f"step {STEPS}/{STEPS}" in done.stdout, "without the launcher it talks to the terminal"
    assert outcome(project) == whole
