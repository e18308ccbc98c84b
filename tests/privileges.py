"""`needs_root` marks tests that make network namespaces. CI runs as root: there, none may skip."""

import pytest

from algorithms.common.errors import InputError
from benchmarks.netns import require_tools


def why_not() -> str:
    """What is missing here; empty when networks can be made."""
    try:
        require_tools()
    except InputError as error:
        return str(error)
    return ""


needs_root = pytest.mark.skipif(bool(why_not()), reason=why_not() or "never")
