import json
import re
import struct
from pathlib import Path

import pytest

from algorithms.common.errors import InputError
from tasks import arms, figures, plots
from tests.tasks.trained import NASTY, make_arm, make_pipeline, make_rewarded


def size_of(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", png[16:24])


def test_a_report_of_two_arms(tmp_path: Path) -> None:
    folders = make_arm(tmp_path, "worse", 3.2) | make_arm(tmp_path, "better", 3.1)
    out = tmp_path / "reports"
    summary = figures.report(folders, out)
    names = [f"pretrain_lordo_loss_{x}.png" for x in ("bytes", "device_hours", "tokens")]
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
    trained = arms.read(both)
    pictures = plots.draw(trained)
    alone = plots.draw(trained[:1])
    assert pictures["loss_device_hours"] == alone["loss_device_hours"]
    assert pictures["loss_tokens"] != alone["loss_tokens"]
    rows = arms.table(trained)
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
    figures.report(folders, out)
    assert sorted(p.name for p in out.iterdir()) == [
        "index.html",
        "pretrain_lordo_loss_bytes.png",
        "pretrain_lordo_loss_tokens.png",
        "summary.json",
    ]
    page = (out / "index.html").read_text("utf-8")
    assert "No arm has device-hours" in page
    assert "timing.json is not versioned" in page
    assert arms.table(arms.read(folders))[0]["device-hours"] == "-"


def test_one_rank_sends_nothing(tmp_path: Path) -> None:
    folders = make_arm(tmp_path, "ddp", 3.1)
    curve = next(iter(folders.values())) / "curve.json"
    rows = json.loads(curve.read_text())["rows"]
    silent = [row | {"comm/payload_bytes": 0, "comm/wire_bytes": 0} for row in rows]
    curve.write_text(json.dumps({"rows": silent}))
    figures.report(folders, tmp_path / "reports")
    assert not (tmp_path / "reports" / "pretrain_lordo_loss_bytes.png").exists()
    page = (tmp_path / "reports" / "index.html").read_text("utf-8")
    assert "No arm has bytes on the wire" in page


def test_an_arm_with_a_single_evaluation_is_drawn(tmp_path: Path) -> None:
    folders = make_arm(tmp_path, "ddp", 3.1)
    curve = next(iter(folders.values())) / "curve.json"
    curve.write_text(json.dumps({"rows": json.loads(curve.read_text())["rows"][4:5]}))
    figures.report(folders, tmp_path / "reports")
    assert (tmp_path / "reports" / "pretrain_lordo_loss_tokens.png").exists()


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


def test_stages_are_never_in_one_table_or_figure(tmp_path: Path) -> None:
    """A worse arm of one stage may well have a lower loss than a better one of another."""
    folders = make_arm(tmp_path, "ddp", 3.0) | make_arm(tmp_path, "lordo", 3.2)
    folders |= make_pipeline(tmp_path, "sync", 3.1) | make_pipeline(tmp_path, "async", 3.3)
    out = tmp_path / "reports"
    summary = figures.report(folders, out)
    names = ["pretrain_async/async", "pretrain_async/sync"]
    assert list(json.loads((out / "summary.json").read_text())) == sorted(summary)
    assert [name for name in summary if name.startswith("pretrain_async")] == names[::-1]
    drawn = {p.stem for p in out.glob("*.png")}
    assert drawn == {
        "pretrain_lordo_loss_tokens",
        "pretrain_lordo_loss_device_hours",
        "pretrain_lordo_loss_bytes",
        "pretrain_async_loss_updates",
        "pretrain_async_loss_device_hours",
        "pretrain_async_schedule",
    }
    page = (out / "index.html").read_text("utf-8")
    lordo, pipelines = page.split('<section id="pretrain_async">')
    assert ">ddp<" in lordo and ">sync<" not in lordo
    assert ">async<" in pipelines and ">ddp<" not in pipelines
    assert "utilisation" in pipelines and ">utilisation<" not in lordo
    assert page.count("lowest held-out loss") == 2


def test_modelled_times_are_in_no_curve(tmp_path: Path) -> None:
    real = make_pipeline(tmp_path, "real", 3.1)
    both = real | make_pipeline(tmp_path, "deep", 3.0, simulated=True)
    trained = arms.read(both)
    assert (
        plots.draw(trained)["loss_device_hours"] != plots.draw(arms.read(real))["loss_device_hours"]
    ), "colours go by place"
    first, second = arms.table(trained)
    assert first["arm"] == "deep"
    assert (first["device-hours"], first["utilisation"], first["tokens/s"]) == ("-", "-", "-")
    assert first["modelled utilisation"] == "89.0%" and second["modelled utilisation"] == "-"
    assert "simulated in one process" in first["note"] and second["note"] == ""
    figures.report(both, tmp_path / "reports")
    page = (tmp_path / "reports" / "index.html").read_text("utf-8")
    assert "Without deep" in page


def test_rewards_against_updates_seconds_and_tokens_with_their_completions(tmp_path: Path) -> None:
    folders = make_rewarded(tmp_path, "exact", 0.8) | make_rewarded(tmp_path, "other", 0.6)
    figures.report(folders, tmp_path / "reports")
    names = [f"post_train_reward_{x}.png" for x in ("seconds", "tokens", "updates")]
    assert sorted(p.name for p in (tmp_path / "reports").glob("*.png")) == names
    page = (tmp_path / "reports" / "index.html").read_text("utf-8")
    assert "highest held-out reward" in page and "Reward against updates" in page
    assert page.count("<details") == 4 and "other, update 300" in page
    assert page.index(">exact<") < page.index(">other<")
