"""Sources of text: `from:` in params.yaml -> documents with their provenance.

Each kind has one function that finds the source and says its version, sha256 and licence; the
documents are read when they are asked for, one file at a time. A source that cannot be had raises
`SourceUnavailable`; nothing else takes its place.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

from packaging.utils import canonicalize_name, canonicalize_version

from algorithms.common.errors import InputError, one_line
from tasks import archives, downloads, paths
from tasks.archives import Member
from tasks.data_config import SourceConfig
from tasks.downloads import SourceUnavailable
from tasks.formats import check_text, missing_column, texts
from tasks.globs import MAGIC, Slots, compile_glob


@dataclass(frozen=True)
class Document:
    """One text: file inside its source, row in that file (None: the whole file), slot."""

    text: str
    file: str
    row: int | None
    slot: str

    @property
    def path(self) -> str:
        return self.file if self.row is None else f"{self.file}:{self.row}"


@dataclass(frozen=True)
class Source:
    """A source that was found. `documents` can be read once, in an order that its bytes fix."""

    origin: str
    version: str | None
    sha256: str | None
    licence: str
    documents: Iterator[Document]


def open_source(config: SourceConfig) -> Source:
    """Find the source, download it if need be. Raises `SourceUnavailable` or `InputError`."""
    kind, _, rest = config.origin.partition(":")
    return _KINDS[kind](config, rest)


def _pypi(config: SourceConfig, requirement: str) -> Source:
    name, _, version = requirement.partition("==")
    assert config.sha256 is not None  # the config requires it
    archive = downloads.pypi(config.origin, name, config.sha256)
    metadata = archives.package_metadata(archive)
    licence = None
    if metadata is not None:
        licence = archives.package_licence(metadata)
        found = str(metadata["Name"]), str(metadata["Version"])
        if _canonical(*found) != _canonical(name, version):
            raise InputError(
                f"{config.origin}: the file with the pinned sha256 is {'=='.join(found)}"
            )
    return _source(config, version, config.sha256, licence, archives.members(archive))


def _canonical(name: str, version: str) -> tuple[str, str]:
    return canonicalize_name(name), canonicalize_version(version)


def _debian(config: SourceConfig, name: str) -> Source:
    archive = downloads.debian(config.origin, name, config.sha256)
    field = downloads.command_output(config.origin, ["dpkg-deb", "-f", str(archive), "Version"])
    if field.returncode != 0:
        raise InputError(f"{config.origin}: {archive.name}: not a Debian package")
    licence = archives.debian_licence(archive, name)
    digest = downloads.file_sha256(archive)
    return _source(config, field.stdout.strip(), digest, licence, archives.members(archive))


def _stdlib(config: SourceConfig, _: str) -> Source:
    """Python files of the running interpreter's standard library.

    Left out: installed packages; folders named test, tests or idle_test (lib2to3/tests among
    them), which hold files that are undecodable on purpose; and what the build of this interpreter
    generated (config-*, _sysconfigdata*), which differs between machines of one version.
    """
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    base = Path(sysconfig.get_paths()["stdlib"])
    names = [
        name
        for name in _walk(base)
        if name.endswith(".py")
        and skip.isdisjoint(name.split("/"))
        and not name.startswith(("config-", "_sysconfigdata"))
    ]
    return _folder(config, base, names, platform.python_version(), "PSF-2.0")


def _path(config: SourceConfig, glob: str) -> Source:
    """Files that `glob` matches. Slots see their paths relative to its part without wildcards."""
    parts = glob.split("/")
    fixed = next((i for i, part in enumerate(parts) if MAGIC.search(part)), len(parts))
    base = paths.PROJECT / ("/".join(parts[:fixed]) or ("/" if glob.startswith("/") else "."))
    if base.is_file():
        base, names = base.parent, [base.name]
    else:
        regex = compile_glob("/".join(parts[fixed:]) or "**")
        names = [name for name in _walk(base) if regex.fullmatch(name)]
    if not names:
        raise InputError(f"{config.origin}: matches no file")
    return _folder(config, base, names, None, None)


def _hf(config: SourceConfig, name: str) -> Source:
    """A dataset of `datasets`: a local folder, or a name on the hub that it is set up for."""
    try:
        import datasets
    except ImportError:
        command = ".venv/bin/pip install datasets"
        raise InputError(f"{config.origin}: needs the datasets package: {command}") from None
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    folder = paths.PROJECT / name
    try:
        data = datasets.load_dataset(str(folder) if folder.is_dir() else name, split=config.split)
    except ValueError as error:  # an unknown split or configuration
        raise InputError(f"{config.origin}: {one_line(error)}") from None
    except (OSError, datasets.exceptions.DatasetsError) as error:
        raise SourceUnavailable(f"{config.origin}: {one_line(error)}") from None
    if config.text_column not in data.column_names:
        raise missing_column(config.origin, config.text_column, data.column_names)
    slot = _hf_slot(config)
    rows = enumerate(data.select_columns([config.text_column]), start=1)
    documents = (
        Document(
            check_text(row[config.text_column], f"{config.origin}: row {number}"),
            config.split,
            number,
            slot,
        )
        for number, row in rows
    )
    licence = config.licence or data.info.license or "unspecified"
    return Source(config.origin, str(data.info.version), None, licence, documents)


def _hf_slot(config: SourceConfig) -> str:
    """A split of a dataset counts as one file of that name."""
    slots = Slots(config.origin, config.slots)
    slot = slots.slot(config.split)
    slots.require_matches()
    return cast(str, slot)


def _folder(
    config: SourceConfig, base: Path, names: list[str], version: str | None, licence: str | None
) -> Source:
    """Files `names` below `base`; their sha256 is that of the list `sha256sum` would print."""
    slots = Slots(config.origin, config.slots)
    names = [name for name in names if slots.slot(name) is not None]
    slots.require_matches()
    listing = "".join(f"{downloads.file_sha256(base / name)}  {name}\n" for name in names)
    digest = hashlib.sha256(listing.encode()).hexdigest()
    if config.sha256 is not None and config.sha256 != digest:
        raise InputError(f"{config.origin}: has sha256 {digest}, not the pinned {config.sha256}")
    members = ((name, partial((base / name).open, "rb")) for name in names)
    return _source(config, version, digest, licence, cast(Iterator[Member], members))


def _source(
    config: SourceConfig,
    version: str | None,
    sha256: str,
    licence: str | None,
    members: Iterable[Member],
) -> Source:
    licence = config.licence or licence or "unspecified"
    return Source(config.origin, version, sha256, licence, _documents(config, members))


def _documents(config: SourceConfig, members: Iterable[Member]) -> Iterator[Document]:
    slots = Slots(config.origin, config.slots)
    for name, open_member in members:
        slot = slots.slot(name)
        if slot is None:
            continue
        with open_member() as file:
            for row, text in texts(file, f"{config.origin}: {name}", config.text_column):
                yield Document(text, name, row, slot)
    slots.require_matches()


def _walk(base: Path) -> list[str]:
    """Sorted paths of the files below `base`, relative to it."""
    found = [Path(folder, name) for folder, _, names in os.walk(base) for name in names]
    return sorted(path.relative_to(base).as_posix() for path in found if path.is_file())


_KINDS: dict[str, Callable[[SourceConfig, str], Source]] = {
    "pypi": _pypi,
    "debian": _debian,
    "stdlib": _stdlib,
    "path": _path,
    "hf": _hf,
}
