import functools
import gzip
import http.server
import json
import platform
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from algorithms.common.errors import FieldError, InputError
from tasks import paths
from tasks.config import load_params
from tasks.data_config import SourceConfig
from tasks.downloads import SIMPLE_JSON, SourceUnavailable
from tasks.sources import Document, Source, open_source
from tests.tasks.packages import METADATA, debian_package, sha256, source_archive, zip_archive

Pages = dict[str, tuple[int, str, bytes]]
"""Path on the server -> status, content type, body."""


class Handler(http.server.BaseHTTPRequestHandler):
    def __init__(self, pages: Pages, requested: list[str], *args: Any) -> None:
        self.pages, self.requested = pages, requested
        super().__init__(*args)

    def do_GET(self) -> None:
        self.requested.append(self.path)
        status, kind, body = self.pages.get(self.path, (404, "text/plain", b""))
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Index:
    """A package index on loopback that speaks PEP 691."""

    def __init__(self) -> None:
        self.pages: Pages = {}
        self.requested: list[str] = []
        handler = functools.partial(Handler, self.pages, self.requested)
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/simple"

    def add(self, project: str, archive: Path) -> str:
        """Serve `archive` as a file of `project`, by a relative address; return its sha256."""
        digest = sha256(archive)
        file = {"filename": archive.name, "url": f"../../{archive.name}"}
        page = {"files": [file | {"hashes": {"sha256": digest}}]}
        self.pages[f"/simple/{project}/"] = (200, SIMPLE_JSON, json.dumps(page).encode())
        self.pages[f"/{archive.name}"] = (200, "application/octet-stream", archive.read_bytes())
        return digest


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    index = Index()
    monkeypatch.setenv("PIP_INDEX_URL", index.url)
    yield index
    index.server.shutdown()
    index.server.server_close()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(paths, "CACHE", tmp_path / "cache")
    return tmp_path / "cache"


def read(origin: str, **fields: Any) -> tuple[Source, list[Document]]:
    source = open_source(SourceConfig(origin=origin, **fields))
    return source, list(source.documents)


def sdist(folder: Path) -> Path:
    files: dict[str, str | bytes] = {
        "PKG-INFO": METADATA,
        "docs/a.txt": "a",
        "docs/b/c.txt": "c",
        "src/d.py": "d",
    }
    return source_archive(folder / "tiny_pkg-1.0.tar.gz", files)


# pypi


def test_pypi_source_archive(index: Index, tmp_path: Path, cache: Path) -> None:
    digest = index.add("tiny-pkg", sdist(tmp_path))
    slots = {"prose": ["docs/**/*.txt"], "code": ["src/**/*.py"]}
    source, documents = read("pypi:Tiny_Pkg==1.0", sha256=digest, slots=slots)
    assert (source.version, source.sha256, source.licence) == ("1.0", digest, "BSD-3-Clause")
    assert [(d.path, d.slot, d.text) for d in documents] == [
        ("docs/a.txt", "prose", "a"),
        ("docs/b/c.txt", "prose", "c"),
        ("src/d.py", "code", "d"),
    ]
    assert sha256(cache / digest / "tiny_pkg-1.0.tar.gz") == digest


def test_pypi_wheel(index: Index, tmp_path: Path) -> None:
    wheel = zip_archive(
        tmp_path / "tiny_pkg-1.0-py3-none-any.whl",
        {"tiny/a.py": "x = 1", "tiny_pkg-1.0.dist-info/METADATA": METADATA},
    )
    slots = {"code": ["tiny/*.py"]}
    digest = index.add("tiny-pkg", wheel)
    source, documents = read("pypi:tiny.pkg==1.0", sha256=digest, slots=slots, licence="mine")
    assert source.licence == "mine"
    assert documents == [Document("x = 1", "tiny/a.py", None, "code")]


def test_pypi_cache_needs_no_index_and_is_verified(
    index: Index, tmp_path: Path, cache: Path
) -> None:
    digest = index.add("tiny-pkg", sdist(tmp_path))
    first = read("pypi:tiny-pkg==1.0", sha256=digest)[1]
    served = len(index.requested)
    assert read("pypi:tiny-pkg==1.0", sha256=digest)[1] == first
    assert len(index.requested) == served
    (cache / digest / "tiny_pkg-1.0.tar.gz").write_bytes(b"damaged")
    assert read("pypi:tiny-pkg==1.0", sha256=digest)[1] == first
    assert len(index.requested) == served + 2


