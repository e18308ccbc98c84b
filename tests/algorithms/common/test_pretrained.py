"""A GGUF file is a start like a directory: same logits, same tokens; a damaged one is named."""

import sys

import gguf
import numpy as np
import pytest
import torch

from algorithms.common import model
from algorithms.common.config import ModelConfig
from algorithms.common.errors import InputError
from algorithms.common.pretrained import load_model, load_tokenizer
from tests.gguf_files import TEMPLATE, interleaved, llama, tokenizer, write_gguf
from tests.smollm2 import smollm2

MADE = tokenizer()
TOKENS = torch.randint(300, (2, 17), generator=torch.Generator().manual_seed(0)) % 290


def logits(decoder):
    with torch.no_grad():
        return decoder(input_ids=TOKENS % decoder.config.vocab_size).logits


@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_has_the_logits_of_the_model_it_was_made_from(tmp_path, tied):
    original = llama(MADE.get_vocab_size(), tied=tied)
    path = write_gguf(tmp_path / "m.gguf", original, MADE)
    loaded = load_model(path)
    torch.testing.assert_close(logits(loaded), logits(original), rtol=1e-5, atol=1e-5)
    assert loaded.config.rope_parameters["rope_theta"] == 5000.0
    assert loaded.dtype == torch.float32 and not loaded.training
    names = dict(original.named_parameters())
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, names[name]), name


def test_it_can_be_loaded_in_bf16_and_saved_as_a_directory(tmp_path):
    original = llama(MADE.get_vocab_size())
    path = write_gguf(tmp_path / "m.gguf", original, MADE)
    rounded = load_model(path, torch.bfloat16)
    assert rounded.dtype == torch.bfloat16
    rounded.save_pretrained(tmp_path / "out")
    load_tokenizer(path).save_pretrained(tmp_path / "out")
    again = load_model(tmp_path / "out", torch.bfloat16)
    assert model.weights_sha256(again) == model.weights_sha256(rounded)
    assert load_tokenizer(tmp_path / "out").chat_template == TEMPLATE


def test_quantised_weights_come_out_as_the_library_has_them(tmp_path):
    original = llama(MADE.get_vocab_size())
    kind = gguf.GGMLQuantizationType.Q8_0
    loaded = load_model(write_gguf(tmp_path / "m.gguf", original, MADE, kind=kind))
    kept = original.model.layers[1].mlp.up_proj.weight.detach()
    found = loaded.model.layers[1].mlp.up_proj.weight.detach()
    wanted = gguf.dequantize(gguf.quantize(kept.numpy(), kind), kind)
    assert torch.equal(found, torch.from_numpy(wanted))
    assert 0 < (found - kept).abs().max() < 0.01


