"""Held-out accuracy against updates and against seconds: a line an arm, its seeds as a band."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from benchmarks.study.figures import Seed
from tasks.plots import LIGHT

DRAWN = ("exact", "response_only", "truncated", "naive")


def draw(seeds: Sequence[Seed]) -> Figure:
    """Of the rows in `DRAWN` that were run."""
    figure = Figure(figsize=(9, 3.8), dpi=160, facecolor=LIGHT.background, layout="constrained")
    for place, (column, unit) in enumerate(((0, "updates"), (1, "seconds of one core"))):
        axes = figure.add_subplot(1, 2, place + 1, facecolor=LIGHT.background)
        for row, colour in zip(DRAWN, LIGHT.arms, strict=False):
            curves = [np.array(seed[row]["curve"]) for seed in seeds if row in seed]
            if not curves:
                continue
            x = np.mean([curve[:, column] for curve in curves], axis=0)
            y = np.array([curve[:, 2] for curve in curves])
            axes.plot(x, y.mean(0), color=colour, linewidth=1.8, label=row)
            axes.fill_between(x, y.min(0), y.max(0), color=colour, alpha=0.15, linewidth=0)
        axes.set_xlabel(unit, color=LIGHT.ink)
        axes.set_ylim(0, 1)
        axes.set_xlim(left=0)
        axes.grid(color=LIGHT.grid, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(colors=LIGHT.ink, length=0, labelsize=9)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
    first = figure.axes[0]
    first.set_ylabel("right answers to unseen prompts, sampled", color=LIGHT.ink)
    first.legend(frameon=False, labelcolor=LIGHT.ink, fontsize=9, loc="lower right")
    return figure
