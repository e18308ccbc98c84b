"""Servers that go away while a flow trains: it goes on at the same speed, and nothing is lost."""

import json
import os
import signal
import subprocess
import time

import pytest
import requests

from algorithms.common.metrics import read_rows
from benchmarks.prefect_api import ask
from tasks.environment import DEFAULTS, page
from tasks.mlflow_run import PERIOD_S
from tasks.paths import PROJECT
from tasks.servers import free_address
from tests.project import Project
from tests.tasks.runs import await_true

AWAY_S = float(os.environ.get("AWAY_S", "6"))
"""For how long servers do not answer, or longer: until a round of sending has failed."""
TIMEOUT_S = 3
"""Patience of a request, which is made twice."""
STEPS = 500 + int(200 * (AWAY_S + PERIOD_S))
"""It trains a hundred steps a second on a quiet machine, and must outlast that on a faster one."""
FEWER_STEPS = 500
TRAINED = 200
"""Steps before servers go: two seconds to compare with."""
LONG = [
    *("--set", "pretrain_lordo.training.log_every=1"),
    *("--set", "pretrain_lordo.training.checkpoint_every=100000"),
    *("--set", "pretrain_lordo.training.eval_every=100000"),
]
"""Nothing but steps, so that all take the same time."""


class Servers:
    """Servers of Prefect and MLflow, which a test kills and starts again at the same addresses."""

    def __init__(self, project):
        self.project = project
        self.prefect, self.mlflow = (page(free_address()) for _ in range(2))
        self.variables = {
            "PREFECT_API_URL": f"{self.prefect}/api",
            "MLFLOW_TRACKING_URI": self.mlflow,
        }
        self.environment = {
            name: value.replace(str(PROJECT), str(project.root)) for name, value in DEFAULTS.items()
        }
        self.running = []

    def start(self, *names):
        store = f"sqlite:///{self.project.root}/server.db"
        commands = {
            "prefect": ["prefect", "server", "start"],
            "mlflow": ["mlflow", "server", "--workers", "1", "--backend-store-uri", store],
        }
        for name in names:
            host, _, port = getattr(self, name).removeprefix("http://").partition(":")
            program, *arguments = commands[name]
            self.running.append(
                self.project.start(
                    f".venv/bin/{program}",
                    *arguments,
                    *("--host", host, "--port", port),
                    output=subprocess.DEVNULL,
                    **self.environment,
                )
            )
        health = {"prefect": "/api/health", "mlflow": "/health"}
        await_true(lambda: all(answers(getattr(self, n) + health[n]) for n in names), 180)

    def signal(self, number):
        for process in self.running:
            os.killpg(process.pid, number)

    def kill(self):
        self.signal(signal.SIGKILL)
        for process in self.running:
            process.wait()
        self.running = []


def answers(url):
    try:
        return requests.get(url, timeout=5).ok
    except requests.RequestException:
        return False


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    project = Project(tmp_path_factory.mktemp("outage") / "project")
    done = project.flows("prepare", "--plain")
    assert done.returncode == 0, done.stderr
    servers = Servers(project)
    yield servers
    project.kill()


def rows(project):
    """Of the one job that there is."""
    [path] = project.root.glob("runs/pretrain_lordo/ddp/*/metrics.jsonl")
    return read_rows(path)


def trained(project):
    return len(rows(project)) if any(project.root.glob("runs/*/*/*/metrics.jsonl")) else 0


def start_training(servers, steps, log, **variables):
    """A flow that uses the servers, once it has trained for a while; all that it says is in `log`.

    A pipe that nobody reads would hold it up once it is full.
    """
    servers.project.execute("rm", "-rf", "runs")
    command = ["./run", "-m", "flows", "pretrain", "--arm", "ddp", *LONG]
    command += ["--set", f"pretrain_lordo.training.steps={steps}"]
    with log.open("w") as output:
        flow = servers.project.start(
            *command, output=output.fileno(), **servers.variables, **variables
        )
    await_true(lambda: trained(servers.project) >= TRAINED or flow.poll() is not None, 180)
    assert flow.poll() is None, log.read_text()
    return flow


