"""Which of several failed ranks is named; the agent itself is tested in test_torchrun.py."""

from typing import Any

import pytest

from tasks.agent import root_cause_first


def failed(rank: int, exitcode: int, seen: int, **said: Any) -> dict[str, Any]:
    names = {-6: "SIGABRT", -9: "SIGKILL", -15: "SIGTERM"}
    return {
        "rank": rank,
        "exitcode": exitcode,
        "signal": names.get(exitcode),
        "kind": None,
        "seen": seen,
        "time": seen,
        **said,
    }


@pytest.mark.parametrize(
    ("failures", "order"),
    [
        (
            [
                failed(0, 1, 100, kind="crash", time=100.31),
                failed(1, 1, 100, kind="crash", time=100.30),
            ],
            [1, 0],
        ),
        ([failed(0, 1, 100, kind="crash", time=100.3), failed(1, -9, 100)], [1, 0]),
        ([failed(0, 1, 100, kind="crash", time=100.3), failed(1, -9, 102)], [0, 1]),
        ([failed(0, -6, 100), failed(1, 1, 100, kind="crash", time=100.3)], [1, 0]),
        ([failed(0, 9, 100), failed(1, 2, 100, kind="input", time=100.3)], [1, 0]),
        ([failed(0, -15, 100), failed(2, -15, 100), failed(1, 7, 100)], [1, 0, 2]),
        ([failed(0, 75, 100, kind="preempted"), failed(1, 1, 100, kind="crash")], [1, 0]),
    ],
    ids=[
        "earlier exception",
        "killed before broken connection",
        "killed late by the agent",
        "watchdog abort",
        "input error",
        "told to stop",
        "crash while stopping",
    ],
)
def test_root_cause_first(failures: list[dict[str, Any]], order: list[int]) -> None:
    assert [failure["rank"] for failure in root_cause_first(failures)] == order
