"""The training loop: equal to plain training, exact on resume at every rank count, never silent."""

import contextlib
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from algorithms.common import data, model
from algorithms.common.adamw import adamw
from algorithms.common.comm import Comm
from algorithms.common.config import ModelConfig
from algorithms.common.files import read_json
from algorithms.common.loop import learning_rate
from algorithms.common.metrics import read_rows
from tests import toys
from tests.loops import Killed, folder, loop, new_model, repeatable, train


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_killed_at_any_step_a_run_resumes_to_the_same_weights(ranks, tokens, tmp_path, world_size):
    training = toys.training(ranks=world_size, accumulation=2)
    whole = folder(tmp_path / "whole")
    expected = ranks.run(train, tokens, whole, training, world_size=world_size)
    assert len({sha for sha, _ in expected}) == 1, "ranks end with different weights"
    for kill_at in (1, 2, 3, 4, 6, 8, 10):
        run_dir = folder(tmp_path / f"killed_at_{kill_at}")
        killed = ranks.run(
            train, tokens, run_dir, training, toys.DDP, kill_at, world_size=world_size
        )
        assert {kind for kind, _ in killed} == {"Killed"}
        resumed = ranks.run(train, tokens, run_dir, training, world_size=world_size)
        assert resumed == expected
        assert repeatable(run_dir) == repeatable(whole)
        assert [row["step"] for row in repeatable(run_dir)] == list(range(1, 11))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_stop_seen_by_one_rank_ends_all_at_the_same_step(ranks, tokens, tmp_path, world_size):
    training = toys.training(ranks=world_size)
    whole, stopped = folder(tmp_path / "whole"), folder(tmp_path / "stopped")
    expected = ranks.run(train, tokens, whole, training, world_size=world_size)
    first = ranks.run(train, tokens, stopped, training, toys.DDP, None, 5, world_size=world_size)
    assert {message for _, message in first} == {"stopped after step 5; its checkpoint is written"}
    assert (stopped / "checkpoints" / "step_00000005").is_dir()
    assert ranks.run(train, tokens, stopped, training, world_size=world_size) == expected
    assert repeatable(stopped) == repeatable(whole)


def test_a_finished_run_started_again_trains_nothing_and_says_the_same(ranks, tokens, tmp_path):
    training = toys.training(ranks=2)
    first = ranks.run(train, tokens, tmp_path, training, world_size=2)
    before = (tmp_path / "metrics.jsonl").read_text()
    assert ranks.run(train, tokens, tmp_path, training, world_size=2) == first
    assert (tmp_path / "metrics.jsonl").read_text() == before


def test_one_rank_equals_a_plain_loop_of_torch(tokens, tmp_path):
    """The reference: AdamW on the mean loss of the same batches, written out."""
    training = toys.training(accumulation=1, steps=6)
    sha, _ = train(Comm(None, torch.device("cpu")), tokens, tmp_path, training)

    shards = data.TokenShards(tokens, "train")
    reference = new_model()
    optimizer = adamw(reference, toys.OPTIMIZER)
    for step in range(1, 7):
        batch = data.batch(
            shards, seed=0, step=step - 1, rank=0, world_size=1, global_batch=8, length=16
        )
        scores = reference(input_ids=batch[:, :-1]).logits
        F.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, 1e-2, training)
        optimizer.step()
        optimizer.zero_grad()
    assert model.weights_sha256(reference) == sha


def test_more_ranks_and_accumulation_train_on_the_same_batches(ranks, tokens, tmp_path):
    """Sums are taken in another order, so equal to rounding, not to the bit."""
    losses = []
    for world_size, accumulation in ((1, 1), (2, 1), (2, 2), (4, 2)):
        run_dir = folder(tmp_path / f"{world_size}x{accumulation}")
        training = toys.training(ranks=world_size, accumulation=accumulation)
        ranks.run(train, tokens, run_dir, training, world_size=world_size)
        losses.append([row["train/loss"] for row in read_rows(run_dir / "metrics.jsonl")])
    np.testing.assert_allclose(losses[1:], np.broadcast_to(losses[0], (3, 10)), rtol=2e-4)
    assert losses[0][-1] < 0.95 * losses[0][0], "the model learns nothing"


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_broken_weight_stops_all_ranks_before_a_checkpoint(ranks, tokens, tmp_path, world_size):
    training = toys.training(ranks=world_size, checkpoint_every=4)
    outcomes = ranks.run(
        train, tokens, tmp_path, training, toys.DDP, None, None, 3, world_size=world_size
    )
    assert {kind for kind, _ in outcomes} == {"NonFiniteError"}
    for _, message in outcomes:
        assert message.startswith(f"step 4: rank {world_size - 1}: loss is nan")
        assert "model.norm.weight" in message
    assert not list((tmp_path / "checkpoints").glob("step_*"))


