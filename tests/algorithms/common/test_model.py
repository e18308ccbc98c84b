"""Models are `transformers`' own: built by size, saved as directories that anybody can load."""

import json
import os

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from algorithms.common import model
from algorithms.common.config import ModelConfig
from algorithms.common.errors import InputError
from tests import toys

SIZES = toys.MODEL.to_dict() | {"num_key_value_heads": 1}


def build(**changes):
    config = ModelConfig(**(SIZES | changes))
    return model.build(config, vocab_size=97, end_of_text=0, seed=3)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_every_family_reads_back_with_equal_logits(family, tmp_path):
    original = build(family=family).eval()
    model.save(original, tmp_path, tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    tokens = torch.arange(20).view(2, 10)
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=tokens).logits, model.logits(original, tokens))
    assert loaded.config.vocab_size == 97
    assert model.weights_sha256(loaded) == model.weights_sha256(original)


def test_extra_settings_reach_the_family(tmp_path):
    mixture = build(
        family="qwen3_moe",
        extra={"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    )
    assert mixture.config.num_experts == 4


def test_same_seed_same_weights_other_seed_others():
    config = ModelConfig(**SIZES)
    hashes = [
        model.weights_sha256(model.build(config, vocab_size=97, end_of_text=0, seed=seed))
        for seed in (1, 1, 2)
    ]
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_saved_directory_is_a_start(tmp_path):
    original = build()
    model.save(original, tmp_path, tmp_path / "model")
    again = build(path=str(tmp_path / "model"), hidden_size=32)
    assert model.weights_sha256(again) == model.weights_sha256(original)


def test_the_tokenizer_comes_along(tmp_path):
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    tokens = tmp_path / "tokens"
    tokens.mkdir()
    Tokenizer(BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")])).save(
        str(tokens / "tokenizer.json")
    )
    (tokens / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    (tokens / "chat_template.jinja").write_text("{{ messages }}")
    model.save(build(), tokens, tmp_path / "model")
    assert AutoTokenizer.from_pretrained(tmp_path / "model").chat_template == "{{ messages }}"
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("abab")["input_ids"] == [2, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": "gopher"}, "model.family: transformers has no 'gopher'"),
        ({"extra": {"rope_thetas": 1}}, "model.extra.rope_thetas: llama has no such setting"),
        ({"extra": {"vocab_size": 5}}, "model.extra.vocab_size: is 97, as the tokens have it"),
        ({"extra": {"eos_token_id": 5}}, "model.extra.eos_token_id: is 0, as the tokens have it"),
        ({"extra": {"rms_norm_eps": "much"}}, "model.family: llama: .*rms_norm_eps"),
        ({"extra": {"hidden_act": "none of ours"}}, "model.family: llama: .*none of ours"),
        ({"extra": {"num_key_value_heads": 3}}, "model.family: llama: "),
        ({"family": "bert"}, "model.family: bert is not causal"),
        ({"family": "vit"}, "model.family: vit: "),
        ({"path": "/nowhere"}, "model.path: /nowhere holds no config.json"),
    ],
)
def test_bad_input_names_the_key(changes, message):
    with pytest.raises(InputError, match=message):
        build(**changes)


def test_a_directory_with_too_few_tokens_says_what_to_do(tmp_path):
    model.save(build(), tmp_path, tmp_path / "model")
    config = ModelConfig(path=str(tmp_path / "model"))
    with pytest.raises(InputError, match="knows 97 tokens, the corpus was encoded with 98"):
        model.build(config, vocab_size=98, end_of_text=0, seed=0)


def test_a_directory_with_broken_weights_is_named(tmp_path):
    model.save(build(), tmp_path, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(InputError, match="model.path: .*model"):
        build(path=str(tmp_path / "model"))


def test_published_weights_are_safetensors_and_nothing_that_can_run(tmp_path):
    model.save(build(), tmp_path, tmp_path / "model")
    names = {file.name for file in (tmp_path / "model").iterdir()}
    assert "model.safetensors" in names
    assert {name.rpartition(".")[2] for name in names} == {"json", "safetensors"}


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def test_a_directory_of_strangers_runs_nothing(tmp_path):
    """Neither pickled weights nor a model's own code."""
    folder = tmp_path / "model"
    model.save(build(), tmp_path, folder)
    weights, config = folder / "model.safetensors", folder / "config.json"
    text = weights.read_bytes()
    weights.unlink()
    torch.save({"lm_head.weight": Bomb(tmp_path / "weights")}, folder / "pytorch_model.bin")
    with pytest.raises(InputError, match="model.path: .*model"):
        build(path=str(folder))
    weights.write_bytes(text)
    settings = json.loads(config.read_text())
    code = {"auto_map": {"AutoModelForCausalLM": "own.Model", "AutoConfig": "own.Config"}}
    config.write_text(json.dumps(settings | code | {"model_type": "unheard-of"}))
    (folder / "own.py").write_text(f"import os; os.mkdir({str(tmp_path / 'code')!r})")
    with pytest.raises(InputError, match="model.path: .*model"):
        build(path=str(folder))
    assert {path.name for path in tmp_path.iterdir()} == {"model"}


def test_a_tied_head_counts_once():
    tied, untied = build(tie_word_embeddings=True), build(tie_word_embeddings=False)
    assert model.parameter_count(untied) - model.parameter_count(tied) == 97 * 16
