"""One experiment in a project of its own, for all tests that look at what it left."""

import pytest

from tests.project import SECRET, Project


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A project after `experiment`, with what it printed."""
    project = Project(tmp_path_factory.mktemp("fresh") / "räume und zeiten")
    done = project.execute("./run", "-m", "flows", "experiment", HF_TOKEN=SECRET)
    assert done.returncode == 0, done.stdout + done.stderr
    return project, done