def test_pypi_index_of_pips_configuration(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = index.add("tiny-pkg", sdist(tmp_path))
    (tmp_path / "pip.conf").write_text(f"[global]\nindex-url = {index.url}/\n")
    monkeypatch.delenv("PIP_INDEX_URL")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    assert len(read("pypi:tiny-pkg==1.0", sha256=digest)[1]) == 4


def test_pypi_runs_nothing_of_a_source_archive(index: Index, tmp_path: Path) -> None:
    evil = f"open({str(tmp_path / 'ran')!r}, 'w')"
    files: dict[str, str | bytes] = {"setup.py": evil, "PKG-INFO": METADATA}
    digest = index.add("tiny-pkg", source_archive(tmp_path / "tiny_pkg-1.0.tar.gz", files))
    assert read("pypi:tiny-pkg==1.0", sha256=digest, slots={"code": ["setup.py"]})[1]
    assert not (tmp_path / "ran").exists()


def test_pypi_wrong_pins(index: Index, tmp_path: Path) -> None:
    digest = index.add("tiny-pkg", sdist(tmp_path))
    with pytest.raises(InputError, match=f"^pypi:tiny-pkg==1.0: .* no file with sha256 {'0' * 64}"):
        read("pypi:tiny-pkg==1.0", sha256="0" * 64)
    with pytest.raises(InputError, match=r"^pypi:tiny-pkg==1.1: .* is Tiny.Pkg==1.0$"):
        read("pypi:tiny-pkg==1.1", sha256=digest)


def test_pypi_file_that_changed_on_the_way(index: Index, tmp_path: Path, cache: Path) -> None:
    digest = index.add("tiny-pkg", sdist(tmp_path))
    index.pages["/tiny_pkg-1.0.tar.gz"] = (200, "application/octet-stream", b"other")
    with pytest.raises(SourceUnavailable, match=r"^pypi:tiny-pkg==1.0: .* another sha256$"):
        read("pypi:tiny-pkg==1.0", sha256=digest)
    assert not (cache / digest / "tiny_pkg-1.0.tar.gz").exists()


def test_pypi_index_that_fails(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {"origin": "pypi:none==1", "sha256": "0" * 64}
    with pytest.raises(SourceUnavailable, match=r"^pypi:none==1: .* answered 404"):
        read(**wanted)
    index.pages["/simple/none/"] = (200, "text/html", b"<html>")
    with pytest.raises(InputError, match=r"^pypi:none==1: .* speaks no JSON"):
        read(**wanted)
    monkeypatch.setenv("PIP_INDEX_URL", "http://user:secret@127.0.0.1:9/simple")
    with pytest.raises(SourceUnavailable, match=r"^pypi:none==1: cannot reach") as error:
        read(**wanted)
    assert "secret" not in str(error.value)


@pytest.mark.slow
def test_default_source_from_the_real_index() -> None:
    (config,) = load_params().corpus.sources
    source = open_source(config)
    documents = list(source.documents)
    assert (source.version, source.licence) == ("5.2.8", "BSD-3-Clause")
    assert len(documents) == 1523
    assert sum(len(document.text.encode()) for document in documents) == 11_731_087


# debian


def test_debian_package_from_the_cache(tmp_path: Path, cache: Path) -> None:
    files = {
        "usr/share/doc/tiny/copyright": b"License: GPL-2+\n",
        "usr/share/doc/tiny/book.txt.gz": gzip.compress(b"a book"),
        "usr/share/doc/tiny/data.jsonl": b'{"text": "row"}\n',
        "usr/bin/tiny": b"\xff\xfe",
    }
    deb = debian_package(tmp_path, "tiny", files)
    digest = sha256(deb)
    (cache / digest).mkdir(parents=True)
    deb.rename(cache / digest / deb.name)
    slots = {"prose": ["usr/share/doc/tiny/*.gz", "usr/share/doc/**/*.jsonl"]}
    source, documents = read("debian:tiny", sha256=digest, slots=slots)
    assert (source.version, source.sha256, source.licence) == ("2:1.5-1", digest, "GPL-2+")
    assert {document.path: document.text for document in documents} == {
        "usr/share/doc/tiny/book.txt.gz": "a book",
        "usr/share/doc/tiny/data.jsonl:1": "row",
    }


def test_debian_package_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SourceUnavailable, match=r"^debian:no-such-package-here: apt-get .*: E: "):
        read("debian:no-such-package-here")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SourceUnavailable, match=r"^debian:hostname: needs apt-get"):
        read("debian:hostname")


@pytest.mark.slow
def test_real_debian_package(cache: Path) -> None:
    slots = {"prose": ["usr/share/doc/hostname/*"]}
    source, documents = read("debian:hostname", slots=slots)
    assert source.sha256 is not None and source.version
    assert [path.suffix for path in (cache / source.sha256).iterdir()] == [".deb"]
    assert any("hostname" in document.text for document in documents)
    with pytest.raises(InputError, match=r"^debian:hostname: .* not the pinned 0000"):
        read("debian:hostname", sha256="0" * 64)


# stdlib


def test_stdlib_has_modules_and_no_tests() -> None:
    source, documents = read("stdlib")
    files = {document.file for document in documents}
    assert (source.version, source.licence) == (platform.python_version(), "PSF-2.0")
    assert {"json/decoder.py", "argparse.py"} <= files
    assert not any({"test", "tests", "site-packages"} & set(file.split("/")) for file in files)


# path


