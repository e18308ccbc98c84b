"""Local arms in the real loop: exact on resume at any step, ranks equal where they should be."""

import pytest

from algorithms.common import model
from algorithms.common.errors import NonFiniteError
from tests import toys
from tests.distributed import RankError
from tests.loops import folder, loop, repeatable, train


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


def guarded_steps(comm, tokens, run_dir, training, arm):
    called = []

    def guard(step, work):
        sent = comm.payload_bytes
        result = work()
        called.append((step, comm.payload_bytes > sent))
        return result

    loop(comm, tokens, run_dir, training, arm, guard=guard).run()
    return called


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("lordo_global", [1, 1, 4, 4, 8, 8, 10, 10, 10]),  # the first gradient; the evaluation
        ("delayed", [6, 6, 10, 10, 10, 10]),
    ],
)
def test_whatever_ranks_exchange_in_a_round_is_guarded(ranks, tokens, tmp_path, name, steps):
    """The wait for each other comes first; a delayed round is sent by a thread, and only its end
    is waited for."""
    training = toys.training(ranks=4, log_every=10, eval_every=10, checkpoint_every=10)
    arm = toys.RANKS_DIFFER[name]
    found = ranks.run(guarded_steps, tokens, tmp_path, training, arm)
    for called in found:
        assert [step for step, _ in called] == steps
        assert sum(sent for _, sent in called) == len(steps) - len(set(steps))


def train_poisoned(comm, tokens, run_dir, training, arm):
    kind, message = train(comm, tokens, run_dir, training, arm, poison_at=1)
    raise NonFiniteError(message) if kind == "NonFiniteError" else AssertionError(kind)


def test_a_rank_that_goes_wrong_between_rounds_names_itself(ranks, tokens, tmp_path):
    training = toys.training(ranks=2, log_every=10, eval_every=10, checkpoint_every=10)
    with pytest.raises(RankError, match="step 2: rank 1: .*model.norm.weight is not finite"):
        ranks.run(train_poisoned, tokens, tmp_path, training, toys.local(), world_size=2)
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
    made = loop(comm, tokens, run_dir, training, arm)
    made.run()
    own = model.weights_sha256(made.model)
    with made.method.synced():
        return own, model.weights_sha256(made.model)
