"""What is known of the arms that have been trained, and the table of them.

It is what `tasks/train.py` publishes in metrics/<stage>/<arm>/: quality.json and curve.json, which
repeat exactly, and timing.json, which does not and is missing where metrics came from a DVC remote.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from algorithms.common.errors import InputError
from algorithms.common.files import read_json
from tasks import measures
from tasks.measures import Measure
from tasks.units import hours, prefixed, significant, size

UNKNOWN = "-"
"""In tables, for what was not measured."""


@dataclass(frozen=True)
class ArmRecord:
    """Everything known of one finished arm."""

    stage: str
    arm: str
    quality: dict[str, Any]
    curve: list[dict[str, float]]
    """Rows of curve.json, by step."""
    timing: dict[str, Any] | None
    """timing.json, None where it is missing."""
    completions: list[dict[str, Any]]
    """Rows of completions.json; none of an arm that answers nothing."""

    @property
    def name(self) -> str:
        return f"{self.stage}/{self.arm}"

    @property
    def measure(self) -> Measure:
        """What it is judged by."""
        return measures.of(self.quality)

    @property
    def oversubscribed(self) -> bool:
        return bool(self.timing and self.timing.get("oversubscribed"))

    @property
    def pipeline(self) -> bool:
        """Whether it was trained through one."""
        return "staleness" in self.quality

    @property
    def simulated(self) -> bool:
        return bool(self.timing and self.timing.get("simulated"))

    @property
    def note(self) -> str:
        """Why its times are not compared; empty when they are."""
        if self.timing is None:
            return "no times: trained elsewhere, timing.json is not versioned"
        if self.simulated:
            return "times modelled: its stages were simulated in one process, one after the other"
        if self.oversubscribed:
            return "times not compared: more ranks than cores or devices (oversubscribed)"
        return ""

    def points(self, x: str, y: str) -> list[tuple[float, float]]:
        """(x, y) of the rows that have both, keys of curve.json or of timing.json's rows."""
        times = {row["step"]: row for row in (self.timing or {}).get("rows", [])}
        rows = [{**times.get(row["step"], {}), **row} for row in self.curve]
        return [(row[x], row[y]) for row in rows if x in row and y in row]


def read(folders: Mapping[str, Path]) -> list[ArmRecord]:
    """Records of the arms "stage/arm" -> folder that have been trained: stages in the given order,
    of each the best first.

    Raises `InputError` when there is none, or when a trained one lacks its curve.
    """
    arms = [_read(name, path) for name, path in folders.items() if (path / "quality.json").exists()]
    if not arms:
        raise InputError("metrics/: no arm has been trained; run ./run -m flows experiment")

    stages = list(dict.fromkeys(arm.stage for arm in arms))

    def order(arm: ArmRecord) -> tuple[int, float, str]:
        value = arm.quality[arm.measure.key]
        return (stages.index(arm.stage), arm.measure.rank(value), arm.name)

    return sorted(arms, key=order)


def _read(name: str, folder: Path) -> ArmRecord:
    stage, _, arm = name.partition("/")
    if not (folder / "curve.json").exists():
        flow = "post_train" if stage == "post_train" else "pretrain"
        raise InputError(f"{folder / 'curve.json'}: missing; run ./run -m flows {flow} --arm {arm}")
    timing, completions = folder / "timing.json", folder / "completions.json"
    return ArmRecord(
        stage=stage,
        arm=arm,
        quality=read_json(folder / "quality.json"),
        curve=read_json(folder / "curve.json")["rows"],
        timing=read_json(timing) if timing.exists() else None,
        completions=read_json(completions)["rows"] if completions.exists() else [],
    )


def by_stage(arms: Sequence[ArmRecord]) -> dict[str, list[ArmRecord]]:
    """Stages train different models on different batches: what may be compared is one of these."""
    return {
        stage: [arm for arm in arms if arm.stage == stage]
        for stage in dict.fromkeys(arm.stage for arm in arms)
    }


