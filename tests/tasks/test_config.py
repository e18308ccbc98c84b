"""params.yaml: typed, and wrong in one line that names the file and the dotted key."""

import json
from dataclasses import replace

import pytest

from algorithms.async_pipeline.config import PRESETS
from algorithms.common.errors import InputError
from tasks.config import load_params, load_yaml
from tasks.paths import PROJECT


def test_the_params_of_the_project_are_valid_in_both_profiles():
    assert load_params().pretrain_lordo.arms["ddp"].method == "ddp"
    gpu = load_params(profile="gpu")
    assert gpu.pretrain_lordo.training.backend == "nccl"
    assert gpu.pretrain_lordo.arms["ddp"].optimizer.beta2 == 0.95, "what is not overridden stays"


def test_a_pipelines_model_is_the_shared_one_but_for_what_it_says():
    params = load_params()
    own, shared = params.pretrain_async.model, params.model
    assert params.model_of("pretrain_lordo") == shared
    assert params.model_of("pretrain_async") == own
    assert own.family == shared.family and not own.tie_word_embeddings
    assert shared.tie_word_embeddings
    other = load_params(overrides=["model.max_position_embeddings=512"]).pretrain_async.model
    assert other.max_position_embeddings == 512
    plain = load_params(overrides=["pretrain_async.model={}"])
    assert plain.pretrain_async.model == plain.model


def test_the_study_of_pipelines_has_the_presets():
    """Each as it is, but for rates, which belong to a model and a horizon."""
    arms = load_params().pretrain_async.all_arms
    for name, preset in PRESETS.items():
        found = arms[f"{name}_p8"].optimizer
        settings = replace(found.optimizer, lr=preset.optimizer.lr)
        steps = preset.correction_steps
        assert replace(found, optimizer=settings, correction_steps=steps) == preset
    assert arms["sync"].optimizer == arms["async"].optimizer == arms["ours_p8"].optimizer


