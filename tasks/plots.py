"""Loss or reward against what it costs: one curve an arm of a stage, as PNGs for light and dark
pages.

Colours are those of Okabe and Ito, told apart with any colour vision; markers differ as well, and
from the ninth arm on lines are dashed and markers hollow. The held-out value is the thick line with
markers, that of training the thin one behind it; that is left out where many arms would hide each
other.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator, NullFormatter, StrMethodFormatter

from tasks.arms import ArmRecord, labels
from tasks.measures import LOSS, REWARD, Measure

MARKERS = "osD^vPXp"
LABEL_LETTERS = 26
"""Longer names of arms are cut in figures; the table has them whole."""

FEW = 4
"""With more arms, only held-out values are drawn."""

GAP = 0.055
"""Least distance of two names at the right edge, in heights of the axes."""


@dataclass(frozen=True)
class Theme:
    """Colours of one page background."""

    background: str
    ink: str
    grid: str
    arms: tuple[str, ...]


LIGHT = Theme(
    background="#ffffff",
    ink="#333d47",
    grid="#e4e8ec",
    arms=("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8c7a00"),
)
DARK = Theme(
    background="#161b22",
    ink="#c9d1d9",
    grid="#2b323b",
    arms=("#4da6e0", "#ff8a3d", "#2cc79b", "#e39cc4", "#f5b92e", "#8fd0f7", "#f0f0f0", "#d6c84a"),
)


@dataclass(frozen=True)
class Chart:
    """One figure: what arms are judged by against column `x`."""

    name: str
    x: str
    label: str
    unit: str
    """Behind a decimal prefix."""
    caption: str
    timed: bool = False
    """Leaves out arms whose times must not be compared."""


HOURS = Chart(
    "loss_device_hours",
    "device_hours",
    "device-hours (ranks times wall time)",
    "",
    "What an hour of hardware buys.",
    timed=True,
)
FIGURES = (
    Chart(
        "loss_tokens",
        "tokens",
        "training tokens",
        "",
        "What a token buys: the same data in the same order for every arm.",
    ),
    HOURS,
    Chart(
        "loss_bytes",
        "comm/wire_bytes",
        "bytes on the wire, per rank",
        "B",
        "What a byte on the network buys.",
    ),
)
OF_PIPELINES = (
    Chart(
        "loss_updates",
        "step",
        "updates",
        "",
        "What an update buys: the same batches in the same order for every arm, gradients of "
        "different ages.",
    ),
    HOURS,
)


OF_REWARDS = (
    Chart(
        "reward_updates",
        "step",
        "updates",
        "",
        "What an update buys: the same prompts in the same order for every arm.",
    ),
    Chart(
        "reward_seconds",
        "elapsed",
        "seconds",
        "",
        "What a second buys, evaluations included.",
        timed=True,
    ),
    Chart(
        "reward_tokens",
        "tokens",
        "tokens of prompts and responses",
        "",
        "What a token buys: prompts once for all responses to them, and the responses.",
    ),
)


def charts(arms: Sequence[ArmRecord]) -> tuple[Chart, ...]:
    """The figures of a stage with these arms."""
    if arms[0].measure is REWARD:
        return OF_REWARDS
    return OF_PIPELINES if any(arm.pipeline for arm in arms) else FIGURES


@dataclass(frozen=True)
class Picture:
    """PNGs of one figure."""

    light: bytes
    dark: bytes


@dataclass(frozen=True)
class Curve:
    label: str
    train: list[tuple[float, float]]
    held_out: list[tuple[float, float]]
    style: int
    """Index of colour and marker, the same for an arm in all figures."""


def draw(arms: Sequence[ArmRecord]) -> dict[str, Picture]:
    """Name of figure -> picture, for those `charts` of one stage's arms that have a curve."""
    pictures = {}
    for chart in charts(arms):
        curves = []
        for style, (arm, label) in enumerate(zip(arms, labels(arms), strict=True)):
            train = arm.points(chart.x, arm.measure.train)
            held_out = arm.points(chart.x, arm.measure.held_out)
            positive = any(x > 0 for x, _ in held_out)  # one rank sends nothing
            if positive and not (chart.timed and arm.note):
                curves.append(Curve(label, train, held_out, style))
        if curves:
            light, dark = (_draw(chart, arms[0].measure, curves, theme) for theme in (LIGHT, DARK))
            pictures[chart.name] = Picture(light, dark)
    return pictures


