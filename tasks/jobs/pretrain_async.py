"""Job of stage `pretrain_async`: one arm of pretraining through a pipeline.

torchrun --standalone --nproc-per-node 2 -m tasks.jobs.pretrain_async CONFIG.json

CONFIG.json is a `JobConfig`; everything the job writes lies beside it. Ranks talk by gloo, on CPUs.
"""

from pathlib import Path
from typing import Any

from tasks.jobs import entry


def run(config_path: Path) -> None:
    """Train the arm that `config_path` describes; see `entry.main` for what may be raised."""
    from algorithms.async_pipeline import methods
    from algorithms.async_pipeline.config import JobConfig
    from algorithms.async_pipeline.stage import join
    from algorithms.async_pipeline.trainers import gather_all
    from algorithms.async_pipeline.training import Training
    from algorithms.common import comm as communication
    from algorithms.common import data, environment, model, stopping
    from algorithms.common.config import from_dict
    from algorithms.common.files import read_json, write_json

    config = from_dict(JobConfig, read_json(config_path))
    training, run_dir, tokens_dir = config.training, config_path.parent, Path(config.tokens_dir)
    entry.require_ranks(config_path, config.ranks)
    comm = communication.init("gloo")
    facts = environment.describe(comm)
    shards = data.TokenShards(tokens_dir, "train")
    if comm.rank == 0:
        write_json(run_dir / "env.json", facts)
        shards.verify()
        data.TokenShards(tokens_dir, "val").verify()

    def whole() -> Any:
        return model.build(
            config.model,
            vocab_size=shards.vocab_size,
            end_of_text=shards.end_of_text,
            seed=training.seed,
        )

    decoder = whole()
    trainer = methods.build(decoder, config.arm, comm, training)
    parameters = model.parameter_count(decoder)
    del decoder  # a rank keeps its stages alone
    result = Training(
        training,
        config.arm,
        trainer=trainer,
        parameters=parameters,
        tokens_dir=tokens_dir,
        run_dir=run_dir,
        comm=comm,
        stop_requested=stopping.on_signals(),
    ).run()
    parts = gather_all(trainer, comm)
    if parts is not None:
        decoder = join(whole(), parts)
        result["timing"]["oversubscribed"] = facts["oversubscribed"]
        result["weights_sha256"] = model.weights_sha256(decoder)
        model.save(decoder, tokens_dir, run_dir / "model")
        write_json(run_dir / "result.json", result)
    comm.barrier()
    communication.shutdown(comm)


if __name__ == "__main__":
    entry.main(run)
