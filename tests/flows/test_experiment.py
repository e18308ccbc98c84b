"""The whole pipeline in a project of its own: real Prefect, MLflow, DVC, git and torchrun.

One experiment is run for all tests of this folder, in a folder whose name has a space and letters
that are not ASCII.
"""

import json
import sqlite3
import time

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from algorithms.common.files import read_json
from tasks.rollouts import read_rollouts
from tests.project import SECRET, Project

DDP = "pretrain_lordo/ddp"
LORDO = "pretrain_lordo/lordo_global"
NS = "pretrain_lordo/lordo_ns"
ASYNC = "pretrain_async/async"
DEEP = "pretrain_async/ours_p8"
EXACT = "post_train/exact"
STUDY = ("experiment", "--study", "lordo")
FILE = "studies/lordo/dvc.yaml"


@pytest.fixture(scope="module")
def studied(finished):
    """The same project after the study, with what that printed."""
    project, _ = finished
    done = project.flows(*STUDY)
    assert done.returncode == 0, done.stdout + done.stderr
    return project, done


@pytest.fixture(scope="module")
def studied_async(studied):
    """The same project after the other study, with what that printed."""
    project, _ = studied
    done = project.flows("experiment", "--study", "async")
    assert done.returncode == 0, done.stdout + done.stderr
    return project, done


def query(project, database, sql):
    with sqlite3.connect(project.root / database) as connection:
        return connection.execute(sql).fetchall()


def test_it_ends_with_the_table_and_where_to_look(finished):
    project, done = finished
    for text in (
        "Arms of pretrain_async",
        "utilisation",
        "ddp",
        "lordo_global",
        "bits/byte",
        "device-hours",
        "payload",
    ):
        assert text in done.stdout
    assert "report:  reports/index.html" in done.stdout
    assert "mlflow ui --host 127.0.0.1" in done.stdout
    assert "prefect server start --host 127.0.0.1" in done.stdout
    assert (project.root / "reports" / "pretrain_lordo_loss_bytes.png").is_file()
    assert (project.root / "reports" / "pretrain_async_schedule.png").is_file()
    assert set(read_json(project.root / "reports" / "summary.json")) == {DDP, LORDO, ASYNC, EXACT}


def test_a_secret_of_the_environment_is_written_nowhere(finished):
    project, done = finished
    assert SECRET not in done.stdout + done.stderr
    files = [path for path in project.root.rglob("*") if path.is_file() and not path.is_symlink()]
    assert len(files) > 100
    ours = [path for path in files if ".venv" not in path.parts]
    assert [path for path in ours if SECRET.encode() in path.read_bytes()] == []


def test_dvc_and_git_see_no_change_but_the_lock(finished):
    project, _ = finished
    assert "up to date" in project.dvc("status", "dvc.yaml").stdout
    assert project.git("status", "--porcelain").strip() == "?? dvc.lock"
    repro = project.dvc("repro")
    assert repro.returncode == 0, repro.stderr
    assert "didn't change, skipping" in repro.stdout
    assert "Running stage" not in repro.stdout, "nor a stage of the study"


def test_run_again_it_says_in_seconds_that_all_is_up_to_date(finished):
    project, _ = finished
    logs = {*project.root.glob("runs/*/*/*/logs/*")}
    begun = time.perf_counter()
    done = project.flows("experiment")
    assert done.returncode == 0
    arms = "pretrain_lordo@ddp, pretrain_lordo@lordo_global, pretrain_async@async"
    arms += ", post_train@exact"
    assert f"up to date: corpus, tokens, prompts, policy, {arms}, report" in done.stdout
    assert "Arms" in done.stdout
    assert time.perf_counter() - begun < 30
    assert {*project.root.glob("runs/*/*/*/logs/*")} == logs, "nothing was trained"


def test_the_model_is_an_ordinary_directory_with_its_tokenizer(finished):
    project, _ = finished
    folder = project.root / "models" / DDP
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    ids = tokenizer("a river of small stones", return_tensors="pt")["input_ids"]
    assert tokenizer.decode(ids[0]) == "a river of small stones"
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids).loss
    assert torch.isfinite(loss)


