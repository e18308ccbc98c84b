"""README, "Your own data": files of one's own in the place of params.yaml's sources."""

import gzip
import json

import pyarrow.parquet as pq
import pytest

from algorithms.common.files import read_json
from tests.project import Project

OWN = """corpus.sources=[{from: "path:mine/*.jsonl", licence: mine}]"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    project = Project(tmp_path_factory.mktemp("own") / "project")
    (project.root / "mine").mkdir()
    return project


def write(path, texts, column="text"):
    path.write_text("".join(json.dumps({column: text, "id": 1}) + "\n" for text in texts))


def test_own_jsonl_becomes_corpus_and_tokens(project):
    texts = [f"the {number}th line that only I have, na\u00efve and new" for number in range(200)]
    write(project.root / "mine" / "a.jsonl", texts[:100])
    write(project.root / "mine" / "b.jsonl", [*texts[100:], texts[0]])
    (project.root / "mine" / "c.jsonl.gz").write_bytes(gzip.compress(b"not for this glob"))
    done = project.flows("prepare", "--plain", "--set", OWN)
    assert done.returncode == 0, done.stderr
    [place] = (project.root / "runs" / "set").iterdir()
    manifest = read_json(place / "data" / "corpus" / "MANIFEST.json")
    [source] = manifest["sources"]
    assert (source["from"], source["licence"]) == ("path:mine/*.jsonl", "mine")
    found = [
        text
        for shard in sorted((place / "data" / "corpus").glob("*.parquet"))
        for text in pq.read_table(shard).column("text").to_pylist()
    ]
    assert sorted(found) == sorted(texts), "each once, the copy of the first left out"
    tokens = read_json(place / "data" / "tokens" / "MANIFEST.json")
    assert tokens["vocab_size"] == 300
    documents = {name: split["documents"] for name, split in tokens["splits"].items()}
    assert sum(documents.values()) == 200 and min(documents.values()) > 0
    assert not (project.root / "data" / "corpus").exists(), "what DVC tracks stays as it was"


def test_a_column_that_is_missing_is_one_line_and_leaves_nothing(project):
    (project.root / "mine" / "c.jsonl").write_text('{"body": "text"}\n')
    other = OWN.replace("mine}", "other}")
    done = project.flows("prepare", "--plain", "--set", other)
    (project.root / "mine" / "c.jsonl").unlink()
    assert done.returncode == 2
    assert done.stderr == (
        "shoestring: path:mine/*.jsonl: c.jsonl: line 1: no column 'text'; it has: body\n"
    )
    assert len([*(project.root / "runs" / "set").glob("*/data/corpus")]) == 1
