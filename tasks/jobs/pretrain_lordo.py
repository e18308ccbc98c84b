"""Job of stage `pretrain_lordo`: one arm of data-parallel pretraining.

torchrun --standalone --nproc-per-node 2 -m tasks.jobs.pretrain_lordo CONFIG.json

CONFIG.json is a `JobConfig`; everything the job writes lies beside it. A worker of an arm whose
sync is elastic is the child of a small parent that starts it again.
"""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

from tasks.jobs import entry, restarts


def run(config_path: Path) -> None:
    """Train the arm that `config_path` describes; see `entry.main` for what may be raised."""
    import torch

    from algorithms.common import comm as communication
    from algorithms.common import data, environment, model, stopping
    from algorithms.common.config import from_dict
    from algorithms.common.files import read_json, write_json
    from algorithms.common.loop import Loop, Method, unguarded
    from algorithms.lordo import attendance, methods
    from algorithms.lordo.board import Board, connect
    from algorithms.lordo.config import JobConfig
    from algorithms.lordo.elastic_loop import ElasticLoop

    config = from_dict(JobConfig, read_json(config_path))
    training, run_dir, tokens_dir = config.training, config_path.parent, Path(config.tokens_dir)
    sync = config.arm.sync
    elastic = sync is not None and sync.elastic
    entry.require_ranks(config_path, config.ranks)
    rank, world_size = int(os.environ.get("RANK", "0")), config.ranks
    if elastic:  # whose group comes and goes with the members
        comm = communication.Comm(None, torch.device("cpu"))
    else:
        patience = {} if sync is None else {"timeout": timedelta(seconds=sync.timeout_s)}
        comm = communication.init(training.backend, **patience)
    environment.check_precision(training.precision, comm.device)
    facts = environment.describe(comm)
    if elastic:
        facts |= {"backend": training.backend, "world_size": world_size}
    shards = data.TokenShards(tokens_dir, "train")
    if rank == 0:
        write_json(run_dir / "env.json", facts)
        shards.verify()
        data.TokenShards(tokens_dir, "val").verify()
    decoder = model.build(
        config.model,
        vocab_size=shards.vocab_size,
        end_of_text=shards.end_of_text,
        seed=training.seed,
    ).to(comm.device)
    common: dict[str, Any] = {
        "peak_lr": config.arm.optimizer.lr,
        "model": decoder,
        "tokens_dir": tokens_dir,
        "run_dir": run_dir,
        "comm": comm,
        "stop_requested": stopping.on_signals(),
    }

    def publish(result: dict[str, Any]) -> None:
        result["timing"]["oversubscribed"] = facts["oversubscribed"]
        with method.synced():
            result["weights_sha256"] = model.weights_sha256(decoder)
            model.save(decoder, tokens_dir, run_dir / "model")
        write_json(run_dir / "result.json", result)

    method: Method
    if elastic:
        assert sync is not None
        store = connect(sync.timeout_s, elastic=True)
        board = Board(store, rank=rank, world_size=world_size, timeout_s=sync.timeout_s)
        method = local = methods.build_elastic(
            decoder, config.arm, comm, seed=training.seed, world_size=world_size
        )
        ElasticLoop(training, method=local, board=board, publish=publish, **common).run()
        return
    guard = unguarded if sync is None else attendance.guard(comm, sync.timeout_s)
    method = methods.build(decoder, config.arm, comm, seed=training.seed, guard=guard)
    result = Loop(training, method=method, guard=guard, **common).run()
    if rank == 0:
        publish(result)
    comm.barrier()
    communication.shutdown(comm)


if __name__ == "__main__":
    entry.main(restarts.restarting(run, elastic=lambda config: config["arm"]["sync"]["elastic"]))
