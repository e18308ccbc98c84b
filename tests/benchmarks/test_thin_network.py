"""From what ranks found to figures; and a small run on real networks."""

import json
import math
import os
from pathlib import Path

import pytest

from benchmarks import ring_model, thin_network
from benchmarks.netns import FRAME_BYTES, SEGMENT_BYTES
from benchmarks.thin_network import (
    DELAYED,
    FIGURES,
    arms,
    lines,
    main,
    make_plan,
    measure_rate,
    worst,
)
from benchmarks.thin_training import RankRuns, Run
from tests.privileges import needs_root

PLAN = make_plan(arms(), turns=2)
COMPUTE_S, DDP_S, OURS_S = 0.1, 0.4, 0.05
PARAMETERS = 120_640


def found(ranks: int, ddp_s: float = COMPUTE_S + DDP_S, sent: float = 1.0) -> list[RankRuns]:
    """Runs that fit the model to the last digit: DDP exchanges for 0.4 s, all others for 0.05."""
    bytes_per_second = 1e8 / 8 * SEGMENT_BYTES / FRAME_BYTES

    def run(name: str) -> Run:
        step_s, exchange_s = (ddp_s, DDP_S) if name == "ddp" else (COMPUTE_S + OURS_S, OURS_S)
        steps = 2 * PLAN.steps[name]
        counted = round(exchange_s * bytes_per_second * steps)
        seconds = [step_s * steps / 2] * 2
        return Run(seconds, steps, counted, round(sent * counted), calls=0)

    alone = {name: Run([20 * COMPUTE_S] * 2, 40) for name in PLAN.arms}
    together = {name: run(name) for name in PLAN.arms}
    together[DELAYED].seconds = [COMPUTE_S * together[DELAYED].steps / 2] * 2
    one = RankRuns(together, alone, 1e-4, PARAMETERS)
    return [one] * ranks


def test_runs_that_fit_the_model_reach_its_limit() -> None:
    figures = worst([lines(PLAN, found(ranks), mbit=100) for ranks in (2, 4)])
    assert list(figures) == FIGURES
    for prefix in ("", "paper."):
        assert figures[f"{prefix}speedup_vs_ddp"] == pytest.approx(0.5 / 0.15)
        assert figures[f"{prefix}speedup_vs_ddp_spread"] == 0
        assert figures[f"{prefix}speedup_limit_fraction"] == pytest.approx(1)
    assert figures["model_error_pct"] == pytest.approx(0, abs=1e-3)
    assert figures["counted_vs_wire_pct"] == pytest.approx(0, abs=1e-3)
    assert figures["delay_gain_pct"] == pytest.approx(100 * OURS_S / (COMPUTE_S + OURS_S))


def test_the_worse_of_two_networks_counts() -> None:
    good = lines(PLAN, found(2), mbit=100)
    bad = lines(PLAN, found(4, ddp_s=0.3, sent=1.04), mbit=100)
    for networks in ([good, bad], [bad, good]):
        figures = worst(networks)
        assert figures["speedup_vs_ddp"] == pytest.approx(0.3 / 0.15)
        assert figures["speedup_limit_fraction"] == pytest.approx(0.3 / 0.5)
        assert figures["model_error_pct"] == pytest.approx(100 * (0.5 / 0.3 - 1))
        assert figures["counted_vs_wire_pct"] == pytest.approx(4, abs=1e-3)


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        ("ddp", 0),  # its buffers are large: no allowance
        ("lordo_global", 0),
        ("lowrank_ddp", 12),  # an all-reduce over 4 ranks: 6 hops, each in halves
        ("lordo_ns", 3),  # an all-to-all or an all-gather: one to each other rank
    ],
)
def test_small_buffers_may_cost_a_constant_per_message(name: str, messages: float) -> None:
    ranks = found(4)
    run = ranks[0].together[name]
    run.wire_bytes, run.calls = 10_000, 2
    run.sent_bytes = 10_000 + round(2 * messages * ring_model.MESSAGE_BYTES)
    line = lines(PLAN, ranks, mbit=100)[name]
    assert line.counted_vs_wire_pct == pytest.approx(0)
    run.sent_bytes -= 500
    assert lines(PLAN, ranks, mbit=100)[name].counted_vs_wire_pct > 2


def test_latency_is_part_of_the_model() -> None:
    ranks = found(4)
    run = ranks[0].together["ddp"]
    run.calls = run.steps
    line = lines(PLAN, ranks, mbit=100)["ddp"]
    assert line.exchange_s == pytest.approx(DDP_S + 6 * 1e-4)


def test_without_root_there_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SystemExit) as caught:
        main(["--mbit", "100", "--json", str(tmp_path / "figures.json")])
    out, err = capsys.readouterr()
    assert (caught.value.code, out) == (2, "")
    assert err == "python -m benchmarks.thin_network: network namespaces need root\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("rate", ["0", "-1", "nan", "inf", "fast"])
def test_a_rate_that_is_none_is_refused(rate: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--mbit", rate])
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_each_rate_has_its_suffix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        thin_network, "measure_rate", lambda mbit, quick: dict.fromkeys(FIGURES, float(mbit))
    )
    path = tmp_path / "figures.json"
    assert main(["--json", str(path)]) == 0
    figures = json.loads(path.read_text())
    assert figures["speedup_vs_ddp_10"] == 10 and figures["paper.speedup_vs_ddp_1000"] == 1000
    assert main(["--quick", "--json", str(path)]) == 0
    figures = json.loads(path.read_text())
    assert (figures["model_error_pct_10"], figures["model_error_pct_100"]) == (None, 100)
    assert main(["--mbit", "25", "--json", str(path)]) == 0
    figures = json.loads(path.read_text())
    assert figures.keys() == {*FIGURES, "quick", "cores"} and figures["model_error_pct"] == 25
    assert "4 workers at 10 Gbit/s" in capsys.readouterr().out


@needs_root
@pytest.mark.slow
def test_all_figures_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TURN_STEPS", "STEADY_STEPS", "ALONE_STEPS"):
        monkeypatch.setattr(thin_network, name, 4)
    monkeypatch.setattr(thin_network, "RANKS", (2,))
    figures = measure_rate(1000, quick=True)
    assert list(figures) == FIGURES
    values = [value for value in figures.values() if value is not None]
    assert len(values) == len(FIGURES) and all(map(math.isfinite, values))
    # Times depend on what else the machine does, bytes do not.
    assert figures["counted_vs_wire_pct"] is not None and figures["counted_vs_wire_pct"] < 5
