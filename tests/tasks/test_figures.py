import json
import math
import re
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest

from algorithms.common.errors import InputError
from tasks import figures, plots

NASTY = "<script>alert(1)</script> | $x^2$ & 'co' \u00e9"


def make_arm(
    root: Path, arm: str, loss: float, *, stage: str = "pretrain_lordo", **timing: Any
) -> dict[str, Path]:
    """What `tasks/train.py` publishes of an arm that ended at `loss` after 300 steps."""
    folder = root / stage / f"arm-{zlib.crc32(arm.encode())}"
    folder.mkdir(parents=True)
    rows: list[dict[str, float]] = []
    for step in range(10, 301, 10):
        value = loss + 4 * math.exp(-step / 60)
        sent = {"comm/payload_bytes": 4_000_000 * step, "comm/wire_bytes": 4_000_000 * step}
        rows.append({"step": step, "tokens": 2048 * step, "train/loss": value - 0.05, **sent})
        if step % 50 == 0:
            rows[-1]["val/loss"] = value
    quality = {
        "val_loss": loss,
        "val_perplexity": math.exp(loss),
        "val_bits_per_byte": loss / 2,
        "train_loss": loss - 0.05,
        "tokens": 614_400,
        "steps": 300,
        "parameters": 1_053_824,
        "payload_bytes": 1_200_000_000,
        "wire_bytes": 1_200_000_000,
    }
    clock = [
        {"step": r["step"], "elapsed": r["step"] / 5, "device_hours": r["step"] / 9000}
        for r in rows
    ]
    times = {
        "seconds": 60.0,
        "device_hours": 0.0313,
        "gpu_hours": 0.0,
        "tokens_per_s": 6834.0,
        "peak_bytes": 412_000_000,
        "optimizer_bytes": 8_430_592,
        "oversubscribed": False,
        "rows": clock,
    }
    (folder / "quality.json").write_text(json.dumps(quality))
    (folder / "curve.json").write_text(json.dumps({"rows": rows}))
    (folder / "timing.json").write_text(json.dumps(times | timing))
    return {f"{stage}/{arm}": folder}