def test_its_tokenizer_is_the_one_in_the_file(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", llama(MADE.get_vocab_size()), MADE)
    found = load_tokenizer(path)
    text = "the dog and <|im_end|>é"
    assert found(text)["input_ids"] == MADE.encode(text).ids
    assert (found.bos_token, found.eos_token) == ("<|im_start|>", "<|im_end|>")
    chat = found.apply_chat_template([{"role": "user", "content": "the cat"}], tokenize=False)
    assert chat == "<|im_start|>the cat<|im_end|>"


def test_it_is_a_start_of_pretraining(tmp_path):
    original = llama(MADE.get_vocab_size())
    path = write_gguf(tmp_path / "m.gguf", original, MADE)
    config = ModelConfig(path=str(path), hidden_size=64)
    built = model.build(config, vocab_size=MADE.get_vocab_size(), end_of_text=0, seed=0)
    assert torch.equal(built.lm_head.weight, original.lm_head.weight)
    with pytest.raises(InputError, match="knows .* tokens, the corpus was encoded with 9999"):
        model.build(config, vocab_size=9999, end_of_text=0, seed=0)


def test_a_truncated_file_is_one_line_wherever_it_was_cut(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", llama(MADE.get_vocab_size()), MADE)
    whole = path.read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [0, 3, 4, 8, 23, 24, 40, 500, 4000, len(whole) // 2, len(whole) - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(InputError) as error:
            load_model(cut)
        message = str(error.value)
        assert message.startswith(f"model.path: {cut}: not a whole GGUF: "), message
        assert "\n" not in message


@pytest.mark.parametrize("content", [b"", b"not weights\n" * 100, b"GGUF" + b"\xff" * 4000])
def test_a_foreign_file_is_named(tmp_path, content):
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(InputError, match=rf"^model.path: {path}: not a whole GGUF: "):
        load_model(path)
    with pytest.raises(InputError, match=rf"^{path}: holds no tokenizer: "):
        load_tokenizer(path)


def test_a_file_without_one_of_the_weights_is_refused(tmp_path):
    whole = llama(MADE.get_vocab_size())
    path = write_gguf(tmp_path / "m.gguf", whole, MADE, without={"blk.1.ffn_up.weight"})
    with pytest.raises(InputError, match="it has no weight model.layers.1.mlp.up_proj.weight$"):
        load_model(path)


def test_a_missing_file_and_a_missing_package_say_so(tmp_path, monkeypatch):
    with pytest.raises(InputError, match=f"^{tmp_path}/m.gguf: no such file$"):
        load_model(tmp_path / "m.gguf")
    path = tmp_path / "m.gguf"
    path.write_bytes(b"")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(InputError, match=r"needs the gguf package: \.venv/bin/pip install gguf$"):
        load_model(path)


def by_hand(reader, name):
    """A tensor of the file as float32: blocks of 32 values, each with a scale."""
    [tensor] = [t for t in reader.tensors if t.name == name]
    shape = [int(n) for n in reversed(tensor.shape)]
    raw = np.array(tensor.data).reshape(-1)
    if tensor.tensor_type.name == "F32":
        return raw.view("<f4").reshape(shape)
    if tensor.tensor_type.name == "Q8_0":
        blocks = raw.view(np.uint8).reshape(-1, 34)
        scales = blocks[:, :2].copy().view("<f2").astype(np.float32)
        return (scales * blocks[:, 2:].copy().view(np.int8)).reshape(shape)
    assert tensor.tensor_type.name == "Q4_1"
    blocks = raw.view(np.uint8).reshape(-1, 20)
    scales, least = (blocks[:, i : i + 2].copy().view("<f2").astype(np.float32) for i in (0, 2))
    nibbles = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    return (scales * nibbles + least).reshape(shape)


@pytest.mark.slow
def test_smollm2_has_the_weights_that_a_reader_by_hand_finds_and_speaks():
    path = smollm2()
    loaded, words = load_model(path), load_tokenizer(path)
    reader = gguf.GGUFReader(path)
    layer = loaded.model.layers[7]
    found = {
        "token_embd.weight": loaded.model.embed_tokens.weight,
        "output_norm.weight": loaded.model.norm.weight,
        "blk.7.ffn_down.weight": layer.mlp.down_proj.weight,
        "blk.7.attn_v.weight": layer.self_attn.v_proj.weight,
        "blk.7.attn_q.weight": interleaved(layer.self_attn.q_proj.weight.detach(), 9),
        "blk.7.attn_k.weight": interleaved(layer.self_attn.k_proj.weight.detach(), 3),
    }
    for name, weight in found.items():
        wanted = torch.from_numpy(by_hand(reader, name).copy())
        torch.testing.assert_close(weight.detach(), wanted, rtol=0, atol=0)
    assert model.parameter_count(loaded) == 134_515_008
    ids = words("The capital of France is Paris. The capital of Germany is Berlin.")["input_ids"]
    with torch.no_grad():
        loss = loaded(input_ids=torch.tensor([ids]), labels=torch.tensor([ids])).loss
    assert float(loss) == pytest.approx(1.7131, abs=1e-3)
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = words.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt")
    said = loaded.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert words.decode(said[0, prompt["input_ids"].shape[1] :]) == (
        "The capital of France is Paris.<|im_end|>"
    )
