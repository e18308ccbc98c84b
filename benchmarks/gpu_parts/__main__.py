"""One part of `benchmarks/gpu.py`: PART SECONDS [--dry-run]."""

from __future__ import annotations

import sys
from collections.abc import Callable

from benchmarks.gpu_parts.part import Part


def run(name: str, seconds: float, dry: bool) -> int:
    """0 when all of the part went well or had no room, 1 when something failed."""
    part = Part(seconds, dry)
    if not dry:
        part.describe()
    _measure(name)(part)
    if part.failed:
        part.say(f"failed: {', '.join(part.failed)}")
    return 1 if part.failed else 0


def _measure(name: str) -> Callable[[Part], None]:
    """The function of a part; a part imports no more than it needs."""
    if name.startswith("replay"):
        from benchmarks.gpu_parts.replay import replay

        thousands = int(name.removeprefix("replay_").removesuffix("k"))
        return lambda part: replay(part, name, 1024 * thousands)
    from benchmarks.gpu_parts import attention

    return {"accuracy": attention.accuracy, "speed": attention.speed}[name]


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], float(sys.argv[2]), "--dry-run" in sys.argv))