def test_path_of_mixed_formats(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.txt").write_text("a")
    (folder / "sub" / "b.jsonl").write_text('{"content": "b1"}\n{"content": "b2"}\n')
    with gzip.open(folder / "sub" / "c.jsonl.gz", "wt") as file:
        file.write('{"content": "c"}\n')
    pq.write_table(pa.table({"content": ["d"]}), folder / "d.parquet")
    (folder / "e.bin").write_bytes(b"\xff")
    slots = {"prose": ["**/*.txt", "**/*.parquet"], "rows": ["sub/*.jsonl*"]}
    source, documents = read(f"path:{folder}", slots=slots, text_column="content", licence="CC0")
    assert (source.version, source.licence) == (None, "CC0")
    assert [(d.path, d.slot, d.text) for d in documents] == [
        ("a.txt", "prose", "a"),
        ("d.parquet:1", "prose", "d"),
        ("sub/b.jsonl:1", "rows", "b1"),
        ("sub/b.jsonl:2", "rows", "b2"),
        ("sub/c.jsonl.gz:1", "rows", "c"),
    ]


def test_path_globs_files_and_the_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "PROJECT", tmp_path)
    (tmp_path / "in" / "sub").mkdir(parents=True)
    for name in ("in/a.txt", "in/sub/b.txt", "in/sub/c.md"):
        (tmp_path / name).write_text(name)
    found = {
        glob: [document.text for document in read(f"path:{glob}")[1]]
        for glob in ("in/**/*.txt", "in/a.txt", "in/*/*", "in/", f"{tmp_path}/in/*.txt")
    }
    assert found == {
        "in/**/*.txt": ["in/a.txt", "in/sub/b.txt"],
        "in/a.txt": ["in/a.txt"],
        "in/*/*": ["in/sub/b.txt", "in/sub/c.md"],
        "in/": ["in/a.txt", "in/sub/b.txt", "in/sub/c.md"],
        f"{tmp_path}/in/*.txt": ["in/a.txt"],
    }


def test_path_sha256_is_of_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    digest = read(f"path:{tmp_path}/*.txt")[0].sha256
    assert read(f"path:{tmp_path}/*.txt", sha256=digest)[0].sha256 == digest
    (tmp_path / "a.txt").write_text("b")
    with pytest.raises(InputError, match=f"not the pinned {digest}$"):
        read(f"path:{tmp_path}/*.txt", sha256=digest)


def test_path_that_matches_nothing(tmp_path: Path) -> None:
    origin = f"path:{tmp_path}/*.txt"
    with pytest.raises(InputError, match=r"\*.txt: matches no file$"):
        read(origin)
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(InputError, match=r"\*.txt: glob '\*.md' matches no file$"):
        read(origin, slots={"prose": ["*.md"]})


def test_path_error_names_source_file_and_byte(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"ok\xff")
    with pytest.raises(InputError, match=r"^path:.*\*.txt: a.txt: not UTF-8 at byte 2$"):
        read(f"path:{tmp_path}/*.txt")


# hf


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf"))
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.jsonl").write_text('{"text": "a"}\n{"text": null}\n')
    return tmp_path / "rows"


def test_hf_local_folder(dataset: Path) -> None:
    source, documents = read(f"hf:{dataset}", licence="CC0", slots={"web": ["**/*"]})
    assert source.licence == "CC0"
    assert [(d.path, d.slot, d.text) for d in documents] == [
        ("train:1", "web", "a"),
        ("train:2", "web", ""),
    ]


def test_hf_bad_column_and_split(dataset: Path) -> None:
    with pytest.raises(InputError, match=r"^hf:.*: no column 'body'; it has: text$"):
        read(f"hf:{dataset}", text_column="body")
    with pytest.raises(InputError, match=r'^hf:.*: Unknown split "nope"'):
        read(f"hf:{dataset}", split="nope")


def test_hf_without_files_is_unavailable(dataset: Path) -> None:
    (dataset / "train.jsonl").unlink()
    with pytest.raises(SourceUnavailable, match=r"^hf:.*contain any data files"):
        read(f"hf:{dataset}")


def test_hf_without_the_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"^hf:name: needs .*: \.venv/bin/pip install datasets$"):
        read("hf:name")


# the config


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"origin": "ftp:x"}, "from"),
        ({"origin": "pypi:x", "sha256": "0" * 64}, "from"),
        ({"origin": "pypi:../x==1", "sha256": "0" * 64}, "from"),
        ({"origin": "pypi:x==1"}, "sha256"),
        ({"origin": "pypi:x==1", "sha256": "../../x"}, "sha256"),
        ({"origin": "debian:-oOption=x"}, "from"),
        ({"origin": "stdlib:x"}, "from"),
        ({"origin": "path:a/../b"}, "from"),
        ({"origin": "hf:x", "sha256": "0" * 64}, "sha256"),
        ({"origin": "stdlib", "slots": {}}, "slots"),
        ({"origin": "stdlib", "slots": {"a": []}}, "slots.a"),
    ],
)
def test_bad_source_config_names_the_field(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(FieldError) as error:
        SourceConfig(**fields)
    assert error.value.field == name