def labels(arms: Sequence[ArmRecord]) -> list[str]:
    """Name of each arm, without the stage where all arms are of one."""
    one_stage = len({arm.stage for arm in arms}) == 1
    return [arm.arm if one_stage else arm.name for arm in arms]


def table(arms: Sequence[ArmRecord]) -> list[dict[str, str]]:
    """One row an arm, in the given order, cells ready to print; every row has the same keys."""
    rows = []
    pipelines = any(arm.pipeline for arm in arms)
    simulations = any(arm.simulated for arm in arms)
    for label, arm in zip(labels(arms), arms, strict=True):
        quality, timing = arm.quality, arm.timing or {}
        row = {"arm": label, **_results(arm)}
        if pipelines:
            row["stages"] = _cell(str, quality, "stages")
            row["staleness"] = _cell("{:.2f}".format, quality, "staleness")
            row["utilisation"] = _cell("{:.1%}".format, timing, "utilisation")
        row["device-hours"] = _cell(hours, timing, "device_hours")
        if simulations:
            row["modelled utilisation"] = _cell("{:.1%}".format, timing, "modelled_utilisation")
            row["modelled device-hours"] = _cell(hours, timing, "modelled_device_hours")
        sent = {} if arm.simulated else quality
        row |= {
            "payload": _cell(size, sent, "payload_bytes"),
            "wire": _cell(size, sent, "wire_bytes"),
            "tokens/s": _cell(prefixed, timing, "tokens_per_s"),
            "peak memory": _cell(size, {} if arm.simulated else timing, "peak_bytes"),
            "optimizer": _cell(size, timing, "optimizer_bytes"),
            "parameters": prefixed(quality["parameters"]),
        }
        if any(other.note for other in arms):
            row["note"] = arm.note
        rows.append(row)
    return rows


def _results(arm: ArmRecord) -> dict[str, str]:
    """The columns that say how good an arm is."""
    quality = arm.quality
    if arm.measure is measures.REWARD:
        return {
            "reward": f"{quality['reward_heldout']:.4f}",
            "greedy": f"{quality['reward_greedy']:.4f}",
            "at start": f"{quality['reward_start']:.4f}",
            "mode": quality["mode"],
            "objective": quality["objective"],
            "updates": f"{quality['steps']}",
            "tokens": prefixed(quality["tokens"]),
        }
    return {
        "loss": f"{quality['val_loss']:.4f}",
        "perplexity": significant(quality["val_perplexity"], 4),
        "bits/byte": f"{quality['val_bits_per_byte']:.4f}",
    }


def _cell(show: Any, values: Mapping[str, Any], key: str) -> str:
    return str(show(values[key])) if key in values else UNKNOWN


def markdown(arms: Sequence[ArmRecord]) -> str:
    """The tables of all stages and their best arms, for the Prefect page."""
    stages = by_stage(arms)
    if len(stages) > 1:
        parts = [f"## {_plain(stage)}\n\n{markdown(own)}" for stage, own in stages.items()]
        return "\n".join(parts)
    rows = table(arms)
    grid = [list(rows[0]), ["---"] * len(rows[0]), *(map(_plain, row.values()) for row in rows)]
    lines = "".join(f"| {' | '.join(cells)} |\n" for cells in grid)
    measure, best = arms[0].measure, rows[0]
    tokens = prefixed(arms[0].quality["tokens"])
    if measure is measures.REWARD:
        more = f"from {best['at start']}, after {tokens} tokens"
    else:
        more = f"{best['bits/byte']} bits per byte after {tokens} tokens"
    return (
        f"{measure.best.capitalize()} held-out {measure.word}: **{best[measure.word]}** "
        f"({_plain(best['arm'])}, {more}).\n\n{lines}"
    )


def _plain(text: str) -> str:
    """`text` without meaning to Markdown: names of arms are the user's."""
    return re.sub(r"([\\`*_|<>\[\]$])", r"\\\1", text)
