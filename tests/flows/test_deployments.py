"""What prefect.yaml says of each deployment is what the flow itself says."""

import importlib

import pytest
import yaml

from tasks.paths import PROJECT

DEPLOYMENTS = yaml.safe_load((PROJECT / "prefect.yaml").read_text(encoding="utf-8"))["deployments"]


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda each: each["name"])
def test_a_deployment_has_the_version_of_its_flow(deployment):
    path, name = deployment["entrypoint"].split(":")
    module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    assert deployment["version"] == getattr(module, name).version
