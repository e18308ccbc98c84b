"""Fixtures that every test may use, and the rule that in CI only gpu tests skip."""

import os
import sys

import pytest

from tests import toys
from tests.distributed import ranks

__all__ = ["ranks"]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """torch computes in one thread, as in the rank pool: it sums over rows in as many parts as it
    has threads, so the last bits of a gradient depend on them."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture
def tokens(tmp_path):
    """A folder of token shards."""
    return toys.write_tokens(tmp_path / "tokens")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A skip in CI is a failure: there, everything that a test needs is installed."""
    report = yield
    if report.skipped and os.environ.get("CI") and "gpu" not in item.keywords:
        report.outcome = "failed"
        report.longrepr = f"skipped in CI, but not marked gpu: {report.longrepr}"
    return report


def pytest_collection_modifyitems(items):
    """Without a CUDA device, tests marked gpu skip."""
    if not any("gpu" in item.keywords for item in items):
        return
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
