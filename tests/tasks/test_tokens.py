import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from algorithms.common.errors import InputError
from tasks import corpus, tokens
from tasks.data_config import CorpusConfig, SourceConfig, TokensConfig
from tests.tasks.test_corpus import write_rows

WORDS = [
    "alpha",
    "beta",
    "gr\u00fcn",
    "\u4e16\u754c",
    "\U0001f600",
    "x = 1\n",
    "\t",
    "\r\n",
    "\x00",
]
MARK = "a mark <|endoftext|> inside a document"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    texts = [
        " ".join(WORDS[(i * j) % len(WORDS)] for j in range(1, 30)) + str(i) for i in range(60)
    ]
    write_rows(tmp_path / "a.jsonl", [*texts, MARK])
    sources = [SourceConfig(origin=f"path:{tmp_path}/a.jsonl")]
    corpus.build(CorpusConfig(sources=sources, val_fraction=0.2), tmp_path / "corpus")
    return tmp_path / "corpus"


def documents(source: Path, split: str) -> list[str]:
    return [
        text
        for shard in sorted(source.glob(f"{split}-*"))
        for text in pq.read_table(shard)["text"].to_pylist()
    ]


def ids(out: Path, split: str) -> list[int]:
    manifest = json.loads((out / "MANIFEST.json").read_text())
    shards = [
        np.fromfile(out / shard["file"], np.dtype(manifest["dtype"]).newbyteorder("<"))
        for shard in manifest["splits"][split]["shards"]
    ]
    return [int(token) for token in np.concatenate(shards)]


def split_at(stream: list[int], end: int) -> list[list[int]]:
    found: list[list[int]] = [[]]
    for token in stream:
        if token == end:
            found.append([])
        else:
            found[-1].append(token)
    assert found.pop() == []
    return found


