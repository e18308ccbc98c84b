"""Small runs of `post_train` for tests: prompts, a policy, and what an attempt leaves."""

import json

import torch

from algorithms.branch_replay import methods
from algorithms.branch_replay.config import ReplayConfig, RolloutConfig
from algorithms.branch_replay.job_config import ArmConfig, JobConfig, PostTrainingConfig
from algorithms.branch_replay.lookup import END, make_tokenizer
from algorithms.common import model
from algorithms.common.config import AdamWConfig, ModelConfig
from algorithms.common.errors import Preempted
from algorithms.common.files import read_json
from algorithms.common.metrics import read_rows
from tasks.data_config import PromptsConfig
from tasks.prompt_stage import build
from tests.lookups import SMALL

MODEL = ModelConfig(
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=64,
    tie_word_embeddings=False,
    extra={"initializer_range": 0.3},
)
RUN = {
    "ranks": 1,
    "steps": 6,
    "prompts": 3,
    "warmup_steps": 2,
    "log_every": 1,
    "eval_every": 3,
    "eval_prompts": 4,
    "eval_samples": 2,
    "checkpoint_every": 2,
    "reward": "tests.post_training:values",
}
PRIVATE = ("time", "elapsed", "tokens_per_s", "device_hours", "gpu_hours", "memory/peak_bytes")
"""What of a row does not repeat."""


def values(prompt, completion, row):
    """How many values an answer has: even a policy without training has some to learn from."""
    return sum(symbol.startswith("v") for symbol in completion.split())


class Killed(Exception):
    """Stands for kill -9."""


def folders(root):
    """The inputs of a job, below `root`: prompts and an untrained policy."""
    prompts, policy = root / "prompts", root / "policy"
    build(PromptsConfig(lookup=SMALL, train=7, val=4), prompts)
    tokenizer = make_tokenizer(SMALL)
    decoder = model.build(
        MODEL,
        vocab_size=tokenizer.get_vocab_size(),
        end_of_text=tokenizer.token_to_id(END),
        seed=0,
    )
    model.save(decoder, prompts, policy)
    return {"prompts_dir": str(prompts), "policy_dir": str(policy)}


def arm(**changes):
    known = {
        "optimizer": AdamWConfig(lr=3e-3, weight_decay=0.0),
        "rollout": RolloutConfig(max_tokens=3),
        "replay": ReplayConfig(),
    }
    return ArmConfig(**(known | changes))


def job(inputs, of=None, **training):
    return JobConfig(
        stage="post_train",
        arm_name="exact",
        job_id="test",
        model=MODEL,
        training=PostTrainingConfig(**(RUN | training)),
        arm=of or arm(),
        **inputs,
    )


def write_config(run_dir, config):
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.json").write_text(json.dumps(config.to_dict()))
    return run_dir / "config.json"


def attempt(comm, config, run_dir, kill_at=None, stop_at=None):
    """One attempt on one rank: its weights, or None where it was killed within update `kill_at` or
    stopped from update `stop_at` on."""
    run_dir.mkdir(exist_ok=True)
    now = newest(run_dir)
    made = methods.build(
        config,
        run_dir,
        comm,
        lambda: comm.rank == 0 and stop_at is not None and now >= stop_at,
    )
    learn = made.learner.learn

    def watched(rolled):
        nonlocal now
        now += 1
        if now == kill_at:
            raise Killed
        return learn(rolled)

    made.learner.learn = watched
    try:
        made.run()
    except (Killed, Preempted):
        return None
    return {name: value.clone() for name, value in made.learner.model.state_dict().items()}


def newest(run_dir):
    """The step of the newest checkpoint; 0 without one."""
    steps = [int(folder.name[5:]) for folder in (run_dir / "checkpoints").glob("step_*")]
    return max(steps, default=0)


def told(run_dir):
    """What repeats of all that a run wrote: metrics, completions, rollouts."""
    rows = [
        {key: value for key, value in row.items() if key not in PRIVATE}
        for row in read_rows(run_dir / "metrics.jsonl")
    ]
    rollouts = [read_rows(path) for path in sorted((run_dir / "rollouts").glob("*.jsonl"))]
    return rows, read_rows(run_dir / "completions.jsonl"), rollouts


def result(run_dir):
    return read_json(run_dir / "result.json")


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
