"""Runs of arms: real ranks against the simulator, killed and stopped ones against undisturbed."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from algorithms.async_pipeline import methods, modelled, trace
from algorithms.async_pipeline.config import PRESETS, ArmConfig
from algorithms.async_pipeline.simulated import Simulated
from algorithms.async_pipeline.stage import join
from algorithms.async_pipeline.trainers import gather_all
from algorithms.async_pipeline.training import Training
from algorithms.common import data, model
from algorithms.common.comm import Comm
from algorithms.common.errors import InputError, NonFiniteError, Preempted
from algorithms.common.loop import learning_rate, token_loss
from algorithms.common.metrics import read_rows
from tests import toys

OURS = PRESETS["ours"]
ARMS = {
    "async": ArmConfig(stages=2, optimizer=OURS),
    "async_accumulated": ArmConfig(stages=2, microbatches=2, stash="none", optimizer=OURS),
    "one_f_one_b": ArmConfig(schedule="one_f_one_b", stages=2, microbatches=2, optimizer=OURS),
    "gpipe": ArmConfig(schedule="gpipe", stages=2, microbatches=4, optimizer=PRESETS["adamw"]),
    "zero_bubble": ArmConfig(schedule="zero_bubble", stages=2, microbatches=4, optimizer=OURS),
}
SIMULATED = {
    "deep": ArmConfig(stages=4, executor="simulator", optimizer=OURS),
    "deep_no_stash": ArmConfig(
        stages=4, executor="simulator", stash="none", microbatches=2, optimizer=PRESETS["paper"]
    ),
    "one_stage": ArmConfig(stages=1, optimizer=PRESETS["nesterov"]),
}
REPEATS = (
    *("step", "tokens", "train/loss", "lr", "grad_norm", "val/loss", "val/bits_per_byte"),
    *("comm/payload_bytes", "comm/wire_bytes", "staleness/mean"),
)
"""What of a row is the same in every run."""


class Killed(Exception):
    """Stands for kill -9: nothing gets to write anything after it."""


def whole():
    return model.build(toys.UNTIED, vocab_size=toys.VOCAB, end_of_text=0, seed=0)


def train(comm, tokens, run_dir, arm, training, kill_at=None, stop_at=None):
    """One attempt on one rank: weights on rank 0 and what result.json would say, or the error. It
    is killed before the pause of update `kill_at`, or rank 0 asked to stop there."""
    decoder = whole()
    trainer = methods.build(decoder, arm, comm, training)
    run = trainer.run
    now = 0

    def watched(batches, until):
        nonlocal now
        now = until
        if until == kill_at:
            raise Killed
        return run(batches, until)

    trainer.run = watched
    made = Training(
        training,
        arm,
        trainer=trainer,
        parameters=model.parameter_count(decoder),
        tokens_dir=tokens,
        run_dir=run_dir,
        comm=comm,
        stop_requested=lambda: comm.rank == 0 and stop_at is not None and now >= stop_at,
    )
    try:
        result = made.run()
    except (Killed, Preempted, NonFiniteError) as error:
        return type(error).__name__, str(error)
    parts = gather_all(trainer, comm)
    sha = None if parts is None else model.weights_sha256(join(whole(), parts))
    return sha, result


def alone(*arguments, **more):
    return train(Comm(None, torch.device("cpu")), *arguments, **more)


def folder(path):
    path.mkdir()
    return path


def repeatable(run_dir):
    rows = read_rows(run_dir / "metrics.jsonl")
    return [{key: row.get(key) for key in REPEATS} for row in rows]


def test_an_asynchronous_run_is_its_simulation(ranks, tokens, tmp_path):
    """Losses, norms, evaluations and weights to the last bit; pauses change nothing."""
    training = toys.shared_training(log_every=3)
    real, simulated = folder(tmp_path / "real"), folder(tmp_path / "simulated")
    arm = ARMS["async"]
    (sha, result), _ = ranks.run(train, tokens, real, arm, training, world_size=2)
    expected = alone(tokens, simulated, replace(arm, executor="simulator"), training)
    assert sha == expected[0]
    same = [key for key in REPEATS if not key.startswith("comm/")]
    pairs = zip(repeatable(real), repeatable(simulated), strict=True)
    for ours, theirs in pairs:
        for key in same:
            if key == "grad_norm":  # the squares are summed in another order
                assert ours[key] == pytest.approx(theirs[key], rel=1e-12)
            else:
                assert ours[key] == theirs[key], key
    assert [row["step"] for row in repeatable(real)] == [3, 4, 6, 8, 9, 10]
    assert result["quality"]["staleness"] == pytest.approx((0.5 * 9) / 10)


@pytest.mark.parametrize("name", SIMULATED)
def test_one_process_is_exact_on_resume(tokens, tmp_path, name):
    arm, training = SIMULATED[name], toys.shared_training(log_every=2)
    undisturbed = folder(tmp_path / "whole")
    sha, result = alone(tokens, undisturbed, arm, training)
    for kill_at in (4, 10):
        run_dir = folder(tmp_path / f"killed_at_{kill_at}")
        assert alone(tokens, run_dir, arm, training, kill_at=kill_at)[0] == "Killed"
        again = alone(tokens, run_dir, arm, training)
        assert (again[0], again[1]["quality"]) == (sha, result["quality"])
        assert repeatable(run_dir) == repeatable(undisturbed)
    stopped = folder(tmp_path / "stopped")
    kind, message = alone(tokens, stopped, arm, training, stop_at=6)
    assert (kind, message) == ("Preempted", "stopped after step 6; its checkpoint is written")
    assert alone(tokens, stopped, arm, training)[0] == sha
    finished = alone(tokens, undisturbed, arm, training)
    assert (finished[0], finished[1]["quality"]) == (sha, result["quality"]), "nothing is left"


@pytest.mark.parametrize("name", ARMS)
def test_ranks_are_exact_on_resume(ranks, tokens, tmp_path, name):
    arm, training = ARMS[name], toys.shared_training()
    undisturbed, killed = folder(tmp_path / "whole"), folder(tmp_path / "killed")
    expected = ranks.run(train, tokens, undisturbed, arm, training, world_size=2)
    found = ranks.run(train, tokens, killed, arm, training, 8, world_size=2)
    assert {kind for kind, _ in found} == {"Killed"}
    again = ranks.run(train, tokens, killed, arm, training, world_size=2)
    assert [sha for sha, _ in again] == [sha for sha, _ in expected]
    assert [r["quality"] for _, r in again] == [r["quality"] for _, r in expected]
    assert repeatable(killed) == repeatable(undisturbed)
    timing = expected[0][1]["timing"]
    assert 0 < timing["utilisation"] < 1
    assert timing["bubble_pct"] == pytest.approx(100 * (1 - timing["utilisation"]))
    assert len(timing["trace"]) == 2


def test_a_stop_seen_by_one_rank_ends_all_at_the_same_update(ranks, tokens, tmp_path):
    arm, training = ARMS["async"], toys.shared_training()
    found = ranks.run(train, tokens, tmp_path, arm, training, None, 5, world_size=2)
    assert {m for _, m in found} == {"stopped after step 5; its checkpoint is written"}
    assert (tmp_path / "checkpoints" / "step_00000005").is_dir()


def test_one_stage_is_plain_training(tokens, tmp_path):
    training = toys.shared_training()
    arm = ArmConfig(stages=1, microbatches=2, optimizer=PRESETS["adamw"])
    sha, result = alone(tokens, tmp_path, arm, training)
    decoder = whole()
    settings = arm.optimizer.optimizer
    groups = [
        {"params": [p for p in decoder.parameters() if p.ndim > 1]},
        {"params": [p for p in decoder.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=1.0, betas=(0.9, 0.999), weight_decay=settings.weight_decay, fused=True
    )
    shards = data.TokenShards(tokens, "train")
    for step in range(10):
        batch = data.batch(
            shards, seed=0, step=step, rank=0, world_size=1, global_batch=8, length=16
        )
        for half in batch.chunk(2):
            scores = model.logits(decoder, half[:, :-1])
            (token_loss(scores, half[:, 1:]) / 2).backward()
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), settings.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step + 1, settings.lr, training)
        optimizer.step()
        optimizer.zero_grad()
    assert sha == model.weights_sha256(decoder)
    assert result["quality"]["val_loss"] == pytest.approx(_held_out(decoder, tokens), rel=1e-6)


def _held_out(decoder, tokens):
    shards = data.TokenShards(tokens, "val")
    [batch] = data.evaluation_batches(
        shards, sequences=5, length=16, batch_size=5, rank=0, world_size=1
    )
    with torch.no_grad():
        return token_loss(model.logits(decoder, batch[:, :-1]), batch[:, 1:]).item()


def test_modelled_times_have_names_of_their_own(tokens, tmp_path):
    _, result = alone(tokens, tmp_path, SIMULATED["deep"], toys.shared_training())
    rows = read_rows(tmp_path / "metrics.jsonl")
    measured = {"device_hours", "gpu_hours", "tokens_per_s", "pipeline/utilisation"}
    for row in rows:
        assert measured.isdisjoint(row)
        assert row["modelled_device_hours"] > 0
        share = row["pipeline/modelled_utilisation"]
        assert row["pipeline/modelled_bubble_pct"] == pytest.approx(100 * (1 - share))
    assert measured.isdisjoint(result["timing"]) and "utilisation" not in result["timing"]
    assert result["timing"]["simulated"] and len(result["timing"]["trace"]) == 4


def test_modelled_times_of_a_row_cost_no_more_as_the_run_goes_on(tokens, tmp_path, monkeypatch):
    """Only the picture in the end is made of all that was."""
    made, at_rows = 0, []

    def counted(*arguments):
        nonlocal made
        made += 1
        return trace.Event(*arguments)

    def pipeline(self, *arguments):
        found = original(self, *arguments)
        at_rows.append(made)
        return found

    original = Training._pipeline
    monkeypatch.setattr(modelled, "Event", counted)
    monkeypatch.setattr(Training, "_pipeline", pipeline)
    steps = 16
    training = toys.shared_training(steps=steps, log_every=1, eval_every=steps)
    alone(tokens, tmp_path, SIMULATED["deep"], training)
    assert len(at_rows) == steps
    costs = [b - a for a, b in pairwise(at_rows)]
    assert max(costs[6:]) <= max(costs[:6])
    after = made - at_rows[-1]
    once = sum(map(len, modelled.timeline([3, 2, 1, 0], steps, [1.0] * 4)))
    assert after < 1.5 * once


def test_modelled_times_are_those_of_the_timeline(tokens, tmp_path, monkeypatch):
    rows = []

    def busy(self, microbatches):
        found = original(self, microbatches)
        stages = self.timeline(microbatches)
        compute = sum(trace.seconds(events, *trace.COMPUTE) for events in stages)
        rows.append((found, (compute, len(stages) * trace.span(stages))))
        return found

    original = Simulated.busy
    monkeypatch.setattr(Simulated, "busy", busy)
    for name in ("deep", "deep_no_stash"):
        alone(tokens, folder(tmp_path / name), SIMULATED[name], toys.shared_training())
    assert len(rows) >= 20
    for found, expected in rows:
        assert found == pytest.approx(expected, rel=1e-12, abs=0)


def test_staleness_is_that_of_each_microbatch(tokens, tmp_path):
    """The first gradients are fresh, those after P-1 updates as old as they get."""
    alone(tokens, tmp_path, SIMULATED["deep"], toys.shared_training())
    found = [row["staleness/mean"] for row in read_rows(tmp_path / "metrics.jsonl")]
    assert found == [0, 0.75, 1.25, *[1.5] * 7]


@pytest.mark.parametrize("sequences", [3, 8, 13])
def test_the_held_out_set_need_not_fit_the_batches(tokens, tmp_path, sequences):
    """Batches of eight and of one give the same mean, up to how sums are rounded."""
    losses = []
    for microbatches in (1, 8):
        arm = ArmConfig(stages=1, microbatches=microbatches, optimizer=PRESETS["adamw"])
        training = toys.shared_training(eval_sequences=sequences, steps=2)
        run_dir = folder(tmp_path / str(microbatches))
        losses.append(alone(tokens, run_dir, arm, training)[1]["quality"]["val_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_run_that_diverges_says_where(tokens, tmp_path):
    broken = replace(OURS, optimizer=replace(OURS.optimizer, lr=1e30, clip_norm=0.0))
    arm = replace(SIMULATED["deep"], optimizer=broken)
    kind, message = alone(tokens, tmp_path, arm, toys.shared_training())
    assert kind == "NonFiniteError"
    weight = "model.layers.3.self_attn.q_proj.weight"  # on the last stage
    said = f"update 1: stage 3: gradient of {weight} is not finite, loss is nan"
    assert message == said


@pytest.mark.parametrize(
    "arm, message",
    [
        (ArmConfig(stages=9, executor="simulator", optimizer=OURS), "stages: 4 layers cannot fill"),
        (ArmConfig(stages=1, layers=[3], optimizer=OURS), "layers: sum is 3, the model has 4"),
    ],
)
def test_a_cut_that_cannot_be_is_one_line(tokens, tmp_path, arm, message):
    with pytest.raises(InputError, match=f"^{message}"):
        alone(tokens, tmp_path, arm, toys.shared_training())
