"""Runs of the training loop on a toy model, which tests kill, stop and poison."""

import torch

from algorithms.common import model
from algorithms.common.errors import NonFiniteError, Preempted
from algorithms.common.loop import Loop, unguarded
from algorithms.common.metrics import read_rows
from algorithms.lordo import methods
from tests import toys

REPEATS = ("step", "tokens", "train/loss", "lr", "grad_norm", "val/loss", "comm/payload_bytes")
"""What of a row is the same in every run."""


class Killed(Exception):
    """Stands for kill -9: nothing gets to write anything after it."""


def new_model(seed=0):
    return model.build(toys.MODEL, vocab_size=toys.VOCAB, end_of_text=0, seed=seed)


def loop(
    comm, tokens, run_dir, training, arm=toys.DDP, decoder=None, guard=unguarded, **more
) -> Loop:
    """One rank's, of a new model unless one is given."""
    decoder = new_model() if decoder is None else decoder
    return Loop(
        training,
        peak_lr=arm.optimizer.lr,
        model=decoder,
        method=methods.build(decoder, arm, comm, seed=0, guard=guard),
        tokens_dir=tokens,
        run_dir=run_dir,
        comm=comm,
        guard=guard,
        **more,
    )


def train(
    comm, tokens, run_dir, training, arm=toys.DDP, kill_at=None, stop_at=None, poison_at=None
):
    """One attempt on one rank: weights, and what result.json would say, or the error.

    It is killed within a step, or rank 0 is asked to stop by the end of one, or a weight of the
    last rank is infinite after one.
    """
    now = 0
    made = loop(
        comm,
        tokens,
        run_dir,
        training,
        arm,
        stop_requested=lambda: comm.rank == 0 and stop_at is not None and now >= stop_at - 1,
    )
    update = made.method.update

    def watched(step, lr):
        nonlocal now
        now = step
        if step == kill_at:
            raise Killed
        update(step, lr)
        if step == poison_at and comm.rank == comm.world_size - 1:
            with torch.no_grad():
                made.model.model.norm.weight[0] = torch.inf

    made.method.update = watched
    try:
        quality = made.run()["quality"]
    except (Killed, Preempted, NonFiniteError) as error:
        return type(error).__name__, str(error)
    with made.method.synced():
        return model.weights_sha256(made.model), quality


def repeatable(run_dir):
    """The rows of a run, without what differs between two runs."""
    rows = read_rows(run_dir / "metrics.jsonl")
    return [{key: row.get(key) for key in REPEATS} for row in rows]


def folder(path):
    """Make it."""
    path.mkdir()
    return path
