"""README's loop with basis rotation runs as it stands, and the model has learned."""

import re

import torch

from algorithms.async_pipeline.basis_rotation import BasisRotation
from algorithms.common import model as models
from algorithms.common.config import ModelConfig
from algorithms.common.loop import token_loss
from tasks.paths import PROJECT

BLOCKS = re.findall(r"^```python\n(.*?)^```", (PROJECT / "README.md").read_text(), re.M | re.S)
VOCAB, STEPS = 31, 60


def batch(step):
    """Sequences that count upwards from a random start."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(VOCAB, (4, 1), generator=generator)
    return (start + torch.arange(17)) % VOCAB


def loss(model, tokens):
    return token_loss(models.logits(model, tokens[:, :-1]), tokens[:, 1:])


def test_the_loop_of_the_readme_runs_in_ten_lines():
    (block,) = [each for each in BLOCKS if "algorithms.async_pipeline" in each]
    assert len(block.splitlines()) <= 10
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = models.build(ModelConfig(**sizes, **heads), vocab_size=VOCAB, end_of_text=0, seed=0)
    before = loss(model, batch(-1)).item()
    batches = [batch(step) for step in range(STEPS)]
    names = {"model": model, "batches": batches, "loss": loss, "torch": torch}
    exec(compile(block, "README.md", "exec"), names)
    assert isinstance(names["optimizer"], BasisRotation)
    assert loss(model, batch(-1)).item() < before - 1
