"""The jobs as processes: killed and resumed, ranks with fewer prompts, a reward that raises."""

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from algorithms.branch_replay.job_config import PolicyJobConfig, WarmStartConfig
from algorithms.common.files import read_json
from algorithms.common.metrics import read_rows
from tasks.paths import PROJECT
from tests.lookups import SMALL
from tests.post_training import MODEL, folders, job, told, write_config
from tests.processes import environment
from tests.tasks.runs import await_true

REWARD = """
def reward(prompt, completion, row):
    if row["prompt_id"] == "train/5/1":
        raise KeyError("gold")
    return 0.5
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return folders(tmp_path_factory.mktemp("inputs"))


def start(config, ranks=1, module="post_train", **variables):
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    kept = {k: v for k, v in os.environ.items() if not k.startswith("SHOESTRING")}
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", f"tasks.jobs.{module}", str(config)],
        cwd=PROJECT,
        env=kept | {"OMP_NUM_THREADS": "1"} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(*arguments, **more):
    process = start(*arguments, **more)
    said, _ = process.communicate(timeout=300)
    return process.returncode, said


@pytest.mark.slow
def test_killed_on_two_ranks_of_uneven_prompts_it_ends_with_the_same_weights(inputs, tmp_path):
    """Three prompts an update: two on rank 0, one on rank 1. Rank 1 is killed."""
    config = job(inputs, ranks=2, steps=20, eval_every=20, checkpoint_every=4)
    whole, broken = (write_config(tmp_path / name, config) for name in ("whole", "broken"))
    code, said = finish(whole, 2)
    assert code == 0, said
    first = start(broken, 2)
    checkpoints = broken.parent / "checkpoints"
    await_true(lambda: [*checkpoints.glob("step_*")] or first.poll() is not None, 120)
    children = psutil.Process(first.pid).children(recursive=True)
    [victim] = [p for p in children if environment(p).get("RANK") == "1"]
    victim.send_signal(signal.SIGKILL)
    first.communicate(timeout=120)
    assert first.returncode != 0 and not (broken.parent / "result.json").exists()
    code, said = finish(broken, 2)
    assert code == 0 and "training from step 0" not in said, said
    one, two = (read_json(path.with_name("result.json")) for path in (whole, broken))
    assert one["weights_sha256"] == two["weights_sha256"]
    assert one["quality"] == two["quality"]
    assert told(whole.parent) == told(broken.parent)
    rows = told(whole.parent)[0]
    assert all(row["grad_norm"] > 0 for row in rows[1:]), "there was something to learn"
    assert [len(rows) for rows in told(whole.parent)[2]] == [20 * 2 * 16, 20 * 16]
    folder = whole.parent / "model"
    assert AutoModelForCausalLM.from_pretrained(folder).config.vocab_size == len(
        AutoTokenizer.from_pretrained(folder)
    )


@pytest.mark.slow
def test_a_reward_that_raises_names_the_row(inputs, tmp_path):
    (tmp_path / "mine.py").write_text(REWARD)
    config = write_config(tmp_path / "run", job(inputs, reward="mine:reward", ranks=2))
    path = os.pathsep.join([str(PROJECT), str(tmp_path)])
    logs = tmp_path / "logs"
    logs.mkdir()
    code, said = finish(config, 2, PYTHONPATH=path, SHOESTRING_LOG_DIR=str(logs))
    assert code == 1, said
    errors = [read_json(path) for path in logs.glob("rank_*.error.json")]
    [error] = [error for error in errors if error["kind"] == "input"]
    assert error["message"] == "prompt train/5/1: reward: KeyError: 'gold'"
    assert not (tmp_path / "run" / "result.json").exists()


def test_the_policy_is_taught_and_says_so(inputs, tmp_path):
    policy = PolicyJobConfig(
        stage="policy",
        arm_name="policy",
        job_id="test",
        model=MODEL,
        prompts_dir=inputs["prompts_dir"],
        seed=1,
        lookup=SMALL,
        warm_start=WarmStartConfig(stages=[[1, 0]], further=[2, 1], further_steps=3, most_steps=40),
    )
    config = write_config(tmp_path / "policy", policy)
    module = [sys.executable, "-m", "tasks.jobs.policy", str(config)]
    done = subprocess.run(module, cwd=PROJECT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    made = read_json(tmp_path / "policy" / "result.json")["quality"]
    assert made == read_json(tmp_path / "policy" / "model" / "MANIFEST.json")
    assert 3 < made["steps"] <= 43
    rows = read_rows(tmp_path / "policy" / "metrics.jsonl")
    assert rows and all(row["step"] % 20 == 0 for row in rows)
    assert json.loads((tmp_path / "policy" / "model" / "config.json").read_text())["eos_token_id"]
