"""Numbers as people read them: 1.2 MB, 0.031 h, 1.02 M."""

from __future__ import annotations

import math

PREFIXES = ("", "k", "M", "G", "T", "P", "E")


def significant(value: float, digits: int = 3) -> str:
    """`value` in plain decimals with that many significant digits: 0.0314, 31.4, 3,140."""
    if not math.isfinite(value):
        return str(value)
    rounded = f"{value:.{digits - 1}e}"  # 9.997 has one digit before the point, 10.0 two
    places = digits - 1 - int(rounded.partition("e")[2])
    return f"{float(rounded):,.{max(0, places)}f}"


def prefixed(value: float, unit: str = "") -> str:
    """`value` with a decimal prefix: 1.23 MB, 4.56 k, 789 B."""
    power = 0
    while abs(value) >= 999.5 and power < len(PREFIXES) - 1:
        value, power = value / 1000, power + 1
    whole = power == 0 and value == int(value)
    number = str(int(value)) if whole else significant(value)
    return f"{number} {PREFIXES[power]}{unit}".rstrip()


def size(count: float) -> str:
    """A number of bytes."""
    return prefixed(count, "B")


def hours(value: float) -> str:
    return f"{significant(value, 3 if value >= 1 else 2)} h"