def size_of(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", png[16:24])


def test_a_report_of_two_arms(tmp_path: Path) -> None:
    folders = make_arm(tmp_path, "worse", 3.2) | make_arm(tmp_path, "better", 3.1)
    out = tmp_path / "reports"
    summary = figures.report(folders, out)
    names = ["loss_bytes.png", "loss_device_hours.png", "loss_tokens.png"]
    assert sorted(p.name for p in out.iterdir()) == ["index.html", *names, "summary.json"]
    for name in names:
        assert size_of((out / name).read_bytes()) == (1152, 688)
    assert summary == json.loads((out / "summary.json").read_text())
    assert list(summary) == ["pretrain_lordo/better", "pretrain_lordo/worse"]
    assert summary["pretrain_lordo/worse"]["val_loss"] == 3.2
    page = (out / "index.html").read_text("utf-8")
    assert page.index(">better<") < page.index(">worse<")
    assert page.count("data:image/png;base64,") == 6, "each figure for light and for dark"


def test_the_page_needs_nothing_and_trusts_no_name(tmp_path: Path) -> None:
    figures.report(make_arm(tmp_path, NASTY, 3.1), tmp_path / "reports")
    page = (tmp_path / "reports" / "index.html").read_text("utf-8")
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt; | $x^2$ &amp;" in page
    loaded = re.findall(r'(?:src|srcset|href)="([^"]{0,40})', page)
    assert loaded and all(address.startswith("data:") for address in loaded)
    assert not re.search(r"url\(|@import|https?:", page)
    assert 'name="viewport"' in page and "prefers-color-scheme: dark" in page


def test_what_dvc_tracks_does_not_depend_on_times(tmp_path: Path) -> None:
    folders = make_arm(tmp_path, "ddp", 3.1)
    figures.report(folders, tmp_path / "one")
    (folder,) = folders.values()
    (folder / "timing.json").unlink()
    figures.report(folders, tmp_path / "two")
    one, two = (tmp_path / name / "summary.json" for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()


def test_oversubscribed_arms_are_out_of_the_time_figure_and_marked(tmp_path: Path) -> None:
    fair = make_arm(tmp_path, "fair", 3.1)
    both = fair | make_arm(tmp_path, "crowded", 3.2, oversubscribed=True)
    arms = figures.read(both)
    pictures = plots.draw(arms, figures.labels(arms))
    alone = plots.draw(arms[:1], ["fair"])
    assert pictures["loss_device_hours"] == alone["loss_device_hours"]
    assert pictures["loss_tokens"] != alone["loss_tokens"]
    rows = figures.table(arms)
    assert [row["note"] for row in rows][0] == ""
    assert "more ranks than cores" in rows[1]["note"]
    figures.report(both, tmp_path / "reports")
    page = (tmp_path / "reports" / "index.html").read_text("utf-8")
    assert "Without crowded" in page
    assert "more ranks than cores" in page
    assert page.count('<td class="mute">') == 2


def test_without_times_the_page_says_so_and_an_old_picture_goes(tmp_path: Path) -> None:
    folders = make_arm(tmp_path, "ddp", 3.1)
    out = tmp_path / "reports"
    figures.report(folders, out)
    (next(iter(folders.values())) / "timing.json").unlink()
    (out / ".new").mkdir()  # as a killed run leaves it
    (out / ".new" / "half.png").touch()
    figures.report(folders, out)
    assert sorted(p.name for p in out.iterdir()) == [
        "index.html",
        "loss_bytes.png",
        "loss_tokens.png",
        "summary.json",
    ]
    page = (out / "index.html").read_text("utf-8")
    assert "No arm has device-hours" in page
    assert "timing.json is not versioned" in page
    assert figures.table(figures.read(folders))[0]["device-hours"] == "-"


def test_one_rank_sends_nothing(tmp_path: Path) -> None:
    folders = make_arm(tmp_path, "ddp", 3.1)
    curve = next(iter(folders.values())) / "curve.json"
    rows = json.loads(curve.read_text())["rows"]
    silent = [row | {"comm/payload_bytes": 0, "comm/wire_bytes": 0} for row in rows]
    curve.write_text(json.dumps({"rows": silent}))
    figures.report(folders, tmp_path / "reports")
    assert not (tmp_path / "reports" / "loss_bytes.png").exists()
    page = (tmp_path / "reports" / "index.html").read_text("utf-8")
    assert "No arm has bytes on the wire" in page


def test_an_arm_with_a_single_evaluation_is_drawn(tmp_path: Path) -> None:
    folders = make_arm(tmp_path, "ddp", 3.1)
    curve = next(iter(folders.values())) / "curve.json"
    curve.write_text(json.dumps({"rows": json.loads(curve.read_text())["rows"][4:5]}))
    figures.report(folders, tmp_path / "reports")
    assert (tmp_path / "reports" / "loss_tokens.png").exists()


def test_the_table_has_units_and_markdown_escapes_names(tmp_path: Path) -> None:
    arms = figures.read(make_arm(tmp_path, NASTY, 3.1))
    assert figures.table(arms) == [
        {
            "arm": NASTY,
            "loss": "3.1000",
            "perplexity": "22.20",
            "bits/byte": "1.5500",
            "device-hours": "0.031 h",
            "payload": "1.20 GB",
            "wire": "1.20 GB",
            "tokens/s": "6.83 k",
            "peak memory": "412 MB",
            "optimizer": "8.43 MB",
            "parameters": "1.05 M",
        }
    ]
    lines = figures.markdown(arms).splitlines()
    assert "**3.1000**" in lines[0] and "614 k tokens" in lines[0]
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines[2:]}) == 1
    assert "\\<script\\>" in lines[-1]


def test_arms_of_two_stages_are_told_apart(tmp_path: Path) -> None:
    folders = make_arm(tmp_path, "a", 3.1) | make_arm(tmp_path, "a", 3.0, stage="pretrain_async")
    names = [row["arm"] for row in figures.table(figures.read(folders))]
    assert names == ["pretrain_async/a", "pretrain_lordo/a"]


def test_missing_metrics_name_the_command_that_makes_them(tmp_path: Path) -> None:
    empty = tmp_path / "pretrain_lordo" / "ddp"
    empty.mkdir(parents=True)
    (empty / "timing.json").write_text("{}")  # DVC removes what it tracks before a run, not this
    with pytest.raises(InputError, match=r"\./run -m flows experiment"):
        figures.report({"pretrain_lordo/ddp": empty}, tmp_path / "reports")
    assert not (tmp_path / "reports").exists()
    folders = make_arm(tmp_path, "half", 3.1)
    (next(iter(folders.values())) / "curve.json").unlink()
    with pytest.raises(InputError, match=r"curve\.json: missing; run .* --arm half"):
        figures.report(folders, tmp_path / "reports")
