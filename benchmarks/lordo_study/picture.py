"""Perplexity against bytes: one point an arm, from the figures of a full run.

    python -m benchmarks.lordo_study.picture benchmarks/results/lordo.json docs/lordo.png

Horizontal: payload bytes per step and worker. The area of a point is its optimizer state.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, NullFormatter, StrMethodFormatter

from algorithms.common.files import read_json
from tasks.plots import LIGHT

SYNCHRONOUS = ("ddp", "lowrank_ddp", "lowrank_ddp_ef", "muon_ddp")
AREA = 4000
"""Of a point, in bytes of state per square point."""


def main(argv: Sequence[str]) -> int:
    """Read the figures, write the picture."""
    source, target = argv
    draw(read_json(Path(source))).savefig(target, metadata={"Software": None})
    return 0


def draw(figures: Mapping[str, float | None]) -> Figure:
    """All arms that were run."""
    known = {name: value for name, value in figures.items() if value is not None}
    ending = ".perplexity_mean"
    arms = [name.removesuffix(ending) for name in known if name.endswith(ending)]
    figure = Figure(figsize=(7.2, 4.6), dpi=160, facecolor=LIGHT.background, layout="constrained")
    axes = figure.add_subplot(facecolor=LIGHT.background)
    labelled: list[tuple[float, float]] = []
    for arm in sorted(arms, key=lambda each: -known[f"{each}{ending}"]):
        at = (known[f"{arm}.payload_bytes_per_step"], known[f"{arm}{ending}"])
        beside = sum(max(at[0] / x, x / at[0]) < 1.3 and y / at[1] < 1.02 for x, y in labelled)
        labelled.append(at)
        area = known[f"{arm}.state_bytes"] / AREA
        colour = LIGHT.arms[0 if arm in SYNCHRONOUS else 1]
        axes.scatter(*at, s=area, color=colour, alpha=0.75, linewidths=0)
        axes.annotate(arm, at, xytext=(7, 4 - 9 * beside), textcoords="offset points", fontsize=7.5)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(EngFormatter(unit="B"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    for formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        formatter(StrMethodFormatter("{x:g}"))
    axes.margins(x=0.2)
    axes.set_xlabel("payload bytes per step and worker", color=LIGHT.ink)
    axes.set_ylabel("test perplexity per byte of text", color=LIGHT.ink)
    axes.grid(color=LIGHT.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=LIGHT.ink, length=0, labelsize=9)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    return figure


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
