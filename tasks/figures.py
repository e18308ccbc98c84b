"""The report over all arms: figures and one HTML page that can be mailed.

reports/summary.json holds repeatable numbers only, so DVC tracks it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from algorithms.common.files import write_json
from tasks import arms, gantt, plots, report_page
from tasks.staging import staged

VERSION = "1"


def report(folders: Mapping[str, Path], out: Path) -> dict[str, dict[str, float]]:
    """Write STAGE_FIGURE.png, index.html and summary.json to `out`, in one move; returns what
    summary.json holds.

    Figures without anything to draw are left out. Raises like `arms.read`.
    """
    trained = arms.read(folders)
    pictures = {stage: _draw(own) for stage, own in arms.by_stage(trained).items()}
    summary = {arm.name: arm.quality for arm in trained}
    with staged(out) as folder:
        for stage, drawn in pictures.items():
            for name, picture in drawn.items():
                (folder / f"{stage}_{name}.png").write_bytes(picture.light)
        (folder / "index.html").write_text(report_page.page(trained, pictures), "utf-8")
        write_json(folder / "summary.json", summary)
    return summary


def _draw(own: Sequence[arms.ArmRecord]) -> dict[str, plots.Picture]:
    """Figures of one stage; of pipelines, what their stages did."""
    pictures = plots.draw(own)
    traces = {_title(arm): arm.timing["trace"] for arm in own if arm.timing and arm.pipeline}
    return pictures | ({"schedule": gantt.draw(traces)} if traces else {})


def _title(arm: arms.ArmRecord) -> str:
    """Of an arm's panel in the picture of schedules."""
    assert arm.timing is not None
    known = "modelled_utilisation" if arm.simulated else "utilisation"
    how = ", modelled" if arm.simulated else ""
    return f"{arm.arm}: {arm.timing[known]:.0%} busy{how}"
