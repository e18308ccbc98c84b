"""What an experiment leaves, seen in a real browser: a photograph of each page is kept."""

import json
from urllib.parse import quote

import pytest

from tests.browser import Browser

MLFLOW, PREFECT = "http://127.0.0.1:5000", "http://127.0.0.1:4200"
KNOWN = f"404 (Not Found) {MLFLOW}/ajax-api/2.0/mlflow/users/current"
"""MLflow's page asks its server who is logged in; one without logins does not know the question."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def project(finished, browser):
    """Served; asks for the browser first, so that a machine without one skips at once."""
    project, _ = finished
    with project.serving("ui"):
        yield project


def click(browser, text):
    """Click what says `text` and nothing else, once it is there."""
    every = "[...document.querySelectorAll('body *')]"
    found = f"{every}.filter(e => e.innerText?.trim() === {json.dumps(text)}).at(-1)"
    browser.wait(f"!!{found}")
    browser.ask(f"{found}.click()")


@pytest.mark.slow
def test_prefects_page_of_the_run_shows_the_artifacts(project, browser, tmp_path):
    [(run,)] = project.query(
        ".prefect/prefect.db",
        "SELECT id FROM flow_run WHERE name = 'experiment' ORDER BY start_time LIMIT 1",
    )
    browser.open(f"{PREFECT}/runs/flow-run/{run}")
    click(browser, "Artifacts")
    for key in ("summary", "arms-pretrain-lordo", "arms-pretrain-async"):
        browser.wait(f"document.body.innerText.toLowerCase().includes('{key}')")
    browser.photograph(tmp_path / "prefect.png")
    assert browser.errors == []


@pytest.mark.slow
def test_mlflows_page_compares_two_arms(project, browser, tmp_path):
    sql = (
        "SELECT runs.name, run_uuid, experiment_id FROM runs JOIN experiments USING (experiment_id)"
        " WHERE experiments.name = 'experiment' AND runs.name IN ('ddp', 'lordo_global')"
        " ORDER BY start_time"
    )
    found = project.query(".mlflow/mlflow.db", sql)
    rows = {name: (run, experiment) for name, run, experiment in found}
    assert len(rows) == 2
    runs = quote(json.dumps([run for run, _ in rows.values()]))
    experiments = quote(json.dumps([str(experiment) for _, experiment in rows.values()][:1]))
    browser.open(f"{MLFLOW}/#/compare-runs?runs={runs}&experiments={experiments}")
    links = "[...document.querySelectorAll('a')].filter(a => a.href.includes('#/metric?'))"
    drawn = {}
    for last in ("train/loss", "val/perplexity"):  # only what is in view is there
        scrolled = f"({links}.at(-1)?.scrollIntoView(), {links})" if drawn else links
        browser.wait(f"{scrolled}.some(a => a.innerText.trim() === '{last}')")
        drawn |= dict(browser.ask(f"{links}.map(a => [a.innerText.trim(), a.href])"))
    both = {name for name, link in drawn.items() if all(run in link for run, _ in rows.values())}
    assert {
        "train/loss", "val/loss", "val/perplexity", "val/bits_per_byte", "tokens", "tokens_per_s",
        "lr", "grad_norm", "device_hours", "gpu_hours", "comm/payload_bytes", "comm/wire_bytes",
        "memory/peak_bytes", "memory/optimizer_bytes",
    } <= both  # fmt: skip
    assert {name for name in drawn if not name.startswith("comm/")} <= both, "the same for each arm"
    click(browser, "train/loss")
    browser.wait("document.querySelectorAll('.js-plotly-plot .scatterlayer .trace').length >= 2")
    plots = "[...document.querySelectorAll('.js-plotly-plot')]"
    curves = browser.ask(f"{plots}.flatMap(p => p.data.map(d => [d.name, d.x, d.y]))")
    seen = {name: [*zip(x, y, strict=True)] for name, x, y in curves}
    for arm, (run, _) in rows.items():
        sql = f"SELECT step, value FROM metrics WHERE run_uuid = '{run}' AND key = 'train/loss'"
        assert [tuple(p) for p in seen[arm]] == sorted(project.query(".mlflow/mlflow.db", sql))
    browser.photograph(tmp_path / "mlflow.png")
    assert [error for error in browser.errors if KNOWN not in error] == []


@pytest.mark.slow
def test_the_report_shows_its_pictures(finished, browser, tmp_path):
    project, _ = finished
    browser.open((project.root / "reports" / "index.html").as_uri())
    sizes = browser.ask("[...document.images].map(image => image.naturalWidth)")
    assert len(sizes) == browser.ask("document.querySelectorAll('figure picture').length") > 3
    assert min(sizes) > 500
    assert "lordo_global" in browser.text()
    browser.photograph(tmp_path / "report.png")
    assert browser.errors == []
