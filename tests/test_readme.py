"""README.md promises only what is run: each command has a test, each path exists, each file a line.

A command that is new in README fails here until it is listed with what runs it.
"""

import re
import shlex
import subprocess
from pathlib import PurePath

import pytest

from tasks.paths import PROJECT

README = (PROJECT / "README.md").read_text(encoding="utf-8")

EXPERIMENT = "tests/flows/conftest.py::finished"
STUDY = "tests/flows/test_experiment.py::studied"
STUDY_ASYNC = "tests/flows/test_experiment.py::studied_async"
TRAIN = "tests/tasks/test_train.py::test_sigterm_leaves_a_checkpoint_and_no_process"
OWN_DATA = "tests/flows/test_prepare.py::test_own_jsonl_becomes_corpus_and_tokens"
OWN_MODEL = (
    "tests/flows/test_pretrain.py::test_a_model_of_ones_own_is_trained_on_and_keeps_its_family"
)
GPU = "tests/flows/test_pretrain.py::test_the_gpu_profile_is_laid_over_params"
NODES = "tests/tasks/jobs/test_several_nodes.py::test_two_agents_train_to_the_weights_of_one"
REPRO = "tests/flows/test_experiment.py::test_dvc_repro_from_nothing_gives_the_same_outputs"
UI = "tests/tasks/test_servers.py::test_the_pages_end_with_their_command"
SERVE = "tests/tasks/test_servers.py::test_pages_deployments_and_the_worker"
HELP = "tests/flows/test_main.py::test_help_answers_in_under_a_second_and_explains_each_flow"
BENCH = (
    "tests/benchmarks/test_report.py::test_all_benchmarks_run_quick_and_those_that_failed_are_named"
)
SWEEP = (
    "tests/flows/test_sweep.py"
    "::test_stopped_and_started_again_it_does_what_is_left_under_one_parent"
)
POST_TRAIN = "tests/flows/test_post_train.py::test_a_log_is_learned_from_and_seeds_are_swept"
OWN_REWARD = "tests/flows/test_post_train.py::test_prompts_a_model_and_a_reward_of_ones_own"
GC = "tests/flows/test_command.py::test_gc_says_what_would_go_and_then_removes_it"
CI = ".ci/run"
BY_HAND = "nothing: they choose a build of torch on an index that not every machine reaches"

RUN_BY = {
    "make demo": EXPERIMENT,
    "make test": CI,
    "make check": CI,
    "make test-slow": CI,
    "make ui": UI,
    "make serve": SERVE,
    "make bench": BENCH,
    "python3 -m venv .venv && .venv/bin/pip install uv": BY_HAND,
    "VIRTUAL_ENV=.venv .venv/bin/uv pip install --torch-backend cpu torch==2.13.0": BY_HAND,
    "VIRTUAL_ENV=.venv .venv/bin/uv pip install --torch-backend auto torch==2.13.0": BY_HAND,
    "./run -m flows --help": HELP,
    "./run -m flows experiment": EXPERIMENT,
    "./run -m flows experiment --profile gpu": GPU,
    "./run -m flows pretrain --arm ddp": SERVE,
    "./run -m flows pretrain --arm ddp --set pretrain_lordo.training.steps=50": TRAIN,
    "./run -m flows experiment --study lordo": STUDY,
    "./run -m flows experiment --study async": STUDY_ASYNC,
    "./run -m flows sweep pretrain --arm ddp --grid optimizer.lr=1e-3,3e-3 --seeds 3": SWEEP,
    "./run -m flows post_train --arm exact": POST_TRAIN,
    "./run -m flows post_train --arm exact --set"
    " 'prompts={files: {train: mine/train.jsonl, val: mine/val.parquet}, tokenizer: DIR,"
    " train: 1000, val: 100}' --set 'post_train.policy={model: {path: DIR}}'"
    " --set post_train.training.reward=rewards:length": OWN_REWARD,
    "./run -m flows gc --dry-run": GC,
    ".venv/bin/dvc repro": REPRO,
    ".venv/bin/dvc repro studies/lordo/dvc.yaml": REPRO,
    ".venv/bin/dvc repro studies/async/dvc.yaml": REPRO,
    "./run -m flows prepare --set"
    """ 'corpus.sources=[{from: "path:mine/*.jsonl", licence: mine}]'""": OWN_DATA,
    "./run -m flows pretrain --arm ddp --set model.path=DIR"
    " --set tokens.tokenizer=DIR/tokenizer.json": OWN_MODEL,
    "./run -m flows pretrain --arm ddp --set pretrain_lordo.training.ranks=4 --dry-run": NODES,
    ".venv/bin/torchrun --nnodes 2 --node-rank 0 --nproc-per-node 2 --master-addr HOST"
    " --master-port 29500 -m tasks.jobs.pretrain_lordo CONFIG.json": NODES,
}
"""Command of README -> the test or fixture that runs it, or the script of CI."""

