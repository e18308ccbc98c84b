"""Small stages, batches and optimizers for tests of pipelines; and two runs of one: by real ranks
and by the reference. Only `model_of` needs transformers."""

import torch
import torch.nn.functional as F
from torch import nn

from algorithms.async_pipeline.baselines import build
from algorithms.async_pipeline.config import StageOptimizerConfig
from algorithms.async_pipeline.pipeline import Pipeline
from algorithms.async_pipeline.reference import Delayed

VOCAB, BATCH, TOKENS, WIDTH = 61, 2, 9, 16

FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": 5},
    "qwen2": {
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
    },
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
    },
}


def model_of(family="llama", layers=4, tied=False, **extra):
    """A decoder whose parameters are far from their usual initial values."""
    from algorithms.common.config import ModelConfig
    from algorithms.common.model import build as build_model

    config = ModelConfig(
        family=family,
        hidden_size=WIDTH,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        extra=FAMILIES.get(family, {}) | extra,
    )
    model = build_model(config, vocab_size=VOCAB, end_of_text=0, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


class Layer(nn.Module):
    """A residual block without attention."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 24)
        self.down = nn.Linear(24, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Chain(nn.Module):
    """Parts under their names in the whole model, one after the other."""

    def __init__(self, parts):
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x):
        for part in self.children():
            x = part(x)
        return x


def toy_stages(counts):
    """An embedding, `sum(counts)` blocks and a head, cut into stages."""
    torch.manual_seed(0)
    parts = {"embed": nn.Embedding(VOCAB, WIDTH)}
    parts |= {f"layer_{index}": Layer() for index in range(sum(counts))}
    parts |= {"head": nn.Linear(WIDTH, VOCAB, bias=False)}
    names = list(parts)
    ends = [1 + sum(counts[: k + 1]) for k in range(len(counts))]
    starts = [0, *ends[:-1]]
    ends[-1] += 1
    return [Chain({n: parts[n] for n in names[a:b]}) for a, b in zip(starts, ends, strict=True)]


def stages_of(family, counts):
    """Stages of a toy (`family` None) or of a decoder."""
    if family is None:
        return toy_stages(counts)
    from algorithms.async_pipeline.stage import cut

    return cut(model_of(family, sum(counts)), counts)


def batch(index):
    """Inputs and targets of a microbatch: each token is the last one plus 0, 1 or 2."""
    generator = torch.Generator().manual_seed(index)
    steps = torch.randint(3, (BATCH, TOKENS + 1), generator=generator)
    tokens = steps.cumsum(1).remainder(VOCAB)
    return tokens[:, :-1], tokens[:, 1:]


def token_loss(scores, targets):
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def optimizer_of(kind):
    """A factory: of a config, or of torch's; weight decay goes to matrices, so that there are two
    groups."""

    def build_optimizer(named, stage, stages):
        if isinstance(kind, StageOptimizerConfig):
            return build(named, kind, stage=stage, stages=stages)
        groups = [
            {"params": [p for _, p in named if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for _, p in named if p.ndim == 1], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        if kind == "adamw":
            return torch.optim.AdamW(groups, lr=3e-3)
        if kind == "nadam":
            betas = (0.99, 0.999)
            return torch.optim.NAdam(groups, lr=3e-3, betas=betas, decoupled_weight_decay=True)
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    return build_optimizer


def warm_up(optimizer, update):
    """A rate that changes with every update, from the groups' own peak."""
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("peak", group["lr"]) * min(1.0, (update + 1) / 7)


def pipeline(comm, counts, *, kind="adamw", family=None, **changes):
    """This rank's part of a pipeline."""
    settings = {"clip_norm": 0.5, "before_update": warm_up} | changes
    stage = stages_of(family, counts)[comm.rank]
    return Pipeline(stage, optimizer_of(kind), token_loss, comm, **settings)


def weights_of(module):
    return {name: weight.detach().clone() for name, weight in module.named_parameters()}


def real(comm, counts, updates, changes):
    """Losses, this stage's weights and norms, and bytes after `updates` updates."""
    mine = pipeline(comm, counts, **changes)
    losses = mine.run(batch, updates)
    return losses, weights_of(mine.stage), mine.norms, comm.metrics()


def simulated(counts, updates, *, kind="adamw", family=None, stash="device", **changes):
    """Losses, weights by stage and norms by update and stage, in one process."""
    settings = {"clip_norm": 0.5, "before_update": warm_up} | changes
    settings.pop("recompute", None)
    stages = stages_of(family, counts)
    reference = Delayed(stages, optimizer_of(kind), token_loss, stash=stash != "none", **settings)
    losses, norms = [], []
    for index in range(updates * reference.accumulation):
        losses.append(reference.microbatch(*batch(index)).item())
        if (index + 1) % reference.accumulation == 0:
            norms.append(reference.norms)
    return losses, [weights_of(stage) for stage in stages], norms


def assert_same(results, simulation):
    """What `real` gave on each rank is what `simulated` did, bit for bit."""
    losses, weights, norms = simulation
    for k, (found, own, own_norms, _) in enumerate(results):
        assert found == losses
        assert own_norms == [each[k] for each in norms]
        assert list(own) == list(weights[k])
        for name, weight in own.items():
            assert torch.equal(weight, weights[k][name]), (k, name)
