"""Stage `prompts`: rows for jobs from the generator or from files, and their tokenizer."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from algorithms.branch_replay import lookup
from algorithms.common.errors import FieldError, InputError
from algorithms.common.files import read_json
from tasks import paths
from tasks.data_config import PromptFilesConfig, PromptsConfig
from tasks.prompt_stage import build
from tests.lookups import SMALL

LOOKUP = PromptsConfig(lookup=SMALL, train=3, val=2, seed=4)


def rows(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_the_generator_gives_texts_with_their_questions_and_a_tokenizer(tmp_path):
    out = tmp_path / "prompts"
    manifest = build(LOOKUP, out)
    assert rows(out / "train.jsonl") == [*lookup.rows(SMALL, 3, 4, "train")]
    assert rows(out / "val.jsonl") == [*lookup.rows(SMALL, 2, 4, "val")]
    assert manifest == read_json(out / "MANIFEST.json")
    assert manifest["train"]["rows"] == 6 and manifest["val"]["rows"] == 4
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.eos_token == lookup.END
    text = f"{rows(out / 'val.jsonl')[0]['prompt']}\n? k1"
    assert tokenizer.decode(tokenizer.encode(text)).split() == text.split()
    again = tmp_path / "again"
    assert build(LOOKUP, again) == manifest


def test_files_are_read_a_text_at_a_time_and_the_tokenizer_comes_along(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "PROJECT", tmp_path)
    build(LOOKUP, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages }}")
    chat = [{"role": "user", "content": "k0"}]
    table = [
        {"prompt": "k0 v1", "question": "? k0", "answer": "v1"},
        {"prompt": "k1 v1", "question": "? k1", "answer": "v1"},
        {"prompt": "k0 v1", "question": "? k0", "answer": "v2"},
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
    held_out = [{"prompt": chat, "reward_model": {"ground_truth": "v0"}}]
    pq.write_table(pa.Table.from_pylist(held_out), tmp_path / "val.parquet")
    files = PromptFilesConfig(train="train.jsonl", val="val.parquet")
    config = PromptsConfig(files=files, tokenizer="model", train=1, val=9)
    manifest = build(config, tmp_path / "prompts")
    found = rows(tmp_path / "prompts" / "train.jsonl")
    assert [row["prompt_id"] for row in found] == ["0", "2"], "one text with all of its rows"
    [row] = rows(tmp_path / "prompts" / "val.jsonl")
    assert row["prompt"] == chat and row["answer"] == "v0" and row["question"] == ""
    assert (tmp_path / "prompts" / "chat_template.jinja").is_file()
    for name in ("chat_template.jinja", "tokenizer_config.json"):  # decide what is asked too
        path = tmp_path / "model" / name
        path.write_text(path.read_text() + " ")
        before, manifest = manifest, build(config, tmp_path / "prompts")
        assert manifest != before
    (tmp_path / "model" / "tokenizer.json").unlink()
    with pytest.raises(InputError, match="prompts.tokenizer: .*model holds no tokenizer.json$"):
        build(config, tmp_path / "prompts")
    assert (tmp_path / "prompts" / "MANIFEST.json").is_file(), "what was there stays"


def test_there_is_one_source_and_a_tokenizer_where_it_brings_none():
    files = PromptFilesConfig(train="a", val="b")
    for changes in ({}, {"lookup": SMALL, "files": files}):
        with pytest.raises(FieldError, match="one source: lookup, files or gym"):
            PromptsConfig(train=1, val=1, **changes)
    for changes in ({"files": files}, {"lookup": SMALL, "tokenizer": "c"}):
        with pytest.raises(FieldError, match="^tokenizer: goes with files and gym"):
            PromptsConfig(train=1, val=1, **changes)
