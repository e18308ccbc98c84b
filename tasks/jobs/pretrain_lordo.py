"""Job of stage `pretrain_lordo`: one arm of data-parallel pretraining.

torchrun --standalone --nproc-per-node 2 -m tasks.jobs.pretrain_lordo CONFIG.json

CONFIG.json is a `JobConfig`; everything the job writes lies beside it.
"""

from datetime import timedelta
from pathlib import Path

from tasks.jobs import entry


def run(config_path: Path) -> None:
    """Train the arm that `config_path` describes; see `entry.main` for what may be raised."""
    from algorithms.common import comm as communication
    from algorithms.common import data, environment, model, stopping
    from algorithms.common.config import from_dict
    from algorithms.common.errors import InputError
    from algorithms.common.files import read_json, write_json
    from algorithms.common.loop import Loop
    from algorithms.lordo import methods
    from algorithms.lordo.config import JobConfig

    config = from_dict(JobConfig, read_json(config_path))
    training, run_dir, tokens_dir = config.training, config_path.parent, Path(config.tokens_dir)
    sync = config.arm.sync
    patience = {} if sync is None else {"timeout": timedelta(seconds=sync.timeout_s)}
    comm = communication.init(training.backend, **patience)
    if comm.world_size != training.ranks:
        raise InputError(
            f"{config_path}: training.ranks is {training.ranks}, torchrun started {comm.world_size}"
        )
    environment.check_precision(training.precision, comm.device)
    facts = environment.describe(comm)
    shards = data.TokenShards(tokens_dir, "train")
    if comm.rank == 0:
        write_json(run_dir / "env.json", facts)
        shards.verify()
        data.TokenShards(tokens_dir, "val").verify()
    decoder = model.build(
        config.model,
        vocab_size=shards.vocab_size,
        end_of_text=shards.end_of_text,
        seed=training.seed,
    ).to(comm.device)
    method = methods.build(decoder, config.arm, comm, seed=training.seed)
    loop = Loop(
        training,
        peak_lr=config.arm.optimizer.lr,
        model=decoder,
        method=method,
        tokens_dir=tokens_dir,
        run_dir=run_dir,
        comm=comm,
        stop_requested=stopping.on_signals(),
    )
    result = loop.run()
    if comm.rank == 0:
        result["timing"]["oversubscribed"] = facts["oversubscribed"]
        with method.synced():
            result["weights_sha256"] = model.weights_sha256(decoder)
            model.save(decoder, tokens_dir, run_dir / "model")
        write_json(run_dir / "result.json", result)
    comm.barrier()
    communication.shutdown(comm)


if __name__ == "__main__":
    entry.main(run)