RECIPES = {
    "demo": "./run -m flows experiment",
    "ui": "./run -m flows ui",
    "serve": "./run -m flows serve",
    "bench": "./run -m benchmarks",
}
"""Targets whose tests run what the target does."""

UNSAID = {"README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml"}
"""At the top, beside dotfiles: what every project has."""


def commands():
    """Lines of the sh blocks, without comments, continued lines joined."""
    for block in re.findall(r"^```sh\n(.*?)^```", README, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if command := re.sub(r"(^|\s+)#.*", "", line):
                assert shlex.split(command)
                yield " ".join(command.split())


def drawing():
    [text] = re.findall(r"^```\n(flows/ .*?)^```", README, re.MULTILINE | re.DOTALL)
    return text


def drawn():
    """Paths of the drawing of the tree."""
    parents, found = [], []
    for line in drawing().splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        parents[depth:] = [line.split()[0]]
        found.append("".join(parents))
    return found


def tracked():
    names = subprocess.check_output(["git", "ls-files", "-z"], cwd=PROJECT, text=True).split("\0")
    return [name for name in names if name and (PROJECT / name).is_file()]


def test_every_command_is_run_by_something():
    said = [*commands()]
    assert len(said) > 15
    assert [command for command in said if command not in RUN_BY] == [], "who runs these?"
    assert [command for command in RUN_BY if command not in said] == [], "README lost these"


@pytest.mark.parametrize("where", sorted({*RUN_BY.values()} - {BY_HAND}))
def test_what_runs_a_command_is_there(where):
    file, _, function = where.partition("::")
    text = (PROJECT / file).read_text(encoding="utf-8")
    assert not function or re.search(rf"^def {function}\(", text, re.MULTILINE)


def test_targets_of_make_exist_and_do_what_tests_and_ci_run():
    makefile = (PROJECT / "Makefile").read_text()
    known = {*re.findall(r"^([a-z-]+):", makefile, re.MULTILINE)}
    assert {*re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE)} <= known
    for target, recipe in RECIPES.items():
        assert f"\n{target}: install\n\t{recipe}\n\n" in makefile
    steps = re.findall(r"^step (\S+)", (PROJECT / CI).read_text(), re.MULTILINE)
    assert {command.removeprefix("make ") for command in RUN_BY if RUN_BY[command] == CI} <= {
        *steps
    }


def test_every_path_in_the_tree_and_behind_a_link_exists():
    linked = [link for link in re.findall(r"\]\(([^)#]+)", README) if "://" not in link]
    table = re.findall(r"^\|.*\|$", README, re.MULTILINE)
    named = re.findall(r"`((?:algorithms|flows|kernels|tasks|tests)/[\w./*]*)`", "".join(table))
    assert len(drawn()) > 60 and linked and named
    missing = [
        path for path in [*drawn(), *linked, *named] if not [*PROJECT.glob(path.removesuffix("/"))]
    ]
    assert missing == []


def test_every_file_of_the_project_is_in_the_tree():
    paths, words = {*drawn()}, {*re.findall(r"[\w.-]+", drawing())}
    unsaid = [
        name
        for name in tracked()
        if re.match(r"(flows|tasks|algorithms|kernels)/.*\.py$", name)
        and PurePath(name).name != "__init__.py"
        and name not in paths
    ]
    tops = {name.split("/")[0] for name in tracked()}
    unsaid += [top for top in tops if top not in words | UNSAID and not top.startswith(".")]
    assert unsaid == []
