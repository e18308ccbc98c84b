"""README, "Your own model", and the GPU profile as far as a machine without one can tell."""

import shlex
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from algorithms.common.files import read_json
from tests.project import Project


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    project = Project(tmp_path_factory.mktemp("pretrain") / "project")
    done = project.flows("prepare", "--plain")
    assert done.returncode == 0, done.stderr
    return project


def own_model(project):
    """A Hugging Face directory of another family, with the project's tokenizer and spare rows."""
    folder = project.root / "mine" / "my model"
    config = AutoConfig.for_model(
        "qwen3",
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=12,
        vocab_size=320,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(project.root / "data" / "tokens" / name, folder / name)
    return folder


@pytest.mark.slow
def test_a_model_of_ones_own_is_trained_on_and_keeps_its_family(project):
    folder = own_model(project)
    done = project.flows(
        *("pretrain", "--arm", "ddp", "--set", "model.path=mine/my model"),
        *("--set", "tokens.tokenizer=mine/my model/tokenizer.json"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [published] = (project.root / "runs" / "set").glob("*/models/pretrain_lordo/ddp")
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (folder, published))
    assert after.config.model_type == "qwen3"
    assert after.config.vocab_size == 320 and after.config.head_dim == 12
    assert set(before.state_dict()) == set(after.state_dict())
    text = "a river of small stones under the bridge"
    tokenizer = AutoTokenizer.from_pretrained(published)
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    assert AutoTokenizer.from_pretrained(folder)(text)["input_ids"] == ids[0].tolist()
    with torch.no_grad():
        losses = [model(input_ids=ids, labels=ids).loss.item() for model in (before, after)]
    assert losses[1] < losses[0] - 0.5, "it went on from the weights that were there, and learned"


def test_a_folder_that_holds_no_model_is_known_before_anything_starts(project):
    done = project.flows("pretrain", "--arm", "ddp", "--dry-run", "--set", "model.path=texts")
    assert done.returncode == 2
    assert done.stderr == "shoestring: model.path: texts holds no config.json\n"


def test_a_file_that_is_no_gguf_is_known_too(project):
    path = project.root / "mine.gguf"
    for content, reason in ((None, "no such file"), (b"other", "not a GGUF file")):
        if content is not None:
            path.write_bytes(content)
        done = project.flows("pretrain", "--arm", "ddp", "--dry-run", "--set", f"model.path={path}")
        assert done.returncode == 2
        assert done.stderr == f"shoestring: model.path: {path}: {reason}\n"


def test_the_gpu_profile_is_laid_over_params(project):
    """On GPUs `experiment --profile gpu` starts the job that this dry run writes down."""
    tokens = [*("--set", "tokens.vocab_size=300"), *("--set", "pretrain_lordo.training.ranks=4")]
    done = project.flows("pretrain", "--arm", "ddp", "--profile", "gpu", "--dry-run", *tokens)
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout)
    assert "--nproc-per-node=4" in words
    config = read_json(Path(words[-1]))
    assert config["training"]["backend"] == "nccl" and config["training"]["precision"] == "bf16"
    assert config["model"]["num_hidden_layers"] == 12
    assert config["training"]["seed"] == 0, "what the profile does not name is that of params.yaml"
