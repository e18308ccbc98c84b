"""Job of stage `policy`: what the arms of `post_train` start from, and refer to.

torchrun --standalone --nproc-per-node 1 -m tasks.jobs.policy CONFIG.json

CONFIG.json is a `PolicyJobConfig`. A model is built or loaded, and trained by a supervised
curriculum where that is asked for. It takes seconds, so one that is stopped starts afresh.
"""

import time
from pathlib import Path

from tasks.jobs import entry


def run(config_path: Path) -> None:
    """Make the policy that `config_path` describes; see `entry.main` for what may be raised."""
    import torch

    from algorithms.branch_replay.job_config import PolicyJobConfig
    from algorithms.branch_replay.warm_start import warm_start
    from algorithms.common import environment, model
    from algorithms.common.comm import Comm
    from algorithms.common.config import from_dict
    from algorithms.common.errors import Preempted
    from algorithms.common.files import read_json, write_json
    from algorithms.common.metrics import MetricsLog
    from algorithms.common.pretrained import load_tokenizer
    from algorithms.common.stopping import on_signals

    config = from_dict(PolicyJobConfig, read_json(config_path))
    entry.require_ranks(config_path, config.ranks)
    run_dir, prompts_dir = config_path.parent, Path(config.prompts_dir)
    comm = Comm(None, torch.device("cpu"))
    write_json(run_dir / "env.json", environment.describe(comm))
    stop_requested = on_signals()
    tokenizer = load_tokenizer(prompts_dir)
    policy = model.build(
        config.model,
        vocab_size=len(tokenizer),
        end_of_text=tokenizer.eos_token_id,
        seed=config.seed,
    )
    begun, steps = time.perf_counter(), 0
    rows = MetricsLog(run_dir / "metrics.jsonl", -1)

    def say(step: int, loss: float, right: float) -> None:
        if stop_requested():
            raise Preempted(f"stopped after step {step} of the warm start, which starts afresh")
        if step % 20 == 0:
            elapsed = time.perf_counter() - begun
            rows.append(
                {
                    "step": step,
                    "time": time.time(),
                    "elapsed": elapsed,
                    "train/loss": loss,
                    "train/accuracy": right,
                }
            )

    if config.warm_start is not None:
        assert config.lookup is not None  # tasks/config.py has checked
        torch.set_num_threads(1)  # its products are small: more threads would wait for each other
        settings = vars(config.warm_start)
        steps = warm_start(policy, config.lookup, seed=config.seed, **settings, on_step=say)
    model.save(policy, prompts_dir, run_dir / "model")
    quality = {
        "parameters": model.parameter_count(policy),
        "steps": steps,
        "weights_sha256": model.weights_sha256(policy),
    }
    write_json(run_dir / "model" / "MANIFEST.json", quality)
    timing = {"seconds": time.perf_counter() - begun}
    write_json(run_dir / "result.json", {"quality": quality, "timing": timing})


if __name__ == "__main__":
    entry.main(run)