def steps_per_s(rows, begin, end):
    times = [row["time"] for row in rows if begin <= row["time"] < end]
    return (len(times) - 1) / (times[-1] - times[0])


def said_since(log, seen):
    return log.read_text()[seen:]


def sent(project):
    """What MLflow has of the newest arm, and how that ended."""
    sql = "SELECT run_uuid, status FROM runs WHERE name = 'ddp' ORDER BY start_time DESC LIMIT 1"
    [(run, status)] = project.query("server.db", sql)
    sql = f"SELECT step, value FROM metrics WHERE run_uuid = '{run}' AND key = 'train/loss'"
    return status, sorted(project.query("server.db", sql))


@pytest.mark.slow
def test_servers_that_come_back_have_missed_nothing(servers, tmp_path):
    """They hang, as behind a broken network; that they were killed is test_mlflow_run's."""
    servers.start("prefect", "mlflow")
    project = servers.project
    log = tmp_path / "flow.log"
    flow = start_training(servers, STEPS, log, MLFLOW_HTTP_REQUEST_TIMEOUT=str(TIMEOUT_S))
    gone, seen = time.time(), len(log.read_text())
    servers.signal(signal.SIGSTOP)
    time.sleep(AWAY_S)
    await_true(lambda: "will be retried" in said_since(log, seen), 60)
    back = time.time()
    servers.signal(signal.SIGCONT)
    assert trained(project) < STEPS, "the job was too short"
    assert flow.wait(timeout=300) == 0, log.read_text()
    found = rows(project)
    assert [row["step"] for row in found] == [*range(1, STEPS + 1)]
    beside = [(found[20]["time"], gone), (back, found[-1]["time"])]
    slower = min(steps_per_s(found, *window) for window in beside)
    assert steps_per_s(found, gone, back) > 0.5 * slower
    assert sent(project) == ("FINISHED", [(row["step"], row["train/loss"]) for row in found])
    api = f"{servers.prefect}/api"
    runs = {(run["name"], run["state_type"]) for run in ask(api, "flow_runs/filter")}
    assert runs == {("pretrain ddp", "COMPLETED"), ("prepare", "COMPLETED")}
    assert {each["key"] for each in ask(api, "artifacts/filter")} == {"mlflow-ddp"}


@pytest.mark.slow
def test_servers_that_never_come_back_cost_a_line_and_no_step(servers, tmp_path):
    project = servers.project
    if not servers.running:
        servers.start("prefect", "mlflow")
    log = tmp_path / "flow.log"
    flow = start_training(servers, FEWER_STEPS, log, PREFECT_CLIENT_MAX_RETRIES="1")
    gone = time.time()
    servers.kill()
    code, said = flow.wait(timeout=300), log.read_text()
    assert code == 2, said
    [line] = [line for line in said.splitlines() if line.startswith("shoestring: ")]
    assert line.startswith(
        f"shoestring: PREFECT_API_URL: {servers.prefect}/api does not answer any"
    )
    assert "Traceback" not in said
    found = rows(project)
    assert [row["step"] for row in found] == [*range(1, FEWER_STEPS + 1)]
    before = steps_per_s(found, found[20]["time"], gone)
    assert steps_per_s(found, gone, found[-1]["time"]) > 0.5 * before
    [quality] = project.root.glob("runs/set/*/metrics/pretrain_lordo/ddp/quality.json")
    assert json.loads(quality.read_text())["steps"] == FEWER_STEPS
    status, early = sent(project)
    assert status == "RUNNING" and len(early) < FEWER_STEPS

    servers.start("mlflow")
    code = "import flows; from tasks import tracking; print(tracking.sync_pending())"
    done = project.execute("./run", "-c", code, **servers.variables)
    assert done.returncode == 0, done.stderr
    assert sent(project) == ("FINISHED", [(row["step"], row["train/loss"]) for row in found])
