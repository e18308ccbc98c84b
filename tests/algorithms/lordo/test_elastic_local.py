"""A round cut in two, and what a worker that joins gets."""

import copy

import pytest
import torch

from algorithms.common.comm import Comm
from algorithms.common.loop import token_loss
from algorithms.common.model import logits
from algorithms.lordo import methods
from tests import toys
from tests.loops import new_model

ELASTIC = [name for name in toys.RANKS_DIFFER if name not in ("lowrank_ddp", "delayed")]
LR = 1e-2


def built(name, seed=0, elastic=True):
    comm = Comm(None, torch.device("cpu"))
    decoder = new_model(seed)
    arm = toys.RANKS_DIFFER[name]
    if elastic:
        return methods.build_elastic(decoder, arm, comm, seed=0, world_size=4)
    return methods.build(decoder, arm, comm, seed=0)


def gradient(method, step):
    tokens = torch.randint(toys.VOCAB, (2, 17), generator=torch.Generator().manual_seed(100 * step))
    token_loss(logits(method.module, tokens[:, :-1]), tokens[:, 1:]).backward()


def train(method, step):
    """As the elastic loop does it."""
    gradient(method, step)
    if method.sync.awaits_first_gradient:
        method.take(0, method.average(1, method.sync.first_gradient()))
    method.descend(LR)
    if buffers := method.sync.contributions(step):
        method.take(step, method.average(step, buffers))


def weights(method):
    return torch.cat([each.detach().flatten() for each in method.module.parameters()])


def snapshot(method):
    return copy.deepcopy((method.optimizer.state_dict(), method.sync.state_dict(), weights(method)))


def assert_same(left, right):
    """Nested state, bit for bit."""
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, list | tuple):
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    else:
        assert left == right


@pytest.mark.parametrize("name", ["lordo_global", "lordo_ns"])
def test_what_is_averaged_but_not_taken_leaves_no_trace(name):
    method = built(name)
    for step in (1, 2, 3):
        train(method, step)
    gradient(method, 4)
    method.descend(LR)
    buffers = method.sync.contributions(4)
    before = snapshot(method)
    first = method.average(4, buffers)
    assert_same(snapshot(method), before)
    method.regroup()
    second = method.average(4, buffers)
    assert_same(first.reduced["delta"].mean, second.reduced["delta"].mean)
    method.take(4, second)
    assert method.sync.last_step == 4


def test_a_group_that_stays_keeps_what_owners_lost():
    method = built("lordo_ns")
    for step in (1, 2, 3, 4):
        train(method, step)
    assert method.reducers["delta"].state_dict()
    method.regroup()
    assert not method.reducers["delta"].state_dict()


@pytest.mark.parametrize("name", ELASTIC)
def test_one_that_joins_goes_on_as_the_giver_would_without_what_only_that_one_knows(name):
    giver, joiner = built(name), built(name, seed=1)
    for step in range(1, 9):
        train(giver, step)
    for step in (1, 2, 3, 4, 5):
        train(joiner, step)
    gradient(joiner, 6)
    joiner.sync.contributions(8)  # it waits in a round that went on without it
    joiner.load_global_state(copy.deepcopy(giver.global_state()))
    for mine, theirs in zip(joiner.module.parameters(), giver.module.parameters(), strict=True):
        carried = giver.optimizer.state[theirs].get("carried")
        assert mine.grad is None if carried is None else torch.equal(mine.grad, carried)
    assert joiner.sync.round is None and joiner.sync.residual is None
    assert torch.equal(weights(joiner), giver.sync.x_sync)
    lossy = "residual" in giver.reducers["delta"].state_dict()
    assert lossy == (giver.config.wire != "fp32")
    giver.sync.return_to_sync()
    giver.sync.residual = None
    giver.regroup()
    joiner.regroup()
    for step in range(9, 17):
        train(giver, step)
        train(joiner, step)
    assert_same(snapshot(joiner), snapshot(giver))
