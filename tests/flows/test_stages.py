"""The Python twin of the DVC files, and where outputs go when params are overridden."""

import subprocess
from pathlib import Path

import pytest
from dvc.repo import Repo

from algorithms.common.errors import InputError
from flows.stages import context, stages
from tasks.config import load_params
from tasks.paths import PROJECT, RUNS, Workspace

ARM = "pretrain_lordo@ddp"
LORDO = "studies/lordo/dvc.yaml"


def test_the_dvc_files_name_the_same_stages_params_and_order():
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
    assert {name.rpartition(":")[0] for name in ours} == {"", LORDO}


def test_the_commands_of_dvc_make_those_stages():
    """`cmd` names the arm and the study, and all outputs lie where the flows put them."""
    here = context()
    with Repo(str(PROJECT)) as repo:
        for stage in repo.index.stages:
            ours, place = here.stage(stage.addressing), here.place(stage.addressing)
            if ours.arm is not None:
                assert stage.cmd == f"./run -m flows pretrain --arm {ours.arm} --plain"
            study = "" if ours.study is None else f" --study {ours.study}"
            if stage.name == "report":
                assert stage.cmd == f"./run -m flows report{study} --plain"
            for out in stage.outs:
                assert Path(out.fs_path).parts[: len(place.root.parts)] == place.root.parts
                inside = Path(out.fs_path).relative_to(place.root).parts
                assert inside[0] in ("data", "models", "metrics", "reports")


def test_what_a_study_makes_is_read_by_nothing_else():
    """So that plain `dvc repro` passes it by."""
    every = stages(load_params())
    for stage in every:
        if stage.study is None:
            assert not [name for name in stage.reads if name.startswith("studies/")]
    assert context().report().reads == tuple(s.name for s in every if s.arm and s.study is None)
    assert context().report("lordo").reads == tuple(s.name for s in every if s.arm)


def test_without_overrides_all_outputs_are_the_projects():
    here = context()
    assert not here.changed
    assert here.place("tokens") == Workspace(PROJECT)


TRAINED = {s.name for s in stages(load_params())} - {"corpus", "tokens"}


@pytest.mark.parametrize(
    ("override", "changed"),
    [
        ("corpus.val_fraction=0.1", {"corpus", "tokens", *TRAINED}),
        ("tokens.vocab_size=300", {"tokens", *TRAINED}),
        ("model.hidden_size=64", {*TRAINED}),
        ("pretrain_lordo.arms.ddp.optimizer.lr=1e-4", {ARM, "report", f"{LORDO}:report"}),
        (
            "pretrain_lordo.study.muloco.optimizer.lr=1e-4",
            {f"{LORDO}:pretrain_lordo@muloco", f"{LORDO}:report"},
        ),
        ("launch.stop_seconds=3", set()),
        ("tokens.vocab_size=2048", set()),
    ],
)
def test_an_override_moves_what_depends_on_it_and_nothing_else(override, changed):
    here = context([override])
    assert here.changed == changed
    for stage in stages(here.params):
        root = here.place(stage.name).root
        assert root.is_relative_to(RUNS / "set") == (stage.name in changed)
        assert root.parts[-2:] == ("studies", "lordo") or stage.study is None


def test_other_overrides_other_places():
    first, second = context(["tokens.vocab_size=300"]), context(["tokens.vocab_size=301"])
    assert first.workspace != second.workspace
    assert first.workspace == context(["tokens.vocab_size=300"]).workspace


def test_a_name_that_is_none_is_refused():
    with pytest.raises(InputError, match="no study 'lorod' in params.yaml; known studies: lordo$"):
        context().report("lorod")
    with pytest.raises(InputError, match="no study 'lordo' in params.yaml; known studies: none$"):
        context(["pretrain_lordo.study={}"]).report("lordo")
    with pytest.raises(InputError, match="no arm 'report' in params.yaml; known arms: ddp, "):
        context().arm("report")


def test_bad_overrides_are_refused():
    with pytest.raises(InputError, match="tokens.vocab: unknown key"):
        context(["tokens.vocab=3"])
