import json
import os
import subprocess
import sys

from tasks.environment import DEFAULTS
from tasks.paths import PROJECT


def run_python(code: str, **variables: str) -> object:
    """What `code` prints as JSON, in a fresh process with none of our variables set."""
    silencing = {*DEFAULTS, "CI", "PYTEST_CURRENT_TEST"}  # the last two turn telemetry off, too
    clean = {name: value for name, value in os.environ.items() if name not in silencing}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=PROJECT,
        env=clean | variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_defaults_lie_inside_the_project_and_heavy_modules_stay_out() -> None:
    code = """
import json, os, sys
before = set(sys.modules)
from tasks import environment
environment.set_defaults(); environment.set_defaults()
heavy = [m for m in sys.modules if m in ("prefect", "mlflow", "dvc", "torch", "pydantic")]
print(json.dumps([{k: os.environ[k] for k in environment.DEFAULTS}, heavy]))
"""
    variables, heavy = run_python(code)
    assert variables["PREFECT_HOME"] == str(PROJECT / ".prefect")
    assert variables["MLFLOW_TRACKING_URI"] == f"sqlite:///{PROJECT}/.mlflow/mlflow.db"
    assert heavy == []


def test_values_of_the_user_win() -> None:
    code = """
import json, os
from tasks import environment
environment.set_defaults()
print(json.dumps([os.environ["MLFLOW_TRACKING_URI"], os.environ["PREFECT_API_URL"]]))
"""
    mlflow, prefect = "http://127.0.0.1:5999", "http://127.0.0.1:4299/api"
    assert run_python(code, MLFLOW_TRACKING_URI=mlflow, PREFECT_API_URL=prefect) == [
        mlflow,
        prefect,
    ]


def test_the_installed_versions_know_these_names() -> None:
    code = """
import json
from tasks import environment
environment.set_defaults()
import dvc.analytics, mlflow.environment_variables as m, mlflow.telemetry.utils, prefect.settings
from prefect._internal.analytics.enabled import is_telemetry_enabled
settings = prefect.settings.get_current_settings()
print(json.dumps({
    "home": str(settings.home),
    "startup": settings.server.ephemeral.startup_timeout_seconds,
    "patience": settings.client.max_retries,
    "server analytics": settings.server.analytics_enabled,
    "client analytics": is_telemetry_enabled(),
    "promotion": settings.server.ui.show_promotional_content,
    "mlflow telemetry off": mlflow.telemetry.utils.is_telemetry_disabled(),
    "retries": m.MLFLOW_HTTP_REQUEST_MAX_RETRIES.get(),
    "timeout": m.MLFLOW_HTTP_REQUEST_TIMEOUT.get(),
    "no hint": m.MLFLOW_DISABLE_AGENT_HINT.get(),
    "no urls": m.MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT.get(),
    "level": m.MLFLOW_LOGGING_LEVEL.get(),
    "job services": m.MLFLOW_SERVER_ENABLE_JOB_EXECUTION.get(),
    "dvc analytics": dvc.analytics.is_enabled(),
}))
"""
    assert run_python(code) == {
        "home": str(PROJECT / ".prefect"),
        "startup": 120,
        "patience": 6,
        "server analytics": False,
        "client analytics": False,
        "promotion": False,
        "mlflow telemetry off": True,
        "retries": 1,
        "timeout": 10,
        "no hint": True,
        "no urls": True,
        "level": "WARNING",
        "job services": False,
        "dvc analytics": False,
    }