def test_what_repeats_is_tracked_and_what_does_not_is_beside_it(finished):
    project, _ = finished
    metrics = project.root / "metrics" / DDP
    quality, timing = read_json(metrics / "quality.json"), read_json(metrics / "timing.json")
    assert quality["tokens"] == 12 * 8 * 16
    assert quality["steps"] == 12
    assert quality["payload_bytes"] >= 4 * quality["parameters"] * 12
    thin = read_json(project.root / "metrics" / LORDO / "quality.json")
    assert 0 < thin["payload_bytes"] < quality["payload_bytes"]
    assert timing["device_hours"] == pytest.approx(2 * timing["seconds"] / 3600)
    lock = (project.root / "dvc.lock").read_text()
    assert "quality.json" in lock and "curve.json" in lock and "timing.json" not in lock
    assert not set(quality) & set(timing)


def test_rollouts_and_completions_of_post_training_are_kept(finished):
    """Rollouts as they are learned from, and what held-out prompts were answered, by evaluation."""
    project, _ = finished
    path = project.root / "data" / "rollouts" / f"{EXACT}.parquet"
    rollouts = read_rollouts(path)
    assert len(rollouts) == 4 * 3 * 2 * 4, "steps, prompts, questions, group"
    assert all(rollout.reward in (0.0, 1.0) and rollout.tokens for rollout in rollouts)
    steps = pq.read_table(path).column("step").to_pylist()
    assert steps == sorted(steps) and {*steps} == {1, 2, 3, 4}
    rows = read_json(project.root / "metrics" / EXACT / "completions.json")["rows"]
    assert [*dict.fromkeys(row["step"] for row in rows)] == [0, 2, 4]
    assert {row["decoding"] for row in rows} == {"greedy", "sampled"}
    page = (project.root / "reports" / "index.html").read_text("utf-8")
    assert page.count("exact, update ") == 3
    for figure in ("updates", "seconds", "tokens"):
        assert (project.root / "reports" / f"post_train_reward_{figure}.png").is_file()
    [stored] = project.root.glob(".mlflow/**/artifacts/completions.json")
    table = read_json(stored)
    assert len(table["data"]) == len(rows) and {*table["columns"]} == {*rows[0]}
    policy = project.root / "models" / "policy"
    assert read_json(policy / "MANIFEST.json")["steps"] > 1
    assert AutoTokenizer.from_pretrained(project.root / "models" / EXACT).eos_token == "<end>"


def test_prefect_has_the_artifacts_and_the_log_of_rank_0(finished):
    project, _ = finished
    artifacts = dict(query(project, ".prefect/prefect.db", "SELECT key, data FROM artifact"))
    mine = {"summary", "mlflow-ddp", "mlflow-lordo-global", "mlflow-async", "mlflow-exact"}
    assert mine | {"arms-pretrain-lordo", "arms-pretrain-async"} <= set(artifacts)
    assert "ddp" in artifacts["arms-pretrain-lordo"]
    assert "bits/byte" in artifacts["arms-pretrain-lordo"]
    assert "utilisation" in artifacts["arms-pretrain-async"]
    assert "/runs/" in artifacts["mlflow-ddp"]
    messages = [m for (m,) in query(project, ".prefect/prefect.db", "SELECT message FROM log")]
    assert any(m.startswith("step 12/12  loss ") for m in messages)
    states = query(project, ".prefect/prefect.db", "SELECT name, state_type FROM flow_run")
    trained = {f"pretrain {arm}" for arm in ("ddp", "lordo_global", "async")}
    sql = "SELECT name, key FROM artifact JOIN flow_run ON flow_run.id = artifact.flow_run_id"
    shown = {
        key for name, key in query(project, ".prefect/prefect.db", sql) if name == "experiment"
    }
    assert shown == {
        "summary",
        "arms-pretrain-lordo",
        "arms-pretrain-async",
        "arms-post-train",
    }
    flows = {"experiment", "prepare", "report", "post_train exact"} | trained
    assert {name for name, _ in states} == flows
    assert {state for _, state in states} == {"COMPLETED"}
    versions = query(project, ".prefect/prefect.db", "SELECT task_version FROM task_run")
    assert ("1",) in versions


