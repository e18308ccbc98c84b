"""The report over all arms: figures and one HTML page that can be mailed.

reports/summary.json holds repeatable numbers only, so DVC tracks it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from algorithms.common.files import write_json
from tasks import arms, plots, report_page
from tasks.staging import staged

VERSION = "1"


def report(folders: Mapping[str, Path], out: Path) -> dict[str, dict[str, float]]:
    """Write PNGs, index.html and summary.json to `out`, in one move; returns what summary.json
    holds.

    loss_device_hours.png is left out when no arm has times to compare. Raises like `arms.read`.
    """
    trained = arms.read(folders)
    pictures = plots.draw(trained)
    summary = {arm.name: arm.quality for arm in trained}
    with staged(out) as folder:
        for name, picture in pictures.items():
            (folder / f"{name}.png").write_bytes(picture.light)
        (folder / "index.html").write_text(report_page.page(trained, pictures), "utf-8")
        write_json(folder / "summary.json", summary)
    return summary
