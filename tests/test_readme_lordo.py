"""README's loop with LoRDO runs as it stands: ranks end equal, and the model has learned."""

import re

import pytest
import torch

from algorithms.common import model as models
from algorithms.common.config import ModelConfig
from algorithms.common.loop import token_loss
from tasks.paths import PROJECT

BLOCKS = re.findall(r"^```python\n(.*?)^```", (PROJECT / "README.md").read_text(), re.M | re.S)
VOCAB, STEPS = 31, 70


def block():
    (found,) = [each for each in BLOCKS if "algorithms.lordo" in each]
    return found


def batch(rank, step):
    """Sequences that count upwards from a random start."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    start = torch.randint(VOCAB, (4, 1), generator=generator)
    return (start + torch.arange(17)) % VOCAB


def loss(model, tokens):
    return token_loss(models.logits(model, tokens[:, :-1]), tokens[:, 1:])


def run(comm, text):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = models.build(ModelConfig(**sizes, **heads), vocab_size=VOCAB, end_of_text=0, seed=0)
    batches = [batch(comm.rank, step) for step in range(STEPS)]
    before = loss(model, batches[0]).item()
    names = {"model": model, "comm": comm, "batches": batches, "loss": loss}
    exec(compile(text, "README.md", "exec"), names)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return before, loss(model, batches[0]).item(), weights, comm.counters["delta"].calls


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_loop_of_the_readme_runs(ranks, world_size):
    lines = [line for line in block().splitlines() if line and "import" not in line]
    assert len(lines) <= 18
    found = ranks.run(run, block(), world_size=world_size)
    for before, after, weights, calls in found:
        assert after < before - 1
        assert torch.equal(weights, found[0][2])
        assert calls == 2 * 3  # a reduce-scatter and an all-gather, two rounds and an open one
