"""The Python twin of the DVC files, and where outputs go when params are overridden."""

import subprocess
from pathlib import Path

import pytest
from dvc.repo import Repo

from algorithms.common.errors import InputError
from flows.stages import PREPARED, context, stages
from tasks.config import load_params
from tasks.paths import PROJECT, RUNS, Workspace

ARM = "pretrain_lordo@ddp"
LORDO = "studies/lordo/dvc.yaml"
ASYNC = "studies/async/dvc.yaml"


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
    assert {name.rpartition(":")[0] for name in ours} == {"", LORDO, ASYNC}


def test_the_commands_of_dvc_make_those_stages():
    """`cmd` names the arm and the study, and all outputs lie where the flows put them."""
    here = context()
    with Repo(str(PROJECT)) as repo:
        for stage in repo.index.stages:
            ours, place = here.stage(stage.addressing), here.place(stage.addressing)
            if ours.arm is not None:
                assert stage.cmd == f"./run -m flows {ours.flow} --arm {ours.arm} --plain"
            elif stage.name in PREPARED:
                assert stage.cmd == f"./run -m flows prepare --only {stage.name} --plain"
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
    for study in ("lordo", "async"):
        stage = f"pretrain_{study}@"
        own = tuple(s.name for s in every if stage in s.name)
        assert context().report(study).reads == own, "the arms of one stage alone"


def test_without_overrides_all_outputs_are_the_projects():
    here = context()
    assert not here.changed
    assert here.place("tokens") == Workspace(PROJECT)


MADE = {s.name for s in stages(load_params())}
REWARDED = {name for name in MADE if name.startswith("post_train@")}
TRAINED = MADE - {*PREPARED, *REWARDED}
"""From tokens, and the reports."""


@pytest.mark.parametrize(
    ("override", "changed"),
    [
        ("corpus.val_fraction=0.1", {"corpus", "tokens", *TRAINED}),
        ("tokens.vocab_size=300", {"tokens", *TRAINED}),
        ("model.hidden_size=64", {*TRAINED}),
        ("prompts.seed=1", {"prompts", "policy", *REWARDED, "report"}),
        ("post_train.policy.seed=1", {"policy", *REWARDED, "report"}),
        ("post_train.training.seed=1", {*REWARDED, "report"}),
        ("post_train.arms.exact.optimizer.lr=1e-4", {"post_train@exact", "report"}),
        ("pretrain_lordo.arms.ddp.optimizer.lr=1e-4", {ARM, "report", f"{LORDO}:report"}),
        (
            "pretrain_lordo.study.muloco.optimizer.lr=1e-4",
            {f"{LORDO}:pretrain_lordo@muloco", f"{LORDO}:report"},
        ),
        (
            "pretrain_async.model.hidden_size=32",
            {n for n in TRAINED if "pretrain_async@" in n} | {"report", f"{ASYNC}:report"},
        ),
        (
            "pretrain_async.study.gpipe.microbatches=4",
            {f"{ASYNC}:pretrain_async@gpipe", f"{ASYNC}:report"},
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
        assert root.parts[-2:] == ("studies", stage.study) or stage.study is None


def test_other_overrides_other_places():
    first, second = context(["tokens.vocab_size=300"]), context(["tokens.vocab_size=301"])
    assert first.workspace != second.workspace
    assert first.workspace == context(["tokens.vocab_size=300"]).workspace


@pytest.mark.parametrize("point", ["pretrain_lordo.training.seed=3", "launch.stop_seconds=3"])
@pytest.mark.parametrize("given", [[], ["tokens.vocab_size=300"], ["corpus.val_fraction=0.1"]])
def test_points_of_a_sweep_read_what_is_made_once_for_all(given, point):
    base, here = context(given), context(given, point=[point])
    assert here.params == context([*given, point]).params
    assert here.inputs(ARM) == base.inputs(ARM)
    assert here.place(ARM) == context([*given, point]).place(ARM)
    assert here.inputs("post_train@exact") == context().inputs("post_train@exact")


def test_a_name_that_is_none_is_refused():
    with pytest.raises(
        InputError, match="no study 'lorod' in params.yaml; known studies: lordo, async$"
    ):
        context().report("lorod")
    with pytest.raises(InputError, match="no study 'lordo' in params.yaml; known studies: none$"):
        context(["pretrain_lordo.study={}", "pretrain_async.study={}"]).report("lordo")
    with pytest.raises(InputError, match="no arm 'report' in params.yaml; known arms: ddp, "):
        context().arm("report")
    with pytest.raises(InputError, match="policy is a stage, not an arm"):
        context().arm("policy")
    with pytest.raises(InputError, match="'exact' is trained by the flow post_train, not pretrain"):
        context().arm("exact", "pretrain")


def test_what_an_arm_reads_is_made_in_order():
    here = context(["prompts.seed=1"])
    assert here.prepared(arm="ddp") == ["corpus", "tokens"]
    assert here.prepared(arm="exact") == ["prompts", "policy"]
    assert here.prepared() == PREPARED and here.prepared("policy") == ["policy"]
    inputs = here.inputs("post_train@exact")
    assert [*inputs] == ["prompts_dir", "policy_dir"]
    assert all(path.is_relative_to(here.workspace.root) for path in inputs.values())
    assert here.inputs("pretrain_lordo@ddp") == {"tokens_dir": PROJECT / "data" / "tokens"}


def test_bad_overrides_are_refused():
    with pytest.raises(InputError, match="tokens.vocab: unknown key"):
        context(["tokens.vocab=3"])
