import gzip
import io
import stat
import tarfile
import zipfile
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

from algorithms.common.errors import InputError
from tasks.archives import debian_licence, members, package_licence, package_metadata
from tests.tasks.packages import METADATA, debian_package, source_archive, zip_archive


def contents(archive: Path) -> dict[str, bytes]:
    return {name: open_member().read() for name, open_member in members(archive)}


def test_source_archive_is_relative_to_its_top_folder(tmp_path: Path) -> None:
    files: dict[str, str | bytes] = {"PKG-INFO": METADATA, "docs/a/b.txt": "text"}
    tar = source_archive(tmp_path / "tiny_pkg-1.0.tar.gz", files)
    zipped = zip_archive(
        tmp_path / "tiny_pkg-1.0.zip", {f"tiny_pkg-1.0/{name}": files[name] for name in files}
    )
    assert contents(tar) == {"PKG-INFO": METADATA.encode(), "docs/a/b.txt": b"text"}
    assert contents(zipped) == contents(tar)


def test_wheel_is_relative_to_its_root(tmp_path: Path) -> None:
    wheel = zip_archive(
        tmp_path / "tiny_pkg-1.0-py3-none-any.whl",
        {"tiny/a.py": "x = 1", "tiny_pkg-1.0.dist-info/METADATA": METADATA},
    )
    assert contents(wheel)["tiny/a.py"] == b"x = 1"
    metadata = package_metadata(wheel)
    assert metadata is not None
    assert (metadata["Name"], package_licence(metadata)) == ("Tiny.Pkg", "BSD-3-Clause")


def test_debian_package_is_read_without_its_links(tmp_path: Path) -> None:
    copyright_file = b"Files: *\nLicense: GPL-2+\n text\n\nFiles: x\nLicense: BSD-3-clause\n"
    files = {
        "usr/share/doc/tiny/copyright": copyright_file,
        "usr/share/doc/tiny/book.txt.gz": gzip.compress(b"book"),
        "usr/share/doc/tiny/plain.txt": b"plain",
    }
    deb = debian_package(tmp_path, "tiny", files)
    assert contents(deb) == files
    assert debian_licence(deb, "tiny") == "BSD-3-clause, GPL-2+"
    assert debian_licence(deb, "other") == "see usr/share/doc/other/copyright"


def test_a_debian_package_may_be_left_early(tmp_path: Path) -> None:
    deb = debian_package(tmp_path, "tiny", {"usr/a.txt": b"a" * 2**20, "usr/b.txt": b"b" * 2**20})
    reading = members(deb)
    assert next(reading)[0] == "usr/a.txt"
    reading.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["/etc/passwd", "a/../../b", "../b"])
def test_a_member_outside_is_refused(tmp_path: Path, name: str) -> None:
    tar = source_archive(tmp_path / "bad.tar.gz", {name: "x"}, top="")
    wheel = zip_archive(tmp_path / "bad.whl", {name: "x"})
    for archive in (tar, wheel):
        with pytest.raises(InputError, match=f"^{archive.name}: unsafe member name '{name}'$"):
            contents(archive)


def test_links_and_devices_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "links.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE):
            info = tarfile.TarInfo("top/link")
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
        info = tarfile.TarInfo("top/file")
        info.size = 1
        tar.addfile(info, io.BytesIO(b"x"))
    assert contents(path) == {"file": b"x"}
    wheel = zip_archive(tmp_path / "links.whl", {"file": "x"})
    with zipfile.ZipFile(wheel, "a") as archive:
        link = zipfile.ZipInfo("link")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "/etc/passwd")
    assert contents(wheel) == {"file": b"x"}


def test_no_script_of_a_debian_package_is_run(tmp_path: Path) -> None:
    scripts = {}
    for name in ("preinst", "postinst"):
        scripts[name] = f"#!/bin/sh\ntouch {tmp_path}/{name}\n"
    deb = debian_package(tmp_path, "tiny", {"usr/a.txt": b"a"}, scripts)
    assert contents(deb) == {"usr/a.txt": b"a"}
    assert debian_licence(deb, "tiny") == "see usr/share/doc/tiny/copyright"
    assert not [name for name in scripts if (tmp_path / name).exists()]


@pytest.mark.parametrize("name", ["a.tar.gz", "a.whl", "a.zip", "a.deb"])
def test_a_damaged_archive_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"not an archive")
    with pytest.raises(InputError, match=f"^{name}: damaged archive: "):
        contents(tmp_path / name)


def test_a_cut_off_source_archive_is_named(tmp_path: Path) -> None:
    tar = source_archive(tmp_path / "a.tar.gz", {"a.txt": bytes(range(256)) * 999})
    tar.write_bytes(tar.read_bytes()[:-600])
    with pytest.raises(InputError, match=r"^a.tar.gz: damaged archive: "):
        contents(tar)


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz", "a.tar.bz2", "a.tar.xz", "a.zip"])
def test_whatever_is_damaged_in_an_archive_it_is_named(tmp_path: Path, name: str) -> None:
    """Bytes all over it are others; what can be read all the same is read."""
    files = {"top/a.txt": b"alpha " * 50, "top/b.txt": b"beta " * 50}
    path = tmp_path / name
    if name.endswith(".zip"):
        zip_archive(path, {key: value.decode() for key, value in files.items()})
    else:
        mode: Any = f"w:{path.suffix[1:].replace('tar', '')}"
        with tarfile.open(path, mode) as tar:
            for key, value in files.items():
                info = tarfile.TarInfo(key)
                info.size = len(value)
                tar.addfile(info, io.BytesIO(value))
    whole, refused = path.read_bytes(), 0
    for place in range(0, len(whole), -(-len(whole) // 200)):
        for value in (0, 0x63, 0xFF):
            path.write_bytes(whole[:place] + bytes([value]) + whole[place + 1 :])
            try:
                contents(path)
            except InputError as error:
                refused += 1
                assert str(error).startswith(f"{name}: ") and "\n" not in str(error)
    assert refused


@pytest.mark.parametrize(
    ("headers", "licence"),
    [
        ([("License-Expression", "MIT"), ("License", "old")], "MIT"),
        (
            [("License", "UNKNOWN"), ("Classifier", "License :: OSI Approved :: BSD License")],
            "BSD License",
        ),
        ([("License", "a\n full\n text"), ("Classifier", "Topic :: X")], None),
        ([], None),
    ],
)
def test_licence_of_a_package(headers: list[tuple[str, str]], licence: str | None) -> None:
    metadata = Message()
    for key, value in headers:
        metadata[key] = value
    assert package_licence(metadata) == licence