def test_mlflow_has_the_tree_the_names_and_the_tags(finished):
    project, _ = finished
    runs = query(project, ".mlflow/mlflow.db", "SELECT run_uuid, name, status FROM runs")
    assert {(name, status) for _, name, status in runs} == {
        ("experiment", "FINISHED"),
        ("ddp", "FINISHED"),
        ("lordo_global", "FINISHED"),
        ("async", "FINISHED"),
        ("policy", "FINISHED"),
        ("exact", "FINISHED"),
    }
    ids = {name: run for run, name, _ in runs}
    tags = dict(
        query(
            project,
            ".mlflow/mlflow.db",
            f"SELECT key, value FROM tags WHERE run_uuid = '{ids['ddp']}'",
        )
    )
    assert tags["mlflow.parentRunId"] == ids["experiment"]
    assert tags["dvc_stage"] == "pretrain_lordo@ddp"
    assert tags["git_commit"] == project.git("rev-parse", "HEAD").strip()
    assert tags["world_size"] == "2" and tags["backend"] == "gloo" and tags["device"] == "cpu"
    assert tags["task_version"] == "1" and tags["oversubscribed"] in (
        "True",
        "False",
        "true",
        "false",
    )
    sent = query(
        project,
        ".mlflow/mlflow.db",
        f"SELECT key, step, value FROM metrics WHERE run_uuid = '{ids['ddp']}'",
    )
    names = {key for key, _, _ in sent}
    assert {
        "train/loss", "val/loss", "val/perplexity", "val/bits_per_byte", "tokens", "tokens_per_s",
        "lr", "grad_norm", "device_hours", "gpu_hours", "comm/payload_bytes", "comm/wire_bytes",
        "comm/gradients/payload_bytes", "memory/peak_bytes", "memory/optimizer_bytes",
    } <= names  # fmt: skip
    run_dir = next((project.root / "runs" / DDP).iterdir())
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    losses = sorted((step, value) for key, step, value in sent if key == "train/loss")
    assert losses == [(row["step"], row["train/loss"]) for row in rows]
    flow_run = query(
        project, ".mlflow/mlflow.db", "SELECT value FROM tags WHERE key = 'prefect_flow_run'"
    )
    assert any(value != "none" for (value,) in flow_run)


def test_an_override_leaves_what_is_tracked_alone(finished):
    project, _ = finished
    before = (project.root / "dvc.lock").read_text()
    done = project.flows(
        "pretrain", "--arm", "ddp", "--plain", "--set", "pretrain_lordo.training.steps=3"
    )
    assert done.returncode == 0, done.stderr
    [place] = (project.root / "runs" / "set").iterdir()
    assert read_json(place / "metrics" / DDP / "quality.json")["steps"] == 3
    assert read_json(project.root / "metrics" / DDP / "quality.json")["steps"] == 12
    assert (project.root / "dvc.lock").read_text() == before
    assert "up to date" in project.dvc("status", "dvc.yaml").stdout


@pytest.mark.slow
def test_a_study_trains_its_arms_after_the_others_and_compares_all(studied):
    project, done = studied
    log = done.stdout + done.stderr
    for name in ("tokens", "pretrain_lordo@ddp", "pretrain_lordo@lordo_global", "report"):
        assert f"{name}: up to date" in log
    assert "report:  studies/lordo/reports/index.html" in done.stdout
    here = project.root / "studies" / "lordo"
    assert set(read_json(here / "reports" / "summary.json")) == {DDP, LORDO, NS}
    assert set(read_json(project.root / "reports" / "summary.json")) == {DDP, LORDO, ASYNC, EXACT}
    assert AutoTokenizer.from_pretrained(here / "models" / NS).vocab_size == 300
    assert "up to date" in project.dvc("status", FILE).stdout
    changes = project.git("status", "--porcelain", "studies")
    assert changes.strip() == "?? studies/lordo/dvc.lock"
    sql = "SELECT value FROM tags WHERE key = 'dvc_stage'"
    stages = {value for (value,) in query(project, ".mlflow/mlflow.db", sql)}
    assert "studies/lordo/dvc.yaml:pretrain_lordo@lordo_ns" in stages
    artifacts = query(project, ".prefect/prefect.db", "SELECT key FROM artifact")
    assert {"arms-lordo", "summary-lordo", "mlflow-lordo-ns"} <= {key for (key,) in artifacts}


