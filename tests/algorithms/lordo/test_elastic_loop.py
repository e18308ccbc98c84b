"""The elastic loop alone: as `Loop`, resumable. That others may die is tested with real jobs, in
tests/tasks/jobs/test_lost_workers.py."""

import pytest
import torch
import torch.distributed as dist

from algorithms.common import model
from algorithms.common.comm import Comm
from algorithms.common.errors import Preempted
from algorithms.common.loop import Loop
from algorithms.common.metrics import read_rows
from algorithms.lordo import methods
from algorithms.lordo.board import Board
from algorithms.lordo.elastic import Turn
from algorithms.lordo.elastic_loop import ElasticLoop
from tests import toys
from tests.loops import folder, new_model

TRAINING = toys.training(steps=14, log_every=2, eval_every=6, checkpoint_every=5)
"""With rounds of four: evaluations and checkpoints have partial ones of their own."""


def shared(tokens, run_dir, stop_requested=lambda: False):
    comm = Comm(None, torch.device("cpu"))
    common = {"model": new_model(), "tokens_dir": tokens, "run_dir": run_dir, "comm": comm}
    return common | {"peak_lr": toys.OPTIMIZER.lr, "stop_requested": stop_requested}


def elastic_run(tokens, run_dir, arm, training=TRAINING, stop_at=None, fail_at=None):
    """Hash of the weights, what was published."""
    published, now = [], 0
    common = shared(tokens, run_dir, lambda: stop_at is not None and now >= stop_at)
    board = Board(dist.HashStore(), rank=0, world_size=1, timeout_s=20.0)
    method = methods.build_elastic(common["model"], arm, common["comm"], seed=0, world_size=1)
    descend = method.descend

    def watched(lr):
        nonlocal now
        now += 1
        if now == fail_at:
            raise RuntimeError("killed")
        descend(lr)

    method.descend = watched
    loop = ElasticLoop(training, method=method, board=board, publish=published.append, **common)
    result = loop.run()
    assert published == [result]
    with method.synced():
        return model.weights_sha256(common["model"]), result["quality"]


def plain_run(tokens, run_dir, arm):
    common = shared(tokens, run_dir)
    method = methods.build(common["model"], arm, common["comm"], seed=0)
    result = Loop(TRAINING, method=method, **common).run()
    with method.synced():
        return model.weights_sha256(common["model"]), result["quality"]


def rows(run_dir, *more):
    keys = ("step", "tokens", "train/loss", "grad_norm", "lr", "val/loss", *more)
    return [{key: row.get(key) for key in keys} for row in read_rows(run_dir / "metrics.jsonl")]


@pytest.mark.parametrize("name", ["lordo_global", "lordo_ns", "buffered", "lordo_local"])
def test_as_long_as_none_is_lost_it_is_the_loop_of_the_others(tokens, tmp_path, name):
    arm = toys.RANKS_DIFFER[name]
    plain, elastic = folder(tmp_path / "plain"), folder(tmp_path / "elastic")
    assert elastic_run(tokens, elastic, arm) == plain_run(tokens, plain, arm)
    met = [row for row in rows(plain) if row["step"] in (4, 6, 8, 10, 12, 14)]
    assert rows(elastic) == met, "a row at every step at which workers meet"
    assert {row["workers"] for row in read_rows(elastic / "metrics.jsonl")} == {1}
    written = {path.name for path in (elastic / "checkpoints").iterdir()}
    assert written == {"step_00000010", "step_00000014"}


def test_rows_are_as_rare_as_they_are_asked_for(tokens, tmp_path):
    training = toys.training(steps=20, log_every=10, eval_every=20, checkpoint_every=20)
    elastic_run(tokens, tmp_path, toys.RANKS_DIFFER["diloco"], training)
    assert [row["step"] for row in rows(tmp_path)] == [12, 20], "the first meeting after step 10"


@pytest.mark.parametrize("name", ["lordo_global", "lordo_local"])
def test_killed_it_goes_on_from_the_newest_checkpoint(tokens, tmp_path, name):
    """With one worker nothing is lost but the steps that are redone."""
    arm = toys.RANKS_DIFFER[name]
    whole = elastic_run(tokens, folder(tmp_path / "whole"), arm)
    killed = folder(tmp_path / "killed")
    with pytest.raises(RuntimeError, match="killed"):
        elastic_run(tokens, killed, arm, fail_at=8)
    assert [path.name for path in (killed / "checkpoints").iterdir()] == ["step_00000005"]
    assert elastic_run(tokens, killed, arm) == whole
    assert rows(killed, "comm/payload_bytes") == rows(tmp_path / "whole", "comm/payload_bytes")


@pytest.mark.parametrize("name", ["lordo_global", "lordo_ns_carry"])
def test_a_worker_let_in_at_its_first_gradient_takes_no_step_with_it(tokens, tmp_path, name):
    """Also where what the giver carries lies in `.grad`."""
    arm = toys.RANKS_DIFFER[name]
    loops, steps = [], []
    for run_dir in (folder(tmp_path / "giver"), folder(tmp_path / "joiner")):
        common = shared(tokens, run_dir)
        board = Board(dist.HashStore(), rank=0, world_size=1, timeout_s=20.0)
        method = methods.build_elastic(common["model"], arm, common["comm"], seed=0, world_size=1)
        loops.append(
            ElasticLoop(TRAINING, method=method, board=board, publish=lambda _: None, **common)
        )
    giver, joiner = loops
    result = giver.run()

    def let_in(step, *_):
        joiner.load_state(giver.state())
        return Turn(TRAINING.steps, rejoined=True, stop=False, over=False)

    joiner.elastic.sync = let_in
    joiner.local.descend = steps.append
    assert joiner.run()["quality"] == result["quality"]
    assert steps == []


@pytest.mark.parametrize(("stop_at", "step"), [(2, 4), (4, 4), (6, 6), (13, 14)])
def test_stopped_it_goes_on_from_the_round_that_it_stopped_at(tokens, tmp_path, stop_at, step):
    """At 6 and 14 it stops between a sync and the evaluation of what that gave."""
    arm = toys.RANKS_DIFFER["lordo_global"]
    whole = elastic_run(tokens, folder(tmp_path / "whole"), arm)
    stopped = folder(tmp_path / "stopped")
    with pytest.raises(Preempted, match=f"stopped after step {step}; its checkpoint is written"):
        elastic_run(tokens, stopped, arm, stop_at=stop_at)
    assert elastic_run(tokens, stopped, arm) == whole
    assert rows(stopped) == rows(tmp_path / "whole")
