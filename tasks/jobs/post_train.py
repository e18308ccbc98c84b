"""Job of stage `post_train`: one arm of reinforcement learning by branch replay.

torchrun --standalone --nproc-per-node 2 -m tasks.jobs.post_train CONFIG.json

CONFIG.json is a `JobConfig`; everything the job writes lies beside it.
"""

from pathlib import Path

from tasks.jobs import entry


def run(config_path: Path) -> None:
    """Train the arm that `config_path` describes; see `entry.main` for what may be raised."""
    from algorithms.branch_replay import methods
    from algorithms.branch_replay.job_config import JobConfig
    from algorithms.common import comm as communication
    from algorithms.common import environment, model, stopping
    from algorithms.common.config import from_dict
    from algorithms.common.files import read_json, write_json

    config = from_dict(JobConfig, read_json(config_path))
    training, run_dir = config.training, config_path.parent
    entry.require_ranks(config_path, config.ranks)
    comm = communication.init(training.backend)
    environment.check_precision(training.precision, comm.device)
    facts = environment.describe(comm)
    if comm.rank == 0:
        write_json(run_dir / "env.json", facts)
    made = methods.build(config, run_dir, comm, stopping.on_signals())
    result = made.run()
    if comm.rank == 0:
        policy = methods.published(made.learner.model)
        result["timing"]["oversubscribed"] = facts["oversubscribed"]
        arm = config.arm
        result["quality"] |= {"mode": arm.replay.mode, "objective": arm.objective.name}
        result["weights_sha256"] = model.weights_sha256(policy)
        model.save(policy, Path(config.prompts_dir), run_dir / "model")
        write_json(run_dir / "result.json", result)
    comm.barrier()
    communication.shutdown(comm)


if __name__ == "__main__":
    entry.main(run)