@pytest.mark.slow
def test_a_study_of_pipelines_is_simulated(studied_async):
    project, done = studied_async
    assert "pretrain_async@async: up to date" in done.stdout + done.stderr
    assert "modelled" in done.stdout and "Arms of pretrain_lordo" not in done.stdout
    here = project.root / "studies" / "async"
    assert set(read_json(here / "reports" / "summary.json")) == {ASYNC, DEEP}
    timing = read_json(here / "metrics" / DEEP / "timing.json")
    assert timing["simulated"] and "device_hours" not in timing
    assert timing["modelled_device_hours"] > 0


@pytest.mark.slow
def test_a_study_again_is_up_to_date_and_takes_overrides(studied):
    project, _ = studied
    again = project.flows(*STUDY)
    assert "up to date: corpus, tokens" in again.stdout and again.returncode == 0
    assert "lordo_ns" in again.stdout
    arm = ("pretrain", "--arm", "lordo_ns")
    assert "up to date: corpus, tokens" in project.flows(*arm).stdout
    before = (project.root / "studies" / "lordo" / "dvc.lock").read_text()
    done = project.flows(*arm, "--plain", "--set", "pretrain_lordo.study.lordo_ns.sync.every=6")
    assert done.returncode == 0, done.stderr
    [metrics] = (project.root / "runs" / "set").glob(f"*/studies/lordo/metrics/{NS}")
    assert (metrics / "quality.json").is_file()
    assert (project.root / "studies" / "lordo" / "dvc.lock").read_text() == before
    assert "up to date" in project.dvc("status", FILE).stdout


@pytest.mark.slow
def test_a_changed_param_reruns_only_what_depends_on_it(studied):
    project, _ = studied
    project.git("add", "-A")
    project.git("commit", "-qm", "first results")
    tokens = (project.root / "data" / "tokens" / "MANIFEST.json").stat().st_mtime_ns
    project.set("lr: 1.0e-2", "lr: 2.0e-2")
    done = project.flows("experiment")
    assert done.returncode == 0, done.stderr
    assert (project.root / "data" / "tokens" / "MANIFEST.json").stat().st_mtime_ns == tokens
    assert project.git("status", "--porcelain").split() == ["M", "dvc.lock", "M", "params.yaml"]
    log = done.stdout + done.stderr
    assert "tokens: up to date" in log
    assert "pretrain_lordo@ddp: params.yaml: pretrain_lordo.arms.ddp changed" in log
    assert "pretrain_lordo@lordo_global: up to date" in log
    assert "up to date" in project.dvc("status", "dvc.yaml").stdout
    study = project.dvc("status").stdout
    assert "studies/lordo/dvc.yaml:report" in study and "lordo_ns" not in study


@pytest.mark.slow
def test_dvc_repro_from_nothing_gives_the_same_outputs(studied, tmp_path):
    """In another folder, from a bare shell: equal hashes of all outputs in both locks."""
    experiment, _ = studied
    other = Project(tmp_path / "other")
    done = other.dvc("repro")
    assert done.returncode == 0, done.stdout + done.stderr
    assert _outs(_lock(other)) == _outs(_first_lock(experiment))
    assert other.git("status", "--porcelain").split() == ["A", "dvc.lock"]  # DVC stages its lock
    assert (other.root / "metrics" / DDP / "timing.json").is_file()
    assert "up to date: corpus" in other.flows("experiment").stdout
    done = other.dvc("repro", "studies/lordo/dvc.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    lock = "studies/lordo/dvc.lock"
    assert _outs(_lock(other, lock)) == _outs(_first_lock(experiment, lock))
    assert other.git("status", "--porcelain").split() == ["A", "dvc.lock", "A", lock]
    done = other.dvc("repro", "studies/async/dvc.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    names = _outs(_lock(other, "studies/async/dvc.lock"))
    assert set(names) == {"pretrain_async@ours_p8", "report"}
    assert "up to date: corpus" in other.flows(*STUDY).stdout


def _lock(project, name="dvc.lock"):
    return (project.root / name).read_text()


def _first_lock(project, name="dvc.lock"):
    """As it was before a test changed params.yaml, which it committed first."""
    committed = name in project.git("ls-files")
    return project.git("show", f"HEAD:{name}") if committed else _lock(project, name)


def _outs(lock):
    from ruamel.yaml import YAML

    stages = YAML(typ="safe").load(lock)["stages"]
    return {name: {out["path"]: out["md5"] for out in s["outs"]} for name, s in stages.items()}
