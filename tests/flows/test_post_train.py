"""Flow `post_train` in a project of its own: what is refused, given rollouts, a sweep of seeds."""

import json
import shlex
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from algorithms.common.files import read_json
from tests.project import Project

ARM = ("post_train", "--arm", "exact")
REWARD = """
def reward(prompt, completion, row):
    if row["prompt_id"] == "train/5/1":
        raise KeyError("gold")
    return 0.5


def length(prompt, completion, row):
    return len(completion)
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """With its prompts and policy."""
    project = Project(tmp_path_factory.mktemp("post_train") / "project")
    (project.root / "rewards.py").write_text(REWARD)
    done = project.dvc("repro", "policy")
    assert done.returncode == 0, done.stdout + done.stderr
    return project


def refused(project, *arguments):
    done = project.flows(*arguments)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stdout + done.stderr
    return done.stderr


def test_a_dry_run_writes_the_config_and_names_the_command(project):
    done = project.flows(*ARM, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "--nproc-per-node=2 -m tasks.jobs.post_train" in done.stdout
    config = read_json(Path(shlex.split(done.stdout)[-1]))
    assert config["policy_dir"] == str(project.root / "models" / "policy")
    assert config["arm"]["replay"]["mode"] == "exact"


def test_what_cannot_be_is_one_line(project):
    key = "post_train.training.reward"
    assert f"{key}: there is no module 'none.such'" in refused(
        project, *ARM, "--dry-run", "--set", f"{key}=none.such:f"
    )
    (project.root / "broken").mkdir()
    (project.root / "broken" / "__init__.py").write_text("raise SystemExit(0)")
    for name, why in (
        ("broken.rewards:f", "broken.rewards: SystemExit: 0"),
        ("builtins:len", "builtins is no Python file"),
        ("os:getpid", "os is no Python file"),
    ):
        assert f"{key}: {why}" in refused(project, *ARM, "--dry-run", "--set", f"{key}={name}")
    assert "no such file" in refused(
        project, *ARM, "--dry-run", "--set", "post_train.arms.exact.given=none.parquet"
    )
    assert "is trained by the flow post_train, not pretrain" in refused(
        project, "pretrain", "--arm", "exact"
    )
    assert "post_train.policy.warm_start: needs prompts.lookup" in refused(
        project,
        *ARM,
        "--set",
        "prompts={files: {train: a, val: b}, tokenizer: c, train: 1, val: 1}",
    )


@pytest.mark.slow
def test_a_reward_that_raises_is_one_line_that_names_the_row(project):
    setting = "post_train.training.reward=rewards:reward"
    done = project.flows(*ARM, "--plain", "--set", setting)
    assert done.returncode == 2, done.stdout + done.stderr
    [line] = done.stderr.splitlines()
    assert "prompt train/5/1: reward: KeyError: 'gold'" in line
    assert not [*(project.root / "runs" / "set").glob("*/metrics/post_train/exact/quality.json")]


@pytest.mark.slow
def test_prompts_a_model_and_a_reward_of_ones_own(project):
    """README, "Rewards of your own"."""
    mine = project.root / "mine"
    shutil.copytree(project.root / "models" / "policy", mine / "model")
    rows = [{"prompt": f"k{i % 4} v{i % 3}", "question": "? k0", "answer": "v0"} for i in range(12)]
    (mine / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows[:5]), mine / "val.parquet")
    files = "files: {train: mine/train.jsonl, val: mine/val.parquet}, tokenizer: mine/model"
    done = project.flows(
        *ARM,
        *("--set", f"prompts={{{files}, train: 1000, val: 100}}"),
        *("--set", "post_train.policy={model: {path: mine/model}}"),
        *("--set", "post_train.training.reward=rewards:length"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [rollouts] = (project.root / "runs" / "set").glob("*/data/rollouts/post_train/exact.parquet")
    rows = pq.read_table(rollouts).to_pylist()
    assert {row["reward"] for row in rows} - {0.0, 0.5, 1.0}, "the lengths of completions"
    [policy] = (project.root / "runs" / "set").glob("*/models/policy")
    for name in ("model.safetensors", "tokenizer.json"):
        assert (policy / name).read_bytes() == (mine / "model" / name).read_bytes()


@pytest.mark.slow
def test_a_log_is_learned_from_and_seeds_are_swept(project):
    done = project.flows(*ARM)
    assert done.returncode == 0, done.stdout + done.stderr
    log = project.root / "data" / "rollouts" / "post_train" / "exact.parquet"
    first = pq.read_table(log).filter(pq.read_table(log).column("step").to_numpy() == 1)
    pq.write_table(first, project.root / "log.parquet")
    sets = ["post_train.arms.exact.given=log.parquet", "post_train.training.steps=2"]
    done = project.flows(*ARM, "--plain", *(f"--set={each}" for each in sets))
    assert done.returncode == 0, done.stdout + done.stderr
    found = (project.root / "runs" / "set").glob("*/data/rollouts/post_train/exact.parquet")
    learned = pq.read_table(max(found, key=lambda path: path.stat().st_mtime))
    assert learned.num_rows == 2 * first.num_rows
    assert {*map(tuple, learned.column("tokens").to_pylist())} == {
        *map(tuple, first.column("tokens").to_pylist())
    }
    results = project.root / "runs" / "post_train" / "exact"
    before = {*results.glob("*/result.json")}
    swept = project.flows("sweep", *ARM, "--seeds", "2")
    assert swept.returncode == 0, swept.stdout + swept.stderr
    [line] = [line for line in swept.stdout.splitlines() if "as it is" in line]
    assert "best" in line and "reward" in swept.stdout
    assert len({*results.glob("*/result.json")} - before) == 1, "seed 0 was done"