def train_from_directory(comm, tokens, run_dir, training, place, kill_at=None):
    """A GPT-2 with dropout, loaded from disk: such a model comes in evaluation mode."""
    decoder = model.build(ModelConfig(path=str(place)), vocab_size=97, end_of_text=0, seed=0)
    steps = 0

    def stop_requested():
        nonlocal steps
        steps += 1
        if steps == kill_at:
            raise Killed
        return False

    options = {"decoder": decoder, "stop_requested": stop_requested}
    with contextlib.suppress(Killed):
        loop(comm, tokens, run_dir, training, **options).run()
    return model.weights_sha256(decoder)


def test_dropout_is_on_from_the_first_step_and_repeats_on_resume(ranks, tokens, tmp_path):
    config = ModelConfig(**(toys.MODEL.to_dict() | {"family": "gpt2", "num_key_value_heads": 2}))
    random = model.build(config, vocab_size=97, end_of_text=0, seed=0)
    model.save(random, tmp_path, tmp_path / "gpt2")
    training = toys.training(ranks=2)
    hashes = []
    for name, kills in (("whole", [None]), ("killed", [6, None])):
        run_dir = folder(tmp_path / name)
        for kill_at in kills:
            arguments = (tokens, run_dir, training, tmp_path / "gpt2", kill_at)
            results = ranks.run(train_from_directory, *arguments, world_size=2)
        hashes.append(results)
    assert random.config.attn_pdrop > 0
    assert hashes[0] == hashes[1]


def test_bytes_are_those_of_the_gradients_and_nothing_hidden(ranks, tokens, tmp_path):
    training = toys.training(ranks=2)
    ranks.run(train, tokens, tmp_path, training, world_size=2)
    parameters = sum(p.numel() for p in new_model().parameters())
    for row in read_rows(tmp_path / "metrics.jsonl"):
        assert row["comm/gradients/payload_bytes"] == 4 * parameters * row["step"]


def test_held_out_loss_is_that_of_the_plain_sum(tokens, tmp_path):
    training = toys.training(steps=1, warmup_steps=0, eval_every=1)
    made = loop(Comm(None, torch.device("cpu")), tokens, tmp_path, training)
    held_out = made.evaluate(0)
    shards = data.TokenShards(tokens, "val")
    windows = shards.read(np.arange(5) * shards.windows(16) // 5, 16)
    with torch.no_grad():
        scores = made.model(input_ids=windows[:, :-1]).logits
    loss = F.cross_entropy(scores.flatten(0, 1), windows[:, 1:].flatten()).item()
    assert held_out["val/loss"] == pytest.approx(loss, rel=1e-6)
    assert held_out["val/perplexity"] == pytest.approx(math.exp(loss), rel=1e-6)
    assert held_out["val/bits_per_byte"] == pytest.approx(loss / math.log(2) / 3, rel=1e-6)


def test_learning_rate_warms_up_and_falls_to_its_floor():
    training = toys.training(steps=100, warmup_steps=10, final_lr_fraction=0.1)
    rates = [learning_rate(step, 1.0, training) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    assert rates[-1] == pytest.approx(0.1)
    assert rates[9:] == sorted(rates[9:], reverse=True)


def test_checkpoints_keep_the_last_k(ranks, tokens, tmp_path):
    training = toys.training(ranks=2, checkpoint_every=2, keep_checkpoints=2)
    ranks.run(train, tokens, tmp_path, training, world_size=2)
    names = sorted(each.name for each in (tmp_path / "checkpoints").iterdir())
    assert names == ["step_00000008", "step_00000010"]
    assert read_json(tmp_path / "checkpoints" / "step_00000010" / "seal.json")