def tree(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_shards_decode_to_the_corpus(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "tokens"
    manifest = tokens.build(TokensConfig(vocab_size=300), source, out)
    assert json.loads((out / "MANIFEST.json").read_text()) == manifest
    assert (manifest["vocab_size"], manifest["dtype"]) == (300, "uint16")
    assert (manifest["end_of_text"], manifest["end_of_text_id"]) == ("<|endoftext|>", 0)
    assert manifest["bytes_per_token_bytes"] == 1.0
    digest = hashlib.sha256((source / "MANIFEST.json").read_bytes()).hexdigest()
    assert manifest["corpus_sha256"] == digest
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    sizes = np.load(out / "token_bytes.npy")
    assert (sizes.dtype, sizes.shape, sizes[0]) == (np.int32, (300,), 0)
    for split in ("train", "val"):
        stream, expected = ids(out, split), documents(source, split)
        texts = [tokenizer.decode(part) for part in split_at(stream, 0)]
        assert texts == expected
        counted = manifest["splits"][split]
        assert (counted["tokens"], counted["documents"]) == (len(stream), len(expected))
        assert counted["bytes"] == sum(len(text.encode()) for text in expected)
        assert counted["bytes"] == int(sizes[stream].sum())
    assert any(MARK in documents(source, split) for split in ("train", "val"))


def test_two_builds_give_the_same_bytes(source: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        tokens.build(TokensConfig(vocab_size=400), source, tmp_path / name)
    assert tree(tmp_path / "one") == tree(tmp_path / "two")


def test_only_the_train_split_trains_the_tokenizer(source: Path, tmp_path: Path) -> None:
    tokens.build(TokensConfig(vocab_size=400), source, tmp_path / "out")
    train = documents(source, "train")
    write_rows(tmp_path / "b.jsonl", [*train, *(f"unseen{i} text" for i in range(60))])
    sources = [SourceConfig(origin=f"path:{tmp_path}/b.jsonl")]
    corpus.build(CorpusConfig(sources=sources, val_fraction=0.2), tmp_path / "other")
    manifest = json.loads((tmp_path / "other" / "MANIFEST.json").read_text())
    (tmp_path / "other" / manifest["splits"]["train"]["shards"][0]["file"]).write_bytes(
        (source / "train-00000.parquet").read_bytes()
    )
    tokens.build(TokensConfig(vocab_size=400), tmp_path / "other", tmp_path / "again")
    one, two = (tmp_path / name / "tokenizer.json" for name in ("out", "again"))
    assert one.read_bytes() == two.read_bytes()


def test_small_text_gives_a_small_vocabulary(source: Path, tmp_path: Path) -> None:
    manifest = tokens.build(TokensConfig(vocab_size=5000), source, tmp_path / "out")
    assert 257 < manifest["vocab_size"] < 5000
    assert len(np.load(tmp_path / "out" / "token_bytes.npy")) == manifest["vocab_size"]


def test_shards_hold_at_most_the_limit(source: Path, tmp_path: Path) -> None:
    config = TokensConfig(vocab_size=300)
    tokens.build(config, source, tmp_path / "whole")
    small = TokensConfig(vocab_size=300, shard_tokens=100)
    shards = tokens.build(small, source, tmp_path / "out")["splits"]["train"]["shards"]
    assert [shard["tokens"] for shard in shards[:-1]] == [100] * (len(shards) - 1)
    assert len(shards) > 3 and 0 < shards[-1]["tokens"] <= 100
    for shard in shards:
        data = (tmp_path / "out" / shard["file"]).read_bytes()
        assert hashlib.sha256(data).hexdigest() == shard["sha256"]
        assert len(data) == 2 * shard["tokens"]
    assert ids(tmp_path / "out", "train") == ids(tmp_path / "whole", "train")


def test_transformers_reads_the_tokenizer(source: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    out = tmp_path / "tokens"
    manifest = tokens.build(TokensConfig(vocab_size=300), source, out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert len(tokenizer) == manifest["vocab_size"]
    assert tokenizer.eos_token_id == tokenizer.bos_token_id == tokenizer.pad_token_id == 0
    text = documents(source, "val")[0]
    encoded = tokenizer(text)["input_ids"]
    assert encoded == split_at(ids(out, "val"), 0)[0]
    assert tokenizer.decode(encoded) == text
    assert tokenizer.decode([*encoded, 0], skip_special_tokens=True) == text


# an existing tokenizer


def byte_level(path: Path, special: list[str], size: int = 0) -> Path:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(alphabet)}
    vocabulary |= {f"unused{i}": 256 + i for i in range(size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(["<think>"])
    tokenizer.add_special_tokens(special)
    path.parent.mkdir(exist_ok=True)
    tokenizer.save(str(path))
    return path


def existing(path: Path) -> TokensConfig:
    return TokensConfig(tokenizer=str(path))


@pytest.mark.parametrize(
    ("special", "end"),
    [
        (["<s>", "<|im_end|>", "</s>"], "</s>"),
        (["<|end_of_text|>", "<|im_end|>"], "<|im_end|>"),
        (["<first>", "<second>"], "<first>"),
    ],
)
def test_end_token_of_an_existing_tokenizer(
    source: Path, tmp_path: Path, special: list[str], end: str
) -> None:
    path = byte_level(tmp_path / "theirs" / "tokenizer.json", special)
    manifest = tokens.build(existing(path), source, tmp_path / "out")
    assert manifest["end_of_text"] == end
    assert manifest["end_of_text_id"] == 257 + special.index(end)
    assert manifest["bytes_per_token_bytes"] == 1.0
    sizes = np.load(tmp_path / "out" / "token_bytes.npy")
    assert sizes.tolist() == [1] * 256 + [len("<think>")] + [0] * len(special)


def test_large_vocabulary_is_uint32(source: Path, tmp_path: Path) -> None:
    path = byte_level(tmp_path / "theirs" / "tokenizer.json", ["</s>"], size=2**16)
    out = tmp_path / "out"
    manifest = tokens.build(existing(path), source, out)
    assert (manifest["vocab_size"], manifest["dtype"]) == (2**16 + 258, "uint32")
    assert manifest["end_of_text_id"] == ids(out, "val")[-1] == 2**16 + 257


def test_settings_beside_an_existing_tokenizer_come_along(source: Path, tmp_path: Path) -> None:
    path = byte_level(tmp_path / "theirs" / "tokenizer.json", ["</s>", "<s>"])
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=5)
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 258)])
    tokenizer.save(str(path))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    path.with_name("tokenizer_config.json").write_text(json.dumps(settings))
    path.with_name("chat_template.jinja").write_text("{{ messages }}")
    out = tmp_path / "out"
    tokens.build(existing(path), source, out)
    assert json.loads((out / "tokenizer_config.json").read_text()) == settings
    assert (out / "chat_template.jinja").read_text() == "{{ messages }}"
    whole = [tokenizer.decode(part) for part in split_at(ids(out, "val"), 257)]
    assert whole == documents(source, "val")


def test_correction_for_a_tokenizer_that_is_not_byte_level(source: Path, tmp_path: Path) -> None:
    space = "\u2581"
    known = {"<unk>": 0, "</s>": 1, space: 2, "<0x0A>": 3, f"{space}be": 4, "ta": 5, "\u00fc": 6}
    model = models.Unigram([(token, -1.0) for token in known], unk_id=0)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    out = tmp_path / "out"
    manifest = tokens.build(existing(tmp_path / "tokenizer.json"), source, out)
    sizes = np.load(out / "token_bytes.npy")
    assert sizes.tolist() == [0, 0, 1, 1, 3, 2, 2]
    counted = sizes[ids(out, "val")].sum()
    factor = manifest["bytes_per_token_bytes"]
    assert factor > 1.0
    assert factor * counted == pytest.approx(manifest["splits"]["val"]["bytes"])


def bad(path: Path, source: Path, out: Path) -> str:
    with pytest.raises(InputError) as error:
        tokens.build(existing(path), source, out)
    assert not out.exists()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_bad_input_is_one_line(source: Path, tmp_path: Path) -> None:
    path, out = tmp_path / "theirs.json", tmp_path / "out"
    assert bad(path, source, out) == f"tokens.tokenizer: {path}: no such file"
    path.write_text("{")
    assert bad(path, source, out).startswith(f"tokens.tokenizer: {path}: not a tokenizer.json: ")
    byte_level(path, [])
    assert bad(path, source, out).endswith("has no token that can end a document")
    unknown = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1}, unk_token="<unk>"))
    unknown.add_special_tokens(["<unk>", "</s>"])
    unknown.save(str(path))
    assert bad(path, source, out).endswith("into unknown tokens only")
    assert (
        bad(path, tmp_path, out)
        == f"{tmp_path}/MANIFEST.json: no such file; build the corpus first"
    )


def test_a_manifest_that_leads_out_of_its_folder_is_refused(source: Path, tmp_path: Path) -> None:
    manifest, out = source / "MANIFEST.json", tmp_path / "out"
    text = manifest.read_text()
    for inside, outside in (("val-00000", "../val-00000"), ('"val": {', '"../val": {')):
        assert inside in text
        manifest.write_text(text.replace(inside, outside))
        with pytest.raises(
            InputError, match=r"MANIFEST.json: '\.\./val.*' does not lie in its folder"
        ):
            tokens.build(TokensConfig(vocab_size=300), source, out)
    manifest.write_text(text)
    assert not out.exists()


def test_a_failure_midway_leaves_the_previous_tokens(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    tokens.build(TokensConfig(vocab_size=300), source, out)
    before = tree(out)
    encode = tokens._encode

    def fail_on_val(*arguments: Any) -> None:
        encode(*arguments)
        if arguments[-1].split == "val":
            raise OSError("disk full")

    monkeypatch.setattr(tokens, "_encode", fail_on_val)
    with pytest.raises(OSError, match="disk full"):
        tokens.build(TokensConfig(vocab_size=400), source, out)
    assert tree(out) == before
    assert list(tmp_path.glob(".out.*")) == []