def test_numbers_are_read_as_dvc_reads_them():
    params = load_params(overrides=["pretrain_lordo.arms.ddp.optimizer.lr=1e-3"])
    assert params.pretrain_lordo.arms["ddp"].optimizer.lr == 0.001


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("pretrain_lordo.training.step=3", "pretrain_lordo.training.step: unknown key; did you"),
        (
            "pretrain_lordo.arms.ddp.optimizer.lrr=1",
            "optimizer.lrr: unknown key; did you mean 'lr'",
        ),
        ("corpuss.val_fraction=0.1", "corpuss: unknown key; did you mean 'corpus'"),
        ("pretrain_lordo.training.steps=many", "training.steps: input should be a valid integer"),
        ("pretrain_lordo.training.steps=1.5", "training.steps: input should be a valid integer"),
        ("pretrain_lordo.training.steps=-1", "pretrain_lordo.training.steps: must be positive"),
        ("pretrain_lordo.training.global_batch=7", "training.global_batch: must be a multiple of"),
        (
            "pretrain_lordo.training.backend=mpi",
            "training.backend: input should be 'gloo' or 'nccl'",
        ),
        ("pretrain_lordo.arms={}", "pretrain_lordo.arms: must name at least one arm"),
        ("pretrain_lordo.study.ddp={optimizer: {lr: 1}}", "study.ddp: arms has one of that name"),
        ("pretrain_lordo.study={a/b: {optimizer: {lr: 1}}}", "study.'a/b': a name has"),
        ("pretrain_lordo.study=null", "pretrain_lordo.study: input should be an object"),
        ("pretrain_lordo.arms.ddp.optimizer.lr=.nan", "optimizer.lr: must be positive"),
        ("tokens.vocab_size=5", "tokens.vocab_size: must be at least 257"),
        ("tokens=null", "tokens: input should be an object"),
        ("corpus.sources=[]", "corpus.sources: must name at least one source"),
        (
            "corpus.sources=[{form: stdlib}]",
            "sources.0.form: unknown key; did you mean 'from'?",
        ),
        ("corpus.sources=[{from: 'ftp:x'}]", "corpus.sources.0.from: unknown kind 'ftp'"),
        ("corpus.sources=[{from: 'pypi:Django'}]", "sources.0.from: must be pypi:NAME==VERSION"),
        ("corpus.sources=[{from: 'pypi:a==1'}]", "sources.0.sha256: is required for a pypi source"),
        ("pretrain_async.model.hiden_size=64", "pretrain_async.model.hiden_size: unknown key; did"),
        ("pretrain_async.model=3", "pretrain_async.model: input should be an object"),
        ("pretrain_async.model.hidden_size=66", "pretrain_async.model.hidden_size: must be a"),
        ("pretrain_async.training.ranks=2", "pretrain_async.training.ranks: unknown key"),
        ("pretrain_async.arms.sync.microbatches=3", "sync.microbatches: must divide training.glob"),
        (
            "pretrain_async.arms.sync.stages=4",
            "arms.sync.microbatches: must be at least stages (4)",
        ),
        ("pretrain_async.arms.sync.schedule=1f1b", "arms.sync.schedule: input should be 'async'"),
        (
            "pretrain_async.arms.ddp={stages: 1, optimizer: {name: adamw, optimizer: {lr: 1}}}",
            "pretrain_async.ddp: pretrain_lordo has an arm of that name",
        ),
        ("model.hidden_size=130", "model.hidden_size: must be a multiple of num_attention_heads"),
        ("pretrain_lordo.arms.ddp.optimizer.lr=.inf", "optimizer.lr: must be positive and finite"),
        ("launch.stop_seconds=.inf", "launch.stop_seconds: must be positive and finite"),
        ("tokens.vocab_size=10000000000", "tokens.vocab_size: must be at least 257"),
        ("pretrain_lordo.training.sequence_length=4096", "at most model.max_position_embeddings"),
        ("corpus.sources=[{origin: stdlib}]", "corpus.sources.0.origin: unknown key; write 'from'"),
        ("corpus.sources=[{from: stdlib, slots: {'../x': ['*']}}]", "slots.'../x': a name has"),
        ("prompts.lookup=null", "prompts.lookup: there must be one source: lookup, files or gym"),
        ("prompts.lookup.records=17", "prompts.lookup.records: must be at most keys"),
        ("prompts.train=0", "prompts.train: must be positive"),
        ("post_train.policy.warm_start.stages=[[20, 0]]", "warm_start: must have at most prompts"),
        ("post_train.policy.warm_start.accuracy=1", "policy.warm_start.accuracy: must be in"),
        ("post_train.training.reward=a b", "post_train.training.reward: is not a name"),
        ("post_train.arms.exact.objective.name=dopo", "exact.objective.name: input should be"),
        ("post_train.arms.exact.replay.refresh_every=2", "replay.refresh_every: must be 1 in mode"),
        ("post_train.arms.ddp={}", "post_train.arms.ddp"),
        ("launch.stop_seconds=null", "launch.stop_seconds: input should be a valid number"),
    ],
)
def test_what_is_wrong_is_named(override, message):
    with pytest.raises(InputError) as caught:
        load_params(overrides=[override])
    text = str(caught.value)
    assert text.startswith("params.yaml with --set: ")
    assert message in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("tokens.vocab_size", "--set tokens.vocab_size: must be key=value"),
        ("=3", "--set =3: must be key=value"),
        ("tokens.vocab_size.x=3", "--set tokens.vocab_size.x: no such key"),
        ("tokens.vocab_size=[", "--set tokens.vocab_size: not YAML"),
        ("tokens.vocab_size=2001-13-45", "--set tokens.vocab_size: not YAML"),
    ],
)
def test_an_override_that_cannot_be_read_is_named(override, message):
    with pytest.raises(InputError, match=message.replace("[", r"\[")):
        load_params(overrides=[override])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"corpus: [", "not YAML"),
        (b"- 1\n- 2\n", "must hold a mapping of stages, not list"),
        (b"", "must hold a mapping of stages, not NoneType"),
        (b"a: \xff\n", "not UTF-8 at byte 3"),
        (b"tokens: {}\ntokens: {}\n", "not YAML"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, content, message):
    path = tmp_path / "params.yaml"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        load_yaml(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_profile_is_named():
    with pytest.raises(InputError, match=r"params\.nowhere\.yaml: no such file"):
        load_params(profile="nowhere")


@pytest.mark.parametrize("name", ["../../texts", "a/b", "", "-x", "a@b", "x" * 65, "a\n", "ä"])
def test_an_arm_cannot_have_a_name_that_is_a_path(tmp_path, name):
    """It becomes a folder: `../../texts` would be replaced by a model."""
    path = tmp_path / "params.yaml"
    text = (PROJECT / "params.yaml").read_text()
    path.write_text(text.replace("    ddp:", f"    {json.dumps(name)}:"))
    with pytest.raises(InputError, match=r"params.yaml: pretrain_lordo\.arms\..*: a name has"):
        load_params(path)


@pytest.mark.parametrize("profile", ["../x", "/etc/passwd", "a b", "\0", "x" * 300])
def test_a_profile_is_a_name(profile):
    with pytest.raises(InputError, match="--profile .*: is not a name"):
        load_params(profile=profile)


def test_what_is_no_file_is_named(tmp_path):
    with pytest.raises(InputError, match="Is a directory"):
        load_yaml(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(InputError, match="loop: Too many levels"):
        load_yaml(tmp_path / "loop")


@pytest.mark.parametrize("text", ["a: &x [*x]\n", "a: " + "[" * 3000, "? [1, 2]\n: 3\n"])
def test_yaml_that_no_config_can_be_is_one_line(tmp_path, text):
    path = tmp_path / "params.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        load_params(path)
    assert str(caught.value).count("\n") == 0


def test_a_missing_key_is_named(tmp_path):
    text = (PROJECT / "params.yaml").read_text().replace("val_fraction: 0.05", "")
    path = tmp_path / "params.yaml"
    path.write_text(text)
    assert load_params(path).corpus.val_fraction == 0.05, "it has a default"
    path.write_text("\n".join(line for line in text.splitlines() if "sources:" not in line))
    with pytest.raises(InputError, match="params.yaml: "):
        load_params(path)


def test_an_unknown_arm_is_named_with_the_known_ones():
    with pytest.raises(
        InputError, match="no arm 'dpp' in params.yaml; known arms: ddp, .*zero_bubble, exact, .*$"
    ):
        load_params().stage_of("dpp")


def test_arms_of_a_study_are_arms_like_the_others():
    params = load_params()
    assert params.studies == {"lordo": "pretrain_lordo", "async": "pretrain_async"}
    assert params.stage_of("muloco") == params.stage_of("ddp") == "pretrain_lordo"
    assert {"ddp", "muloco"} <= set(params.pretrain_lordo.all_arms)
    none = ["pretrain_lordo.study={}", "pretrain_async.study={}"]
    assert load_params(overrides=none).studies == {}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("arms.async.stages=11", "arms.async.stages: 4 layers cannot fill 11 stages"),
        ("arms.async.layers=[4, 3]", "arms.async.layers: sum is 7, the model has 4 layers"),
        ("arms.async.layers=[1, 3, 0]", "arms.async.layers: has 3 numbers for 2 stages"),
        ("model.tie_word_embeddings=true", "model.tie_word_embeddings: must be false: "),
    ],
)
def test_a_pipeline_that_cannot_be_has_the_key_of_params(override, message):
    """Of an arm alone when its job is made: a small model is none for arms of many stages."""
    few = "pretrain_async.model.num_hidden_layers=4"
    with pytest.raises(InputError) as caught:
        load_params(overrides=[few, f"pretrain_async.{override}"]).job("async")
    assert f": pretrain_async.{message}" in str(caught.value)
    assert load_params(overrides=[few]).job("async").model.num_hidden_layers == 4


def test_a_misspelt_key_is_named_before_the_one_that_it_leaves_missing(tmp_path):
    text = (PROJECT / "params.yaml").read_text()
    path = tmp_path / "params.yaml"
    path.write_text(text.replace("    steps:", "    stepz:", 1))
    with pytest.raises(InputError, match="stepz: unknown key; did you mean 'steps'"):
        load_params(path)
