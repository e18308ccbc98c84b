"""A hash of the code behind a module: a result that was kept is used again only if it still holds.

Covers the module and all of the project that it imports, directly or not. Comments, docstrings and
layout do not count. Not covered: other packages but for torch's version.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FLOORS = ("algorithms", "benchmarks", "kernels", "tasks")


def code_hash(module: str) -> str:
    """Hex digits for a module by its dotted name."""
    digest = hashlib.sha256(version("torch").encode())
    for name in sorted(closure(module)):
        digest.update(f"{name}\n{ast.dump(_stripped(_file(name)))}\n".encode())
    return digest.hexdigest()


def closure(module: str) -> set[str]:
    """The module, and all of the project that it needs, packages included."""
    found: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            parent = name.rpartition(".")[0]
            waiting += [parent] if parent and _file(parent).is_file() else []
            waiting += _imported(_stripped(_file(name)))
    return found


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        yield from (n for n in names if n.split(".")[0] in FLOORS and _file(n).is_file())


def _file(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _stripped(file: Path) -> ast.AST:
    """The tree without docstrings and other strings that stand alone."""
    tree = ast.parse(file.read_text(encoding="utf-8"), file.name)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [line for line in body if not _is_text(line)]  # type: ignore[attr-defined]
    return tree


def _is_text(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
