"""python -m benchmarks: every benchmark's --quick form, each in a process of its own."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import Parser

PACKAGE = Path(__file__).resolve().parent


def names() -> list[str]:
    """Modules of this package that define `main`; read, not imported, for imports take seconds."""
    files = sorted(file for file in PACKAGE.glob("*.py") if not file.stem.startswith("_"))
    return [file.stem for file in files if _defines_main(file)]


def _defines_main(file: Path) -> bool:
    body = ast.parse(file.read_text(encoding="utf-8"), file.name).body
    return any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in body)


def main(argv: Sequence[str]) -> int:
    """0 when all went well, 1 when some failed, which it names."""
    Parser(prog="python -m benchmarks", description=__doc__).parse_args(argv)
    failed = []
    for name in names():
        begun = time.perf_counter()
        command = [sys.executable, "-m", f"benchmarks.{name}", "--quick"]
        code = subprocess.run(command, cwd=PACKAGE.parent).returncode
        if code != 0:
            failed.append(name)
        outcome = "ok" if code == 0 else f"FAILED, exit code {code}"
        print(f"{name}: {time.perf_counter() - begun:.1f} s, {outcome}", flush=True)
    if failed:
        print(f"python -m benchmarks: failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
