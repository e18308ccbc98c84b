"""What the ranks of a pipeline did when: a Gantt chart, a panel an arm and a row a rank."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from tasks.plots import DARK, LIGHT, Picture, Theme

Trace = Sequence[Sequence[tuple[str, int, float, float]]]
"""By rank what it did: kind, microbatch or update, start and end in seconds."""

KINDS = ("forward", "backward", "update", "wait")
ROW, HEAD, MARGIN = 0.24, 0.75, 0.6
"""Inches: of a rank, of a panel beside its ranks, of the figure beside its panels."""


def draw(traces: Mapping[str, Trace]) -> Picture:
    """Title of a panel -> what is drawn in it."""
    return Picture(_draw(traces, LIGHT), _draw(traces, DARK))


def _draw(traces: Mapping[str, Trace], theme: Theme) -> bytes:
    heights = [HEAD + ROW * len(trace) for trace in traces.values()]
    figure = Figure(
        figsize=(7.2, MARGIN + sum(heights)),
        dpi=160,
        facecolor=theme.background,
        layout="constrained",
    )
    panels = figure.subplots(len(traces), 1, squeeze=False, height_ratios=heights)
    colours = dict(zip(KINDS, (*theme.arms[:3], theme.grid), strict=True))
    for (title, trace), axes in zip(traces.items(), panels[:, 0], strict=True):
        _panel(axes, title, trace, colours, theme)
    handles = [Patch(color=colour, label=kind) for kind, colour in colours.items()]
    legend = figure.legend(
        handles=handles, loc="outside upper right", ncols=len(KINDS), frameon=False, fontsize=9
    )
    for text in legend.get_texts():
        text.set_color(theme.ink)
    png = io.BytesIO()
    figure.savefig(png, format="png", metadata={"Software": None})
    return png.getvalue()


def _panel(axes: Any, title: str, trace: Trace, colours: Mapping[str, str], theme: Theme) -> None:
    axes.set_facecolor(theme.background)
    axes.set_title(title, loc="left", fontsize=9.5, color=theme.ink, parse_math=False)
    for rank, events in enumerate(trace):
        for kind, colour in colours.items():
            spans = [(1e3 * start, 1e3 * (end - start)) for k, _, start, end in events if k == kind]
            axes.broken_barh(
                spans,
                (rank - 0.4, 0.8),
                facecolor=colour,
                edgecolor=theme.background,
                linewidth=0.4,
            )
    compute = [e for events in trace for e in events if e[0] != "wait"]
    axes.set_xlim(0.0, 1e3 * max(end for *_, end in compute))
    axes.set_ylim(len(trace) - 0.5, -0.5)
    axes.set_yticks(range(len(trace)), [f"rank {rank}" for rank in range(len(trace))])
    axes.set_xlabel("milliseconds", color=theme.ink, fontsize=8)
    axes.tick_params(colors=theme.ink, length=0, labelsize=8)
    for side in axes.spines.values():
        side.set_visible(False)
