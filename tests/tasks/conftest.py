"""A tracking store and a run directory, for the tests of what talks to MLflow."""

import os
from pathlib import Path
from typing import Any

import pytest

from tasks import environment, mlflow_store, tracking
from tests.tasks.runs import FOLDER

environment.set_defaults()  # an entry point of its own, as flows/__init__.py is


@pytest.fixture(scope="session")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("store") / FOLDER
    return f"sqlite:///{folder / 'mlflow.db'}"


@pytest.fixture
def store(shared_store: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The MlflowClient of a store that all tests share: to make one costs seconds."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", shared_store)
    tracking.ensure_store()
    return mlflow_store.client()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "pretrain_lordo" / "ddp" / f"job{os.urandom(4).hex()}"
    folder.mkdir(parents=True)
    return folder
