"""Checkpoints: what is restored is what was saved, and a damaged one is passed over, said aloud."""

import logging
import os

import pytest
import torch

from algorithms.common.checkpoint import Checkpoints
from algorithms.common.comm import Comm
from algorithms.common.errors import InputError
from tests.distributed import RankError

ALONE = Comm(None, torch.device("cpu"))


def network(width=4):
    torch.manual_seed(width)
    module = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Linear(width, 1))
    return module, torch.optim.AdamW(module.parameters(), lr=0.1)


def advance(module, optimizer, steps=1):
    for _ in range(steps):
        module(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def saved(folder, steps=(1, 2, 3), keep=3):
    """Checkpoints after these steps, and the network as it was after the last."""
    module, optimizer = network()
    checkpoints = Checkpoints(folder, keep, ALONE)
    for step in steps:
        advance(module, optimizer)
        checkpoints.save(step, module, optimizer, {"note": [step, 0.1]})
    return module, optimizer


def largest(folder):
    return max(folder.iterdir(), key=lambda file: file.stat().st_size)


def test_weights_moments_and_notes_come_back_bit_for_bit(tmp_path):
    module, optimizer = saved(tmp_path)
    other, its_optimizer = network()
    step, notes = Checkpoints(tmp_path, 3, ALONE).load(other, its_optimizer)
    assert (step, notes) == (3, {"note": [3, 0.1]})
    advance(module, optimizer, 2)
    advance(other, its_optimizer, 2)
    for ours, theirs in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_without_a_checkpoint_nothing_changes(tmp_path):
    module, optimizer = network()
    assert Checkpoints(tmp_path, 1, ALONE).load(module, optimizer) == (0, {})
    assert not optimizer.state


def test_only_the_last_k_are_kept(tmp_path):
    saved(tmp_path, steps=(1, 2, 3, 4), keep=2)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["step_00000003", "step_00000004"]


def truncate(folder):
    os.truncate(largest(folder), 10)


def remove_file(folder):
    largest(folder).unlink()


def remove_seal(folder):
    (folder / "seal.json").unlink()


def garble_seal(folder):
    (folder / "seal.json").write_text("{")


def remove_metadata(folder):
    (folder / ".metadata").unlink()


def garble_metadata(folder):
    file = folder / ".metadata"
    file.write_bytes(file.read_bytes()[::-1])


@pytest.mark.parametrize(
    "damage", [truncate, remove_file, remove_seal, garble_seal, remove_metadata, garble_metadata]
)
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(tmp_path, caplog, damage):
    saved(tmp_path)
    damage(tmp_path / "step_00000003")
    module, optimizer = network()
    with caplog.at_level(logging.WARNING):
        step, notes = Checkpoints(tmp_path, 3, ALONE).load(module, optimizer)
    assert (step, notes["note"][0]) == (2, 2)
    assert "step_00000003 is passed over" in caplog.text
    Checkpoints(tmp_path, 3, ALONE).save(3, module, optimizer, {})  # takes the damaged one's place
    assert Checkpoints(tmp_path, 3, ALONE).load(module, optimizer)[0] == 3


def test_a_half_written_one_of_a_killed_run_is_not_seen(tmp_path):
    saved(tmp_path)
    (tmp_path / "step_00000003").rename(tmp_path / ".writing_step_00000003")
    module, optimizer = network()
    assert Checkpoints(tmp_path, 3, ALONE).load(module, optimizer)[0] == 2
    Checkpoints(tmp_path, 3, ALONE).save(3, module, optimizer, {})
    assert not (tmp_path / ".writing_step_00000003").exists()


def test_one_of_another_model_is_an_error_that_names_it(tmp_path):
    saved(tmp_path)
    module, optimizer = network(width=5)
    with pytest.raises(InputError, match="step_00000003: cannot be loaded"):
        Checkpoints(tmp_path, 3, ALONE).load(module, optimizer)


def save_and_load(comm, folder):
    module, optimizer = network()
    advance(module, optimizer)
    Checkpoints(folder, 2, comm).save(1, module, optimizer, {"rank": "all"})
    other, its_optimizer = network()
    step, notes = Checkpoints(folder, 2, comm).load(other, its_optimizer)
    same = all(
        torch.equal(ours, theirs)
        for ours, theirs in zip(module.parameters(), other.parameters(), strict=True)
    )
    return step, notes, same


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_all_ranks_restore_the_same(ranks, tmp_path, world_size):
    results = ranks.run(save_and_load, tmp_path, world_size=world_size)
    assert results == [(1, {"rank": "all"}, True)] * world_size


def own_state(rank):
    return {
        "weights": torch.full((3, rank + 1), float(rank)),
        "optimizer": {0: {"step": torch.tensor(7.0), "betas": (0.9, 1 / 3)}},
        "phase": rank,
    }


def save_and_load_own(comm, folder):
    checkpoints = Checkpoints(folder, 2, comm)
    checkpoints.save_own(4, own_state(comm.rank), {"loss": 0.1})
    return checkpoints.load_own()


@pytest.mark.parametrize("world_size", [1, 3])
def test_each_rank_gets_back_its_own_state(ranks, tmp_path, world_size):
    found = ranks.run(save_and_load_own, tmp_path, world_size=world_size)
    for rank, (step, own, noted) in enumerate(found):
        expected = own_state(rank)
        assert (step, noted, own["phase"]) == (4, {"loss": 0.1}, rank)
        assert torch.equal(own["weights"], expected["weights"])
        assert own["optimizer"][0]["betas"] == (0.9, 1 / 3)
        assert torch.equal(own["optimizer"][0]["step"], torch.tensor(7.0))


def load_own(comm, folder):
    return Checkpoints(folder, 2, comm).load_own()


def test_a_rank_without_a_state_of_its_own_is_named(ranks, tmp_path):
    ranks.run(save_and_load_own, tmp_path, world_size=1)
    with pytest.raises(RankError, match="holds no state of rank 1"):
        ranks.run(load_own, tmp_path, world_size=2)


def peek_and_load_another(comm, folder):
    checkpoints = Checkpoints(folder, 2, comm)
    return checkpoints.peek(), checkpoints.load_own(2)


@pytest.mark.parametrize("world_size", [1, 4])
def test_a_world_of_another_size_can_read_the_state_of_any_rank(ranks, tmp_path, world_size):
    ranks.run(save_and_load_own, tmp_path, world_size=3)
    for peeked, found in ranks.run(peek_and_load_another, tmp_path, world_size=world_size):
        assert peeked == (4, {"loss": 0.1})
        step, state, noted = found
        assert (step, noted, state["phase"]) == (4, {"loss": 0.1}, 2)
        assert torch.equal(state["weights"], own_state(2)["weights"])


def test_without_a_checkpoint_there_is_no_own_state(tmp_path):
    assert Checkpoints(tmp_path, 2, ALONE).load_own() == (0, {}, {})
    assert Checkpoints(tmp_path, 2, ALONE).peek() == (0, {})


def test_a_damaged_own_checkpoint_is_passed_over(tmp_path):
    checkpoints = Checkpoints(tmp_path, 3, ALONE)
    checkpoints.save_own(1, own_state(0), {})
    checkpoints.save_own(2, own_state(1), {})
    os.truncate(largest(tmp_path / "step_00000002"), 10)
    step, own, _ = checkpoints.load_own()
    assert step == 1
    assert own["phase"] == 0
