"""The Python twin of dvc.yaml, and where outputs go when params are overridden."""

import subprocess
from pathlib import Path

import pytest
from dvc.repo import Repo

from algorithms.common.errors import InputError
from flows.stages import context, stages
from tasks.config import load_params
from tasks.paths import PROJECT, RUNS, Workspace


def test_dvc_yaml_names_the_same_stages_params_and_order():
    tracked = subprocess.check_output(["git", "ls-files"], cwd=PROJECT, text=True).split()
    code = {str(p) for name in tracked for p in (Path(name), *Path(name).parents)} - {"params.yaml"}
    with Repo(str(PROJECT)) as repo:
        graph = repo.index.graph
        found = {
            stage.addressing: (
                sorted(name for dep in stage.params for name in dep.params),
                sorted(upstream.addressing for upstream in graph.successors(stage)),
                sorted(dep.def_path for dep in stage.deps if dep.def_path in code),
            )
            for stage in repo.index.stages
        }
    ours = {
        stage.name: (sorted(stage.params), sorted(stage.reads), sorted(stage.code))
        for stage in stages(load_params())
    }
    assert found == ours


def test_without_overrides_all_outputs_are_the_projects():
    here = context()
    assert not here.changed
    assert here.place("tokens") == Workspace(PROJECT)


@pytest.mark.parametrize(
    ("override", "changed"),
    [
        ("corpus.val_fraction=0.1", {"corpus", "tokens", "pretrain_lordo@ddp", "report"}),
        ("tokens.vocab_size=300", {"tokens", "pretrain_lordo@ddp", "report"}),
        ("model.hidden_size=64", {"pretrain_lordo@ddp", "report"}),
        ("pretrain_lordo.arms.ddp.optimizer.lr=1e-4", {"pretrain_lordo@ddp", "report"}),
        ("launch.stop_seconds=3", set()),
        ("tokens.vocab_size=2048", set()),
    ],
)
def test_an_override_moves_what_depends_on_it_and_nothing_else(override, changed):
    here = context([override])
    assert here.changed == changed
    for stage in stages(here.params):
        inside = here.place(stage.name).root.is_relative_to(RUNS / "set")
        assert inside == (stage.name in changed)


def test_other_overrides_other_places():
    first, second = context(["tokens.vocab_size=300"]), context(["tokens.vocab_size=301"])
    assert first.workspace != second.workspace
    assert first.workspace == context(["tokens.vocab_size=300"]).workspace


def test_bad_overrides_are_refused():
    with pytest.raises(InputError, match="tokens.vocab: unknown key"):
        context(["tokens.vocab=3"])
