"""Local arms in the real loop: exact on resume at any step, ranks equal where they should be."""

import pytest
import torch

from algorithms.common import model
from algorithms.common.errors import NonFiniteError, Preempted
from algorithms.common.loop import Loop
from algorithms.common.metrics import read_rows
from algorithms.lordo import methods
from tests import toys


class Killed(Exception):
    """Stands for kill -9: nothing gets to write anything after it."""


def train(comm, tokens, run_dir, training, arm, kill_at=None, stop_at=None, poison_at=None):
    """One attempt on one rank: weights, and what result.json would say, or the error."""
    decoder = model.build(toys.MODEL, vocab_size=toys.VOCAB, end_of_text=0, seed=0)
    method = methods.build(decoder, arm, comm, seed=0)
    update, now = method.update, 0

    def watched(step, lr):
        nonlocal now
        now = step
        if step == kill_at:
            raise Killed
        update(step, lr)
        if step == poison_at and comm.rank == comm.world_size - 1:
            with torch.no_grad():
                decoder.model.norm.weight[0] = torch.inf

    method.update = watched
    loop = Loop(
        training,
        peak_lr=arm.optimizer.lr,
        model=decoder,
        method=method,
        tokens_dir=tokens,
        run_dir=run_dir,
        comm=comm,
        stop_requested=lambda: comm.rank == 0 and stop_at is not None and now >= stop_at - 1,
    )
    try:
        quality = loop.run()["quality"]
    except (Killed, Preempted, NonFiniteError) as error:
        return type(error).__name__, str(error)
    with method.synced():
        return model.weights_sha256(decoder), quality


def repeatable(run_dir):
    keys = ("step", "train/loss", "lr", "grad_norm", "val/loss", "comm/payload_bytes")
    return [{key: row.get(key) for key in keys} for row in read_rows(run_dir / "metrics.jsonl")]


@pytest.fixture
def tokens(tmp_path):
    return toys.write_tokens(tmp_path / "tokens")


def folder(path):
    path.mkdir()
    return path


@pytest.mark.slow
@pytest.mark.parametrize("name", toys.RANKS_DIFFER)
def test_killed_or_stopped_at_any_step_a_run_resumes_exactly(ranks, tokens, tmp_path, name):
    """Ten steps, rounds of four, rows every two, evaluations every five, checkpoints every three:
    nothing falls together."""
    arm, size = toys.RANKS_DIFFER[name], 4 if name == "delayed" else 2
    training = toys.training(ranks=size, log_every=2, eval_every=5)
    whole = folder(tmp_path / "whole")
    expected = ranks.run(train, tokens, whole, training, arm, world_size=size)
    assert all(each == expected[0] for each in expected)
    for kill_at in (2, 5, 8):
        run_dir = folder(tmp_path / f"killed_at_{kill_at}")
        killed = ranks.run(train, tokens, run_dir, training, arm, kill_at, world_size=size)
        assert {kind for kind, _ in killed} == {"Killed"}
        assert ranks.run(train, tokens, run_dir, training, arm, world_size=size) == expected
        assert repeatable(run_dir) == repeatable(whole)
    for stop_at in (2, 6, 8):  # 6 is a checkpoint's step; at 2 and 8 a round is open or in flight
        run_dir = folder(tmp_path / f"stopped_at_{stop_at}")
        stopped = ranks.run(train, tokens, run_dir, training, arm, None, stop_at, world_size=size)
        assert {m for _, m in stopped} == {
            f"stopped after step {stop_at}; its checkpoint is written"
        }
        assert ranks.run(train, tokens, run_dir, training, arm, world_size=size) == expected
        assert repeatable(run_dir) == repeatable(whole)


@pytest.mark.parametrize("name", ["local_adam", "lordo_global", "lordo_ns"])
@pytest.mark.parametrize("world_size", [1, 4])
def test_ranks_end_equal_and_the_loss_falls(ranks, tokens, tmp_path, name, world_size):
    training = toys.training(ranks=world_size, steps=30, eval_every=30, checkpoint_every=30)
    arm = toys.RANKS_DIFFER[name]
    found = ranks.run(train, tokens, tmp_path, training, arm, world_size=world_size)
    assert all(each == found[0] for each in found)
    first, last = repeatable(tmp_path)[0], repeatable(tmp_path)[-1]
    assert last["val/loss"] < first["train/loss"] - 0.5


def test_between_rounds_nothing_is_sent_but_at_rows(ranks, tokens, tmp_path):
    """Payload grows at syncs alone: weights every four steps, moments never."""
    training = toys.training(ranks=2, steps=12, eval_every=12, checkpoint_every=12)
    arm = toys.local(outer="nesterov", outer_lr=0.7, outer_momentum=0.9)
    ranks.run(train, tokens, tmp_path, training, arm, world_size=2)
    paid = [row["comm/payload_bytes"] for row in repeatable(tmp_path)]
    grew = [step for step, (a, b) in enumerate(zip([0, *paid], paid, strict=False), 1) if b > a]
    assert grew == [4, 8, 12]


def test_a_rank_that_goes_wrong_between_rounds_names_itself(ranks, tokens, tmp_path):
    training = toys.training(ranks=2, log_every=10, eval_every=10, checkpoint_every=10)
    arm = toys.local()
    with pytest.raises(Exception, match="hung|step 2: rank 1: .*model.norm.weight is not finite"):
        found = ranks.run(
            train, tokens, tmp_path, training, arm, None, None, 1, world_size=2, timeout=5
        )
        raise AssertionError(found)
    assert not list((tmp_path / "checkpoints").glob("step_*"))


def test_the_saved_model_is_the_synced_one(ranks, tokens, tmp_path):
    """With residuals in the weights, ranks differ by what the wire lost; inside `synced` not."""
    training = toys.training(ranks=2)
    arm = toys.RANKS_DIFFER["lordo_ns"]
    hashes = ranks.run(own_and_synced, tokens, tmp_path, training, arm, world_size=2)
    own, synced = zip(*hashes, strict=True)
    assert own[0] != own[1]
    assert synced[0] == synced[1]


def own_and_synced(comm, tokens, run_dir, training, arm):
    decoder = model.build(toys.MODEL, vocab_size=toys.VOCAB, end_of_text=0, seed=0)
    method = methods.build(decoder, arm, comm, seed=0)
    Loop(
        training,
        peak_lr=arm.optimizer.lr,
        model=decoder,
        method=method,
        tokens_dir=tokens,
        run_dir=run_dir,
        comm=comm,
    ).run()
    own = model.weights_sha256(decoder)
    with method.synced():
        return own, model.weights_sha256(decoder)
