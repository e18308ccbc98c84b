"""Environment of Prefect, MLflow and DVC: one store each inside the project, nothing sent home.

`set_defaults` runs first in every entry point, before any of the three is imported: they read these
variables at import. What the user has set already wins (PREFECT_API_URL for a server,
MLFLOW_TRACKING_URI for another store, ...). This module imports nothing heavy.
"""

from __future__ import annotations

import os

from tasks.paths import PROJECT

MLFLOW_HOME = PROJECT / ".mlflow"
"""Database and artifacts of the default tracking store."""

Address = tuple[str, int]
MLFLOW: Address = ("127.0.0.1", 5000)
PREFECT: Address = ("127.0.0.1", 4200)
"""Where `make ui` serves the two pages."""

DEFAULTS = {
    # Prefect: state inside the project; the temporary server of a busy machine starts slowly.
    "PREFECT_HOME": str(PROJECT / ".prefect"),
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    # Seconds between tries double from 2: a server may be away for two minutes, one start included.
    "PREFECT_CLIENT_MAX_RETRIES": "6",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    # MLflow: sqlite:/// and then the absolute path as it is; SQLAlchemy decodes no %20 here.
    "MLFLOW_TRACKING_URI": f"sqlite:///{MLFLOW_HOME / 'mlflow.db'}",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_DISABLE_AGENT_HINT": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    # Its page would start eight processes, 2 GB in all, for services that nothing here uses.
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    # A server that is away is noticed soon; tasks/mlflow_run.py has its own patience.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    # DVC, and what all three share.
    "DVC_NO_ANALYTICS": "1",
    "DO_NOT_TRACK": "1",
    "GIT_PYTHON_REFRESH": "quiet",
}
"""Name of variable -> value where the user has set none."""


def page(address: Address) -> str:
    return f"http://{address[0]}:{address[1]}"


def set_defaults() -> None:
    """Set every variable of `DEFAULTS` that is not set. Children inherit them; twice is fine."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
