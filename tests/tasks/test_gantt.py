"""The picture of what stages did when."""

import struct

import pytest

from tasks import gantt
from tests.tasks.trained import NASTY, TRACE


@pytest.mark.parametrize("count", [1, 3])
def test_each_arm_adds_a_panel(count: int) -> None:
    picture = gantt.draw({f"arm {number}": TRACE for number in range(count)})
    for png in (picture.light, picture.dark):
        width, height = struct.unpack(">II", png[16:24])
        assert width == 1152
        panel = gantt.HEAD + 2 * gantt.ROW
        assert height == pytest.approx(160 * (gantt.MARGIN + count * panel), abs=1)
    assert picture.light != picture.dark


def test_what_a_stage_did_changes_the_picture() -> None:
    other = [[["forward", 0, 0.0, 0.3], *TRACE[0][1:]], TRACE[1]]
    drawn = gantt.draw({NASTY: TRACE})
    assert gantt.draw({NASTY: TRACE}) == drawn
    assert gantt.draw({NASTY: other}) != drawn
    assert gantt.draw({"another name": TRACE}) != drawn
