"""requirements.lock is what pyproject.toml asks for, ties nobody to an index, and is installed."""

import re
import subprocess
import sys
import tomllib
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tasks.paths import PROJECT

LOCK = (PROJECT / "requirements.lock").read_text()
LINES = [line for line in LOCK.splitlines() if line and not line.lstrip().startswith("#")]
PINS = {
    canonicalize_name(name): Version(version)
    for name, version in (re.split("==", line, maxsplit=1) for line in LINES)
}


UNLOCKED = {"gym"}
"""Extras that not every machine can install; their tests install them into a place of their own."""


def declared():
    """Requirements of pyproject.toml, those of locked extras included."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    locked = [extras[name] for name in extras if name not in UNLOCKED]
    return [Requirement(text) for text in sum(locked, project["dependencies"])]


def test_every_declared_dependency_is_pinned_to_a_version_that_it_allows():
    assert len(declared()) > 25
    for requirement in declared():
        pin = PINS[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pin, prereleases=True), f"{requirement}: {pin}"


def test_the_lock_holds_names_and_versions_and_nothing_else():
    assert LOCK.isascii()
    for line in LINES:
        assert re.fullmatch(r"[a-z0-9][a-z0-9._-]*==[0-9][0-9a-z.]*", line), line
    assert "://" not in LOCK and "--" not in re.sub(r"(?m)^#.*", "", LOCK)
    assert str(PINS["torch"]) == "2.13.0"
    assert len(PINS) == len(LINES), "a name is pinned twice"


def test_what_is_installed_is_what_is_locked():
    """A build of torch for CPUs or for a CUDA calls itself 2.13.0+cpu: the same release."""
    other = {
        name: f"{found} is installed, {pin} is locked"
        for name, pin in PINS.items()
        if (found := Version(metadata.version(name))).public != pin.public
    }
    assert other == {}


@pytest.mark.slow
@pytest.mark.parametrize("python", ["3.12", "3.13"])
def test_the_lock_resolves_for_other_pythons(python):
    """Metadata only: nothing is installed. Takes seconds and a few MB."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "requirements.lock"]
    done = subprocess.run(
        [*command, "--python-version", python, "--python-platform", "linux", "--no-header"],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    resolved = dict(re.findall(r"^([a-z0-9][a-z0-9._-]*)==(\S+)$", done.stdout, re.MULTILINE))
    assert resolved["torch"] == "2.13.0"
    for requirement in declared():
        name = canonicalize_name(requirement.name)
        assert Version(resolved[name]) == PINS[name]
