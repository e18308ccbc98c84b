"""What tests of branch replay share: random branches, a loss that couples them, gradients."""

import torch
from torch import Tensor, nn

from algorithms.branch_replay import reference
from algorithms.branch_replay.config import ReplayConfig
from algorithms.branch_replay.passes import StepOutput
from algorithms.branch_replay.replay import BranchReplay
from tests.families import VOCAB

Gradients = dict[str, Tensor]


def tokens(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCAB, (count,), generator=generator)


def responses(*lengths: int) -> list[Tensor]:
    return [tokens(length, seed=10 + i) for i, length in enumerate(lengths)]


def coupled(log_probs: list[Tensor]) -> Tensor:
    """Not a sum over branches: every coefficient depends on all of them."""
    flat = torch.cat([torch.zeros(0, dtype=torch.float64), *log_probs])
    weights = torch.linspace(-1.0, 1.5, len(flat), dtype=flat.dtype) if len(flat) else flat
    return (weights * flat).sum() + 0.01 * flat.sum() ** 2 / max(len(flat), 1)


def take_gradients(model: nn.Module) -> Gradients:
    """By name; a parameter that got none has zeros. Clears them."""
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }
    model.zero_grad()
    return gradients


def distance(a: Gradients, b: Gradients) -> float:
    """Relative L2 over all parameters, from `b`."""
    apart = sum(float((a[name] - b[name]).double().square().sum()) for name in b)
    size = sum(float(b[name].double().square().sum()) for name in b)
    return (apart / size) ** 0.5 if size else apart**0.5


def naive(model, prompt, branches, loss_fn=coupled) -> tuple[float, list[Tensor], Gradients]:
    """Loss, log-probabilities and gradients by full sequences."""
    loss, log_probs = reference.step(model, prompt, branches, loss_fn)
    return loss, log_probs, take_gradients(model)


def replayed(model, prompt, branches, loss_fn=coupled, **settings) -> tuple[StepOutput, Gradients]:
    """The same by replay."""
    out = BranchReplay(model, ReplayConfig(**settings)).step(prompt, branches, loss_fn)
    return out, take_gradients(model)


def error(model, prompt, branches, loss_fn=coupled, **settings) -> float:
    """Relative L2 of the replayed gradient from the naive one; loss and values are asserted."""
    loss, log_probs, truth = naive(model, prompt, branches, loss_fn)
    out, gradients = replayed(model, prompt, branches, loss_fn, **settings)
    assert abs(out.loss - loss) <= 1e-11 * max(1.0, abs(loss))
    for ours, theirs in zip(out.log_probs[0], log_probs, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
    return distance(gradients, truth)
