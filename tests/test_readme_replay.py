"""The ten lines of replay in docs/branch_replay.md, and in README.md, run as they stand."""

import re

import pytest
import torch

from tasks.paths import PROJECT
from tests.families import tiny, true_float64
from tests.replays import distance, naive, responses, take_gradients, tokens

BLOCKS = {
    f"{name}:{match.start()}": match[1]
    for name in ("README.md", "docs/branch_replay.md")
    for match in re.finditer(
        r"^```python\n(.*?)^```", (PROJECT / name).read_text(encoding="utf-8"), re.M | re.S
    )
    if "branch_replay" in match[1]
}


class Kept:
    """An optimizer that does nothing but keep the gradients of its step."""

    def __init__(self, model):
        self.model = model

    def step(self):
        self.gradients = take_gradients(self.model)


def test_there_are_ten_lines():
    blocks = [b for name, b in BLOCKS.items() if name.startswith("docs")]
    assert len(blocks) == 1
    assert len([line for line in blocks[0].splitlines() if line]) <= 10


@pytest.mark.parametrize("where", BLOCKS)
def test_python_in_the_documents_runs_and_is_exact(where):
    model = tiny("qwen3")
    optimizer = Kept(model)
    given = {
        "model": model,
        "optimizer": optimizer,
        "prompt": tokens(12),
        "responses": responses(5, 7, 3, 5),
        "advantages": torch.tensor([1.0, -0.5, 0.3, -0.8], dtype=torch.float64),
    }
    names = dict(given)
    with true_float64(model):
        exec(BLOCKS[where], names)
        _, _, truth = naive(model, given["prompt"], given["responses"], names["loss_fn"])
    assert distance(optimizer.gradients, truth) <= 1e-12
    assert sum(float(g.norm()) for g in truth.values()) > 0
