"""Ratchets over all tracked files: sizes, places, docstrings, and no word of anybody's machine."""

import ast
import re
import subprocess
from pathlib import PurePath

import pytest

from tasks.paths import PROJECT

LONGEST = 400
ELSEWHERE = {
    "tests/algorithms/async_pipeline/test_defects.py": "algorithms/async_pipeline",
    "tests/algorithms/async_pipeline/test_experts.py": "algorithms/async_pipeline",
    "tests/algorithms/async_pipeline/test_failures.py": "algorithms/async_pipeline/pipeline.py",
    "tests/algorithms/async_pipeline/test_overlap.py": "algorithms/async_pipeline/links.py",
    "tests/algorithms/branch_replay/test_families.py": "algorithms/branch_replay/replay.py",
    "tests/algorithms/branch_replay/test_joined.py": "algorithms/branch_replay/replay.py",
    "tests/algorithms/branch_replay/test_modes.py": "algorithms/branch_replay/replay.py",
    "tests/algorithms/branch_replay/test_mutations.py": "algorithms/branch_replay/replay.py",
    "tests/algorithms/branch_replay/test_odd_cases.py": "algorithms/branch_replay/replay.py",
    "tests/algorithms/branch_replay/test_refusals.py": "algorithms/branch_replay/replay.py",
    "tests/algorithms/branch_replay/test_rl_learning.py": "algorithms/branch_replay/learner.py",
    "tests/algorithms/branch_replay/test_smollm2.py": "algorithms/branch_replay/learner.py",
    "tests/algorithms/branch_replay/test_trees.py": "algorithms/branch_replay/replay.py",
    "tests/kernels/shared_prefix_attention/test_attention.py": "kernels/shared_prefix_attention",
    "tests/algorithms/lordo/test_rounds.py": "algorithms/lordo/sync.py",
    "tests/algorithms/common/test_precision.py": "algorithms/common/loop.py",
    "tests/algorithms/common/test_transfers.py": "algorithms/common/comm.py",
    "tests/flows/test_at_once.py": "flows/steps.py",
    "tests/flows/test_deployments.py": "prefect.yaml",
    "tests/flows/test_main.py": "flows/__main__.py",
    "tests/flows/test_outages.py": "flows/command.py",
    "tests/flows/test_pages.py": "flows/experiment.py",
    "tests/tasks/jobs/test_lost_workers.py": "tasks/jobs/pretrain_lordo.py",
    "tests/tasks/jobs/test_several_nodes.py": "tasks/jobs/pretrain_lordo.py",
    "tests/test_distributed.py": "tests/distributed.py",
    "tests/test_readme.py": "README.md",
    "tests/test_readme_lordo.py": "README.md",
    "tests/test_readme_replay.py": "docs/branch_replay.md",
    "tests/test_readme_rotation.py": "README.md",
    "tests/test_requirements.py": "requirements.lock",
    "tests/test_tree.py": ".",
}
"""Test file that does not mirror the path of what it tests -> that path."""

REGISTRIES = ["pypi[.]org", "python[h]osted", "debian[.]org", "pytorch[.]org", "conda[.]io"]
FOLDERS = ["work", "opt", "root", "home", "mnt", "Users"]
"""Written so that this file does not hold what it looks for."""


def tracked(suffix=""):
    names = subprocess.check_output(["git", "ls-files", "-z"], cwd=PROJECT, text=True).split("\0")
    return [name for name in names if name.endswith(suffix) and (PROJECT / name).is_file()]


def text(name):
    return (PROJECT / name).read_text(encoding="utf-8")


PYTHON = tracked(".py")


def test_there_is_something_to_look_at():
    assert len(PYTHON) > 100


def test_no_file_grows_beyond_what_one_reads_at_a_sitting():
    kernels = "kernels/*/triton.py"
    long = {name: len(text(name).splitlines()) for name in PYTHON}
    assert {n: k for n, k in long.items() if k > LONGEST and not PurePath(n).match(kernels)} == {}


def test_every_test_lies_where_its_source_does():
    tests = [name for name in PYTHON if PurePath(name).name.startswith("test_")]
    strays = []
    for name in tests:
        path = PurePath(name).relative_to("tests")
        source = path.with_name(path.name.removeprefix("test_"))
        known = [source, source.with_suffix(""), *filter(None, [ELSEWHERE.get(name)])]
        if not any((PROJECT / place).exists() for place in known):
            strays.append(name)
    assert strays == []
    gone = [
        place for entry in ELSEWHERE.items() for place in entry if not (PROJECT / place).exists()
    ]
    assert gone == []


def test_every_module_says_what_it_is():
    silent = [
        name
        for name in PYTHON
        if not PurePath(name).match("test_*.py")
        and ast.get_docstring(ast.parse(text(name))) is None
    ]
    assert silent == []


def test_every_folder_of_python_is_a_package_but_those_of_tests():
    folders = {PurePath(name).parent for name in PYTHON}
    for folder in folders:
        of_tests = folder.parts[0] == "tests"
        assert (PROJECT / folder / "__init__.py").exists() is not of_tests, folder


@pytest.mark.parametrize(
    "pattern", [*REGISTRIES, *(rf"(?<![\w.*~-])/{folder}/" for folder in FOLDERS)]
)
def test_no_file_knows_of_a_registry_or_a_machine(pattern):
    found = []
    for name in tracked():
        try:
            lines = text(name).splitlines()
        except UnicodeDecodeError:
            continue  # a picture
        found += [
            f"{name}:{n}: {line}" for n, line in enumerate(lines, 1) if re.search(pattern, line)
        ]
    assert found == []
