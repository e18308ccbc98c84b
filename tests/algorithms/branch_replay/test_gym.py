"""Datasets of reasoning-gym, which is installed beside the project's packages for these tests."""

import json
import subprocess
import sys
import sysconfig

import pytest

from algorithms.branch_replay import gym
from algorithms.branch_replay.gym import GymConfig
from algorithms.common.errors import FieldError, InputError
from tasks.paths import PROJECT

NAMES = ["chain_sum", "countdown", "needle_haystack", "gsm_symbolic", "codeio", "graph_color"]

SCRIPT = """
import json, pathlib, sys
from algorithms.branch_replay.gym import GymConfig, rows
from algorithms.branch_replay.rewards import find_reward, score
from algorithms.common.errors import InputError
from tasks import prompt_stage
from tasks.data_config import PromptsConfig

reward = find_reward("reasoning_gym")
found = {}
for name in sys.argv[2:]:
    made = [list(rows(GymConfig(name=name, chat=False), 3, seed)) for seed in (1, 1, 2)]
    row = json.loads(json.dumps(made[0][2]))
    right = f"I think so. <answer>{row['answer']}</answer> Yes."
    found[name] = {
        "rows": made[0],
        "repeats": made[0] == made[1],
        "by_seed": made[0] != made[2],
        "by_split": made[0] != list(rows(GymConfig(name=name, chat=False), 3, 1, "val")),
        "right": score(reward, row["prompt"], right, row, "row"),
        "bare": score(reward, row["prompt"], row["answer"] + "\\n", row, "row"),
        "wrong": score(reward, row["prompt"], "no idea", row, "row"),
    }
unread = next(rows(GymConfig(name="prime_factorization"), 1, 0))
found["unread"] = score(reward, "", "no idea", unread, "row")
found["chat"] = unread["prompt"]
settings = {"min_terms": 2, "max_terms": 2}
found["set"] = next(rows(GymConfig(name="chain_sum", settings=settings), 1, 0))
for name, settings in (("nope", {}), ("chain_sum", {"terms": 1}), ("chain_sum", {"min_terms": 0})):
    try:
        next(rows(GymConfig(name=name, settings=settings), 1, 0))
    except InputError as error:
        found.setdefault("errors", []).append(str(error))
folder = pathlib.Path(sys.argv[1])
(folder / "tokenizer.json").write_text("{}")
stage = PromptsConfig(gym=GymConfig(name="chain_sum"), tokenizer=str(folder), train=3, val=2)
found["stage"] = prompt_stage.build(stage, folder / "prompts")
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """An interpreter that sees our packages and, in front of them, reasoning-gym with its own."""
    home = tmp_path_factory.mktemp("gym")
    run = {"check": True, "capture_output": True, "text": True, "timeout": 400}
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], **run)
    (packages,) = home.glob("lib/python*/site-packages")
    (packages / "ours.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = home / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    subprocess.run([*command, gym.PACKAGE], **run)
    return python


@pytest.mark.slow
def test_any_dataset_is_prompts_with_its_own_scorer(python, tmp_path):
    run = [python, "-c", SCRIPT, tmp_path, *NAMES]
    done = subprocess.run(run, cwd=PROJECT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for name in NAMES:
        of = found[name]
        assert of["repeats"] and of["by_seed"] and of["by_split"], name
        assert [row["prompt_id"] for row in of["rows"]] == [f"{name}/train/{i}" for i in range(3)]
        assert all(row["prompt"] and row["question"] == "" for row in of["rows"])
        assert of["wrong"] <= 0.1
        if name != "graph_color":  # it has no answer of its own, but a scorer
            assert of["right"] == of["bare"] == 1.0, name
    assert found["unread"] == 0.0
    assert found["chat"][0]["role"] == "user" and "prime" in found["chat"][0]["content"].lower()
    assert (
        found["set"]["prompt"][0]["content"].count("+")
        + (found["set"]["prompt"][0]["content"].count(" - "))
        == 1
    )
    assert [found["stage"][split]["rows"] for split in ("train", "val")] == [3, 2]
    assert found["errors"] == [
        "gym: nope: Dataset 'nope' not registered",
        "gym: chain_sum: ChainSumConfig.__init__() got an unexpected keyword argument 'terms'",
        "gym: chain_sum: min_terms must be positive",
    ]


def test_the_extra_names_the_version_that_is_installed_by_hand():
    assert f'"{gym.PACKAGE}"' in (PROJECT / "pyproject.toml").read_text()


def test_without_the_package_one_line_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(InputError, match=r"^gym: needs .*: \.venv/bin/pip install reasoning-gym"):
        next(gym.rows(GymConfig(name="chain_sum"), 1, seed=0))


def test_settings_that_rows_have_themselves_are_refused():
    with pytest.raises(FieldError, match="^settings: must not hold seed, size: rows have their"):
        GymConfig(name="chain_sum", settings={"size": 3, "seed": 1})
