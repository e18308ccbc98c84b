"""Makes small real packages: source archives, wheels, Debian packages."""

from __future__ import annotations

import hashlib
import io
import subprocess
import tarfile
import zipfile
from pathlib import Path

METADATA = "Metadata-Version: 2.1\nName: Tiny.Pkg\nVersion: 1.0\nLicense: BSD-3-Clause\n\nText\n"


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def source_archive(path: Path, files: dict[str, str | bytes], top: str = "tiny_pkg-1.0/") -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            data = content.encode() if isinstance(content, str) else content
            info = tarfile.TarInfo(top + name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def zip_archive(path: Path, files: dict[str, str | bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def debian_package(
    folder: Path, name: str, files: dict[str, bytes], scripts: dict[str, str] | None = None
) -> Path:
    root = folder / "root"
    control = f"Package: {name}\nVersion: 2:1.5-1\nArchitecture: all\nMaintainer: A <a@b.c>\n"
    (root / "DEBIAN").mkdir(parents=True)
    (root / "DEBIAN" / "control").write_text(f"{control}Description: tiny\n")
    for script, text in (scripts or {}).items():
        (root / "DEBIAN" / script).write_text(text)
        (root / "DEBIAN" / script).chmod(0o755)
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)
    (root / "usr" / "link.txt").symlink_to("/etc/passwd")
    out = folder / f"{name}_1.5-1_all.deb"
    command = ["dpkg-deb", "--root-owner-group", "-b", str(root), str(out)]
    subprocess.run(command, check=True, capture_output=True)
    return out
