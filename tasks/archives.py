"""Reads wheels, source archives and Debian packages in place: nothing is extracted or executed."""

from __future__ import annotations

import email
import io
import lzma
import re
import stat
import subprocess
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.message import Message
from functools import partial
from pathlib import Path
from typing import IO, BinaryIO

from algorithms.common.errors import InputError, one_line

Member = tuple[str, Callable[[], BinaryIO]]
"""Path inside the source and how to open it, before the next one is asked for."""

DAMAGE = (
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError),
    *(LookupError, OSError, RuntimeError, ValueError),  # bad names, checksums, ciphers, methods
)
"""What reading an archive may raise."""


def members(archive: Path) -> Iterator[Member]:
    """Regular files of a .whl, .zip, .tar.* or .deb; links and devices are passed over.

    Paths of a source archive are relative to its top folder, others to the root. A member with an
    absolute path or `..` and a damaged archive are `InputError`s.
    """
    with _damage_named(archive.name):
        if archive.suffix == ".deb":
            yield from _debian(archive)
        elif archive.suffix in (".whl", ".zip"):
            yield from _zip(archive, strip_top=archive.suffix == ".zip")
        else:
            with tarfile.open(archive) as tar:
                yield from _tar(tar, archive.name, strip_top=True)


def package_metadata(archive: Path) -> Message | None:
    """PKG-INFO of a source archive or METADATA of a wheel."""
    for name, open_member in members(archive):
        if re.fullmatch(r"PKG-INFO|[^/]+\.dist-info/METADATA", name):
            return email.message_from_string(open_member().read().decode(errors="replace"))
    return None


def package_licence(metadata: Message) -> str | None:
    """What a Python package says of its licence; a full text in `License` does not count."""
    for key in ("License-Expression", "License"):
        value = str(metadata.get(key, "")).strip()
        if value and value != "UNKNOWN" and len(value) <= 100 and "\n" not in value:
            return value
    classifiers = [str(value) for value in metadata.get_all("Classifier", [])]
    licences = [line.split(" :: ")[-1] for line in classifiers if line.startswith("License :: ")]
    return ", ".join(licences) or None


def debian_licence(archive: Path, name: str) -> str:
    """Short names in the `License:` fields of a Debian package's copyright file."""
    path = f"usr/share/doc/{name}/copyright"
    for member, open_member in members(archive):
        if member == path:
            text = open_member().read().decode(errors="replace")
            found = re.findall(r"^License:[ \t]*(\S.*?)[ \t]*$", text, re.MULTILINE)
            return ", ".join(sorted(set(found))) or f"see {path}"
    return f"see {path}"


def _debian(archive: Path) -> Iterator[Member]:
    command = ["dpkg-deb", "--fsys-tarfile", str(archive)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        with tarfile.open(fileobj=process.stdout, mode="r|") as tar:
            yield from _tar(tar, archive.name, strip_top=False)
        process.stdout.read()  # the padding, so that dpkg-deb ends by itself
    if process.returncode != 0:
        raise InputError(f"{archive.name}: damaged archive: dpkg-deb failed")


def _tar(tar: tarfile.TarFile, archive: str, *, strip_top: bool) -> Iterator[Member]:
    def read(info: tarfile.TarInfo) -> IO[bytes]:
        file = tar.extractfile(info)
        assert file is not None  # only links and devices have no content
        return file

    for info in tar:
        if info.isreg():
            opener = partial(_in_memory, archive, partial(read, info))
            yield _inside(info.name, archive, strip_top), opener


def _zip(archive: Path, *, strip_top: bool) -> Iterator[Member]:
    with zipfile.ZipFile(archive) as file:
        for info in file.infolist():
            if not info.is_dir() and not stat.S_ISLNK(info.external_attr >> 16):
                opener = partial(_in_memory, archive.name, partial(file.open, info))
                yield _inside(info.filename, archive.name, strip_top), opener


def _in_memory(archive: str, opener: Callable[[], IO[bytes]]) -> BinaryIO:
    """A member that can seek, as Parquet needs."""
    with _damage_named(archive), opener() as file:
        return io.BytesIO(file.read())


@contextmanager
def _damage_named(archive: str) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except DAMAGE as error:
        raise InputError(f"{archive}: damaged archive: {one_line(error)}") from None


def _inside(name: str, archive: str, strip_top: bool) -> str:
    parts = [part for part in name.split("/") if part != "."]
    if name.startswith("/") or ".." in parts:
        raise InputError(f"{archive}: unsafe member name {name!r}")
    return "/".join(parts[1:] if strip_top and len(parts) > 1 else parts)
