"""Gets archives into the cache: from the package index that pip uses, or with apt. Runs no code
of theirs: `pip download` would run the build script of a source archive.
"""

from __future__ import annotations

import ast
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import requests
from filelock import FileLock
from packaging.utils import canonicalize_name

from algorithms.common.errors import InputError
from tasks import paths
from tasks.progress import progress

SIMPLE_JSON = "application/vnd.pypi.simple.v1+json"
TIMEOUT = (15, 60)
"""Seconds to connect, and to wait between two packets."""


class SourceUnavailable(InputError):
    """A source that cannot be had now. The message names it; a later attempt may succeed."""


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def pypi(origin: str, name: str, sha256: str) -> Path:
    """The package file with `sha256`, from the cache or the simple index (PEP 503 and 691)."""
    cached = _cached(sha256)
    if cached is not None:
        return cached
    page = f"{_index_url(origin).rstrip('/')}/{canonicalize_name(name)}/"
    response = _get(origin, page, stream=False)
    if response.headers.get("Content-Type", "").split(";")[0] != SIMPLE_JSON:
        raise InputError(f"{origin}: the package index speaks no JSON; set PIP_INDEX_URL")
    for file in response.json()["files"]:
        if file["hashes"].get("sha256") == sha256:
            url = urljoin(response.url, file["url"])
            return _download(origin, url, sha256, Path(file["filename"]).name)
    raise InputError(f"{origin}: the package index has no file with sha256 {sha256}")


def debian(origin: str, name: str, sha256: str | None) -> Path:
    """The Debian package `name` at the version that apt would install, `sha256` if pinned."""
    cached = _cached(sha256) if sha256 else None
    if cached is not None:
        return cached
    paths.CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        command = ["apt-get", "download", "-q", name]
        run = command_output(origin, command, cwd=folder)
        if run.returncode != 0:
            reasons = [line for line in run.stderr.splitlines() if line.startswith("E:")]
            reason = reasons[0] if reasons else f"exit code {run.returncode}"
            raise SourceUnavailable(f"{origin}: apt-get download failed: {reason}")
        (file,) = Path(folder).glob("*.deb")
        digest = file_sha256(file)
        if sha256 is not None and digest != sha256:
            raise InputError(f"{origin}: {file.name} has sha256 {digest}, not the pinned {sha256}")
        home = paths.CACHE / digest
        home.mkdir(exist_ok=True)
        part = home / f"{file.name}.{os.getpid()}.part"
        shutil.move(file, part)
        return part.replace(home / file.name)


def command_output(
    origin: str, command: list[str], cwd: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a Debian tool in the C locale; `SourceUnavailable` when this machine has none."""
    environment = os.environ | {"LC_ALL": "C"}
    try:
        return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    except FileNotFoundError:
        raise SourceUnavailable(f"{origin}: needs {command[0]}, not on this machine") from None


def _cached(sha256: str) -> Path | None:
    """The file with `sha256` in the cache; a damaged one does not count."""
    for path in sorted((paths.CACHE / sha256).glob("*")):
        if path.suffix != ".part" and path.suffix != ".lock" and file_sha256(path) == sha256:
            return path
    return None


def _index_url(origin: str) -> str:
    """What pip would use: environment, then its config files, then its own default."""
    if os.environ.get("PIP_INDEX_URL"):
        return os.environ["PIP_INDEX_URL"]
    # `pip config get` reads one file only, `list` merges them all as pip itself does.
    command = [sys.executable, "-m", "pip", "config", "list"]
    for line in subprocess.run(command, capture_output=True, text=True).stdout.splitlines():
        key, _, value = line.partition("=")
        if key == "global.index-url":
            return str(ast.literal_eval(value))
    try:
        from pip._internal.models.index import PyPI
    except ImportError:
        raise InputError(f"{origin}: no pip here to ask for the index; set PIP_INDEX_URL") from None
    return PyPI.simple_url


def _get(origin: str, url: str, *, stream: bool) -> requests.Response:
    # Messages hold no URL: that of an index may hold a password.
    headers: dict[str, Any] = {} if stream else {"Accept": SIMPLE_JSON}
    try:
        response = requests.get(url, headers=headers, timeout=TIMEOUT, stream=stream)
    except requests.RequestException as error:
        reason = type(error).__name__
        raise SourceUnavailable(f"{origin}: cannot reach the package index: {reason}") from None
    if response.status_code != 200:
        status = f"{response.status_code} {response.reason}"
        raise SourceUnavailable(f"{origin}: the package index answered {status}")
    return response


def _download(origin: str, url: str, sha256: str, name: str) -> Path:
    home = paths.CACHE / sha256
    home.mkdir(parents=True, exist_ok=True)
    part = home / f"{name}.part"
    digest = hashlib.sha256()
    with FileLock(home / "download.lock"):
        cached = _cached(sha256)  # another process had the lock before us
        if cached is not None:
            return cached
        response = _get(origin, url, stream=True)
        total = int(response.headers.get("Content-Length", 0)) or None
        try:
            with part.open("wb") as file, progress(f"download {name}", total) as advance:
                for block in response.iter_content(2**18):
                    digest.update(block)
                    file.write(block)
                    advance(len(block))
        except requests.RequestException as error:
            reason = type(error).__name__
            raise SourceUnavailable(f"{origin}: download of {name} broke: {reason}") from None
        if digest.hexdigest() != sha256:
            raise SourceUnavailable(f"{origin}: {name} arrived with another sha256")
        return part.replace(home / name)
