"""The pictures with as many arms as a study has: told apart, and named without overlap."""

from itertools import pairwise
from pathlib import Path

import pytest

from tasks import arms, plots
from tests.tasks.trained import make_arm


@pytest.mark.parametrize(
    ("heights", "expected"),
    [
        ([], []),
        ([0.5], [0.5]),
        ([0.1, 0.9], [0.1, 0.9]),
        ([0.5, 0.5], [0.45, 0.55]),
        ([0.5, 0.5, 0.5], [0.4, 0.5, 0.6]),
        ([0.2, 0.5, 0.55], [0.2, 0.475, 0.575]),
        ([0.0, 0.0, 0.8], [0.0, 0.1, 0.8]),
        ([1.0, 1.0], [0.9, 1.0]),
    ],
)
def test_names_move_apart_as_little_as_they_must(
    heights: list[float], expected: list[float]
) -> None:
    assert plots.spread(heights, 0.1) == pytest.approx(expected)


def test_too_many_names_keep_their_distance() -> None:
    found = plots.spread([0.5] * 20, 0.1)
    assert [b - a for a, b in pairwise(found)] == pytest.approx([0.1] * 19)


def test_thirteen_arms_look_different() -> None:
    curves = [plots.Curve(str(style), [], [], style) for style in range(13)]
    keys = ("color", "linestyle", "marker", "markerfacecolor")
    looks = {tuple(map(str, map(plots._look(c, plots.LIGHT).get, keys))) for c in curves}
    assert len(looks) == 13
    shapes = {(look[1], look[2]) for look in looks}
    assert len(shapes) == 13, "without colours, too"


def test_many_arms_are_drawn_without_their_training_loss(tmp_path: Path) -> None:
    folders = {}
    for number in range(plots.FEW + 1):
        folders |= make_arm(tmp_path, f"arm{number}", 3.0 + number / 10)
    trained = arms.read(folders)
    for arm in trained:
        assert len(arm.points("tokens", "train/loss")) == 30
    full = plots.draw(trained)
    assert set(full) == {figure.name for figure in plots.FIGURES}
    for arm in trained:
        for row in arm.curve:
            row["train/loss"] += 0.1 * (row["step"] % 20)
    assert plots.draw(trained) == full
    assert plots.draw(trained[:2]) != plots.draw(arms.read(folders)[:2])