def _draw(chart: Chart, measure: Measure, curves: Sequence[Curve], theme: Theme) -> bytes:
    figure = Figure(figsize=(7.2, 4.3), dpi=160, facecolor=theme.background, layout="constrained")
    axes = figure.add_subplot(facecolor=theme.background)
    ends = [curve.held_out[-1][0] for curve in curves]
    logarithmic = max(ends) > 3 * min(ends)
    few = len(curves) <= FEW
    for curve in curves:
        look = _look(curve, theme)
        train, held_out = (
            [(x, y) for x, y in points if x > 0 or not logarithmic]
            for points in (curve.train, curve.held_out)
        )
        if few:
            axes.plot(*zip(*train, strict=True), color=look["color"], linewidth=0.9, alpha=0.45)
        axes.plot(*zip(*held_out, strict=True), linewidth=2.2 if few else 1.6, **look)
    _scale(axes, chart, logarithmic)
    if measure is LOSS:
        _begin_at_the_first_evaluation(axes, curves)
    _decorate(axes, chart, measure, theme, few)
    _name_curves(axes, curves, theme)
    png = io.BytesIO()
    figure.savefig(png, format="png", metadata={"Software": None})
    return png.getvalue()


def _look(curve: Curve, theme: Theme) -> dict[str, Any]:
    """Colour, marker and dashes of an arm."""
    again, style = divmod(curve.style, len(theme.arms))
    colour = theme.arms[style]
    return {
        "color": colour,
        "linestyle": (0, (3, 1.2)) if again else "-",
        "marker": MARKERS[(style + again) % len(MARKERS)],
        "markersize": 5.5,
        "markerfacecolor": theme.background if again else colour,
        "markeredgecolor": colour if again else theme.background,
        "markeredgewidth": 1.2 if again else 0.8,
    }


def _scale(axes: Any, chart: Chart, logarithmic: bool) -> None:
    if logarithmic:
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(7))
    plain = StrMethodFormatter("{x:g}")  # a prefix before hours would read as minutes
    axes.xaxis.set_major_formatter(plain if chart.timed else EngFormatter(unit=chart.unit))


def _begin_at_the_first_evaluation(axes: Any, curves: Sequence[Curve]) -> None:
    """The fall from ln(vocabulary) would flatten all that matters."""
    seen = [y for curve in curves for _, y in curve.held_out]
    low = min(seen)
    if len(curves) <= FEW:
        low = min(low, *(y for curve in curves for _, y in curve.train))
    high = max(curve.held_out[0][1] for curve in curves)
    if all(len(curve.held_out) > 2 for curve in curves) and high > low:
        axes.set_ylim(low - 0.06 * (high - low), high + 0.06 * (high - low))


def _decorate(axes: Any, chart: Chart, measure: Measure, theme: Theme, few: bool) -> None:
    axes.set_xlabel(chart.label, color=theme.ink, labelpad=8)
    name = measure.axis if few else f"held-out {measure.word}"
    axes.set_ylabel(f"{name}{measure.unit}", color=theme.ink, labelpad=8)
    axes.grid(color=theme.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=theme.ink, length=0, labelsize=9)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(theme.ink)
    if not few:
        return
    handles = [
        axes.plot([], [], color=theme.ink, linewidth=2.2, marker="o", markersize=5.5)[0],
        axes.plot([], [], color=theme.ink, linewidth=0.9, alpha=0.6)[0],
    ]
    legend = axes.legend(handles, ["held out", "training"], frameon=False, fontsize=9)
    for text in legend.get_texts():
        text.set_color(theme.ink)


def _name_curves(axes: Any, curves: Sequence[Curve], theme: Theme) -> None:
    """Names at the right edge with their markers, in the order of the last losses: at the height
    where the curve ends, moved apart where they meet."""
    low, high = axes.get_ylim()
    ordered = sorted(curves, key=lambda curve: curve.held_out[-1][1])
    ends = [(curve.held_out[-1][1] - low) / (high - low) for curve in ordered]
    for curve, height in zip(ordered, spread(ends, GAP), strict=True):
        name, look = curve.label, _look(curve, theme)
        short = name if len(name) <= LABEL_LETTERS else f"{name[: LABEL_LETTERS - 2]}.."
        axes.annotate(
            short,
            (1.0, height),
            xycoords="axes fraction",
            xytext=(18, 0),
            textcoords="offset points",
            va="center",
            fontsize=9.5,
            fontweight="bold",
            color=look["color"],
            parse_math=False,
            annotation_clip=False,
        )
        axes.plot([1.025], [height], transform=axes.transAxes, clip_on=False, **look)


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Ascending `heights` moved as little as possible (least squares) to be `gap` apart in [0, 1].

    Neighbours that are too close form a block around the mean of where they want to be. Too many
    for [0, 1] leave it at the top.
    """
    blocks: list[tuple[float, int]] = []  # mean of height - number * gap, and how many
    for number, height in enumerate(heights):
        mean, count = height - number * gap, 1
        while blocks and blocks[-1][0] > mean:
            other, more = blocks.pop()
            mean, count = (mean * count + other * more) / (count + more), count + more
        blocks.append((mean, count))
    flat = [mean for mean, count in blocks for _ in range(count)]
    highest = max(0.0, 1 - (len(heights) - 1) * gap)
    return [min(max(mean, 0.0), highest) + number * gap for number, mean in enumerate(flat)]
