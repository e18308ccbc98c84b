"""The reference: its weights have the ages it claims, and its gradients are what it says."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call

from algorithms.async_pipeline.reference import Delayed
from algorithms.async_pipeline.stage import cut
from algorithms.common.errors import InputError, NonFiniteError
from algorithms.common.model import logits
from tests.pipelines import batch, model_of, optimizer_of, token_loss, warm_up, weights_of


class Scale(nn.Module):
    """y = w x: everything about it is known in closed form."""

    def __init__(self, value):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(value, dtype=torch.float64))

    def forward(self, x):
        return self.w * x


def sgd(named, stage, stages):
    return torch.optim.SGD([p for _, p in named], lr=0.1)


def product(output, target):
    return (output * target).sum()


ONE = torch.ones(1, dtype=torch.float64)


@pytest.mark.parametrize("delays", [None, [8, 4, 0], [3, 3, 1]])
def test_stashed_gradients_are_those_of_the_product_at_old_weights(delays):
    stages = [Scale(0.5), Scale(2.0), Scale(-1.0)]
    reference = Delayed(stages, sgd, product, delays=delays)
    past = [[stage.w.item() for stage in stages]]
    lags = delays or [2, 1, 0]
    for t in range(12):
        old = [past[max(0, t - lags[k])][k] for k in range(3)]
        loss = reference.microbatch(ONE, ONE)
        assert loss.item() == pytest.approx(old[0] * old[1] * old[2], rel=1e-12)
        gradients = [old[1] * old[2], old[0] * old[2], old[0] * old[1]]
        new = [w - 0.1 * g for w, g in zip(past[-1], gradients, strict=True)]
        assert [stage.w.item() for stage in stages] == pytest.approx(new, rel=1e-12)
        past.append(new)


def test_without_stash_the_backward_is_at_the_newest_weights_from_the_old_input():
    stages = [Scale(0.5), Scale(2.0), Scale(-1.0)]
    reference = Delayed(stages, sgd, product, stash=False)
    past = [[stage.w.item() for stage in stages]]
    for t in range(9):
        old = [past[max(0, t - (2 - k))][k] for k in range(3)]
        now = past[-1]
        reference.microbatch(ONE, ONE)
        inputs = [1.0, old[0], old[0] * old[1]]
        cotangents = [now[1] * now[2], now[2], 1.0]
        new = [w - 0.1 * x * g for w, x, g in zip(now, inputs, cotangents, strict=True)]
        assert [stage.w.item() for stage in stages] == pytest.approx(new, rel=1e-12)
        past.append(new)


@pytest.mark.parametrize("stash", [True, False])
def test_microbatches_of_an_update_see_versions_by_their_own_delay(stash):
    """With 2 microbatches an update and a delay of 1 the second of each pair sees the newest."""
    stages = [Scale(0.5), Scale(2.0)]
    reference = Delayed(stages, sgd, product, stash=stash, accumulation=2)
    first = [[0.5], []]
    for index in range(6):
        seen = first[0][max(0, index - 1) // 2]
        now = stages[1].w.item()
        assert reference.microbatch(ONE, ONE).item() == pytest.approx(seen * now, rel=1e-12)
        if index % 2:
            first[0].append(stages[0].w.item())
    assert len(set(first[0])) == 4


def test_draining_lets_all_see_the_newest_weights():
    stages = [Scale(0.5), Scale(2.0), Scale(-1.0)]
    reference = Delayed(stages, sgd, product)
    for _ in range(5):
        reference.microbatch(ONE, ONE)
    now = [stage.w.item() for stage in stages]
    reference.drain()
    assert reference.microbatch(ONE, ONE).item() == pytest.approx(now[0] * now[1] * now[2])


def plain(model, kind, steps, accumulation=1):
    """The ordinary training loop."""
    optimizer = optimizer_of(kind)(list(model.named_parameters()), 0, 1)
    for step in range(steps):
        for index in range(accumulation):
            inputs, targets = batch(step * accumulation + index)
            (token_loss(logits(model, inputs), targets) / accumulation).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        warm_up(optimizer, step)
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("kind", ["adamw", "nadam", "sgd"])
def test_one_stage_is_plain_training(kind, accumulation):
    model, other = model_of(), model_of()
    reference = Delayed(
        cut(model, [4]),
        optimizer_of(kind),
        token_loss,
        clip_norm=0.5,
        accumulation=accumulation,
        before_update=warm_up,
    )
    for index in range(6 * accumulation):
        reference.microbatch(*batch(index))
    expected = plain(other, kind, 6, accumulation)
    for name, weight in model.named_parameters():
        assert torch.equal(weight, expected[name]), name


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_stashed_gradients_are_those_of_one_autograd_call(family):
    """The whole model, built from each stage's old weights, differentiated at once."""
    model, whole = model_of(family), model_of(family)
    found = {}

    def note(optimizer, update):
        for group in optimizer.param_groups:
            found.update({id(weight): weight.grad.clone() for weight in group["params"]})

    stages = cut(model, [1, 1, 2])
    reference = Delayed(stages, optimizer_of("sgd"), token_loss, before_update=note)
    past = []
    for t in range(5):
        past.append(weights_of(model))
        reference.microbatch(*batch(t))
    old = {n: past[4 - (2 - k)][n] for k in range(3) for n in weights_of(stages[k])}
    old = {name: weight.requires_grad_() for name, weight in old.items()}
    inputs, targets = batch(4)
    scores = functional_call(whole, old, (), {"input_ids": inputs, "use_cache": False}).logits
    gradients = torch.autograd.grad(token_loss(scores, targets), list(old.values()))
    own = dict(model.named_parameters())
    for name, gradient in zip(old, gradients, strict=True):
        assert torch.equal(found[id(own[name])], gradient), name


def test_a_gradient_that_is_not_finite_reaches_no_weight():
    stages = [Scale(0.5), Scale(2.0)]
    reference = Delayed(stages, sgd, product)
    reference.microbatch(ONE, ONE)
    before = copy.deepcopy([weights_of(stage) for stage in stages])
    said = "^update 1: stage 1: gradient of w is not finite, loss is inf$"
    with pytest.raises(NonFiniteError, match=said):
        reference.microbatch(ONE * torch.inf, ONE)
    assert before == [weights_of(stage) for stage in stages]


@pytest.mark.parametrize("delays", [[1], [1, -1]])
def test_delays_that_cannot_be(delays):
    with pytest.raises(InputError, match="^delays: "):
        Delayed([Scale(1.0), Scale(1.0)], sgd, product, delays=delays)


@pytest.mark.parametrize("k", [0, 1])
@pytest.mark.parametrize("stash", [True, False])
def test_frozen_parameters_are_refused(k, stash):
    stages = [Scale(1.0), Scale(1.0)]
    stages[k].w.requires_grad_(False)
    with pytest.raises(InputError, match="^w: is frozen; "):
        Delayed(stages, sgd, product, stash=stash)
