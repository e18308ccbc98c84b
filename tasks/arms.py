"""What is known of the arms that have been trained, and the table of them.

It is what `tasks/train.py` publishes in metrics/<stage>/<arm>/: quality.json and curve.json, which
repeat exactly, and timing.json, which does not and is missing where metrics came from a DVC remote.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from algorithms.common.errors import InputError
from algorithms.common.files import read_json
from tasks.units import hours, prefixed, significant, size

UNKNOWN = "-"
"""In tables, for what was not measured."""


@dataclass(frozen=True)
class ArmRecord:
    """Everything known of one finished arm."""

    stage: str
    arm: str
    quality: dict[str, float]
    curve: list[dict[str, float]]
    """Rows of curve.json, by step."""
    timing: dict[str, Any] | None
    """timing.json, None where it is missing."""

    @property
    def name(self) -> str:
        return f"{self.stage}/{self.arm}"

    @property
    def oversubscribed(self) -> bool:
        return bool(self.timing and self.timing.get("oversubscribed"))

    @property
    def note(self) -> str:
        """Why its times are not compared; empty when they are."""
        if self.timing is None:
            return "no times: trained elsewhere, timing.json is not versioned"
        if self.oversubscribed:
            return "times not compared: more ranks than cores or devices (oversubscribed)"
        return ""

    def points(self, x: str, y: str) -> list[tuple[float, float]]:
        """(x, y) of the rows that have both, keys of curve.json or of timing.json's rows."""
        times = {row["step"]: row for row in (self.timing or {}).get("rows", [])}
        rows = [{**times.get(row["step"], {}), **row} for row in self.curve]
        return [(row[x], row[y]) for row in rows if x in row and y in row]


def read(folders: Mapping[str, Path]) -> list[ArmRecord]:
    """Records of the arms "stage/arm" -> folder that have been trained, lowest held-out loss first.

    Raises `InputError` when there is none, or when a trained one lacks its curve.
    """
    arms = [_read(name, path) for name, path in folders.items() if (path / "quality.json").exists()]
    if not arms:
        raise InputError("metrics/: no arm has been trained; run ./run -m flows experiment")

    def order(arm: ArmRecord) -> tuple[float, str]:
        loss = arm.quality["val_loss"]
        return (math.inf if math.isnan(loss) else loss, arm.name)

    return sorted(arms, key=order)


def _read(name: str, folder: Path) -> ArmRecord:
    stage, _, arm = name.partition("/")
    if not (folder / "curve.json").exists():
        raise InputError(
            f"{folder / 'curve.json'}: missing; run ./run -m flows pretrain --arm {arm}"
        )
    timing = folder / "timing.json"
    return ArmRecord(
        stage=stage,
        arm=arm,
        quality=read_json(folder / "quality.json"),
        curve=read_json(folder / "curve.json")["rows"],
        timing=read_json(timing) if timing.exists() else None,
    )


def labels(arms: Sequence[ArmRecord]) -> list[str]:
    """Name of each arm, without the stage where all arms are of one."""
    one_stage = len({arm.stage for arm in arms}) == 1
    return [arm.arm if one_stage else arm.name for arm in arms]


def table(arms: Sequence[ArmRecord]) -> list[dict[str, str]]:
    """One row an arm, in the given order, cells ready to print; every row has the same keys."""
    rows = []
    for label, arm in zip(labels(arms), arms, strict=True):
        quality, timing = arm.quality, arm.timing or {}
        row = {
            "arm": label,
            "loss": f"{quality['val_loss']:.4f}",
            "perplexity": significant(quality["val_perplexity"], 4),
            "bits/byte": f"{quality['val_bits_per_byte']:.4f}",
            "device-hours": _cell(hours, timing, "device_hours"),
            "payload": size(quality["payload_bytes"]),
            "wire": size(quality["wire_bytes"]),
            "tokens/s": _cell(prefixed, timing, "tokens_per_s"),
            "peak memory": _cell(size, timing, "peak_bytes"),
            "optimizer": _cell(size, timing, "optimizer_bytes"),
            "parameters": prefixed(quality["parameters"]),
        }
        if any(other.note for other in arms):
            row["note"] = arm.note
        rows.append(row)
    return rows


def _cell(show: Any, values: Mapping[str, Any], key: str) -> str:
    return str(show(values[key])) if key in values else UNKNOWN


def markdown(arms: Sequence[ArmRecord]) -> str:
    """The table and its best arm, for the Prefect page."""
    rows = table(arms)
    grid = [list(rows[0]), ["---"] * len(rows[0]), *(map(_plain, row.values()) for row in rows)]
    lines = "".join(f"| {' | '.join(cells)} |\n" for cells in grid)
    tokens = prefixed(arms[0].quality["tokens"])
    return (
        f"Lowest held-out loss: **{rows[0]['loss']}** ({_plain(rows[0]['arm'])}, "
        f"{rows[0]['bits/byte']} bits per byte after {tokens} tokens).\n\n{lines}"
    )


def _plain(text: str) -> str:
    """`text` without meaning to Markdown: names of arms are the user's."""
    return re.sub(r"([\\`*_|<>\[\]$])", r"\\\1", text)
