import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from algorithms.common.errors import InputError
from tasks import corpus
from tasks.data_config import CorpusConfig, SourceConfig
from tasks.downloads import SourceUnavailable


def write_rows(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def config(*origins: str, **fields: Any) -> CorpusConfig:
    sources = [SourceConfig(origin=origin) for origin in origins]
    return CorpusConfig(sources=sources, **{"val_fraction": 0.3} | fields)


def rows(out: Path, split: str) -> list[dict[str, str]]:
    shards = sorted(out.glob(f"{split}-*.parquet"))
    return [row for shard in shards for row in pq.read_table(shard).to_pylist()]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    write_rows(folder / "a.jsonl", [f"document {i}" for i in range(40)])
    write_rows(folder / "b.jsonl", ["document 0", " \n", "document 7", "only in b", "gr\u00fcn"])
    return folder


def test_manifest_counts_what_the_shards_hold(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "corpus"
    manifest = corpus.build(config(f"path:{data}/a.jsonl", f"path:{data}/b.jsonl"), out)
    assert json.loads((out / "MANIFEST.json").read_text()) == manifest
    assert (manifest["duplicates"], manifest["blank"]) == (2, 1)
    first, second = manifest["sources"]
    assert (first["files"], first["documents"], first["licence"]) == (1, 40, "unspecified")
    assert (second["documents"], second["bytes"]) == (2, len("only in b") + len("gr\u00fcn") + 1)
    for split in ("train", "val"):
        found, counted = rows(out, split), manifest["splits"][split]
        assert counted["documents"] == counted["slots"]["text"]["documents"] == len(found)
        assert counted["bytes"] == sum(len(row["text"].encode()) for row in found)
    total = sum(split["documents"] for split in manifest["splits"].values())
    assert total == 42
    everything = {row["text"]: row for split in ("train", "val") for row in rows(out, split)}
    row = everything["document 3"]
    assert (row["source"], row["path"]) == (f"path:{data}/a.jsonl", "a.jsonl:4")
    assert row["slot"] == "text"


def test_two_builds_give_the_same_bytes(data: Path, tmp_path: Path) -> None:
    wanted = config(f"path:{data}")
    corpus.build(wanted, tmp_path / "one")
    corpus.build(wanted, tmp_path / "two")
    assert files(tmp_path / "one") == files(tmp_path / "two")


def test_the_split_does_not_depend_on_the_order(data: Path, tmp_path: Path) -> None:
    origins = [f"path:{data}/a.jsonl", f"path:{data}/b.jsonl"]
    held_out = []
    for number, order in enumerate((origins, origins[::-1])):
        out = tmp_path / f"out{number}"
        corpus.build(config(*order), out)
        held_out.append({row["text"] for row in rows(out, "val")})
        for split in ("train", "val"):
            for row in rows(out, split):
                assert (int(row["sha256"][:16], 16) / 2**64 < 0.3) is (split == "val")
    assert held_out[0] == held_out[1]


def test_shards_end_at_their_size(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tmp_path / "whole"
    corpus.build(config(f"path:{data}"), whole)
    monkeypatch.setattr(corpus, "SHARD_BYTES", 100)
    monkeypatch.setattr(corpus, "GROUP_BYTES", 30)
    out = tmp_path / "corpus"
    shards = corpus.build(config(f"path:{data}"), out)["splits"]["train"]["shards"]
    assert len(shards) > 2
    assert [shard["file"] for shard in shards[:2]] == ["train-00000.parquet", "train-00001.parquet"]
    for shard in shards:
        table = pq.read_table(out / shard["file"])
        assert table.num_rows == shard["documents"]
        assert sum(len(text) for text in table["text"].to_pylist()) < 150
    assert rows(out, "train") == rows(whole, "train")


def test_empty_corpus_and_empty_split(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", ["", "  "])
    with pytest.raises(InputError, match=r"^corpus: no source has a document that is not blank$"):
        corpus.build(config(f"path:{tmp_path}/a.jsonl"), tmp_path / "out")
    write_rows(tmp_path / "a.jsonl", ["only one"])
    with pytest.raises(InputError, match=r"^corpus.val_fraction: 0.001 .* of 1 for val$"):
        corpus.build(config(f"path:{tmp_path}/a.jsonl", val_fraction=0.001), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_failure_midway_leaves_the_previous_corpus(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "corpus"
    corpus.build(config(f"path:{data}"), out)
    before = files(out)
    monkeypatch.setattr(corpus, "GROUP_BYTES", 30)  # shards are being written when it fails
    (data / "c.jsonl").write_text('{"text": "fine"}\n{"body": 1}\n')
    with pytest.raises(InputError, match=r"c.jsonl: line 2: no column 'text'; it has: body$"):
        corpus.build(config(f"path:{data}"), out)
    assert files(out) == before
    assert list(tmp_path.glob(".corpus.*")) == []


def test_a_source_that_cannot_be_had_is_not_replaced(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SourceUnavailable, match=r"^debian:hostname: "):
        corpus.build(config(f"path:{data}", "debian:hostname"), tmp_path / "corpus")
    assert not (tmp_path / "corpus").exists()
