import pytest

from algorithms.branch_replay.config import ReplayConfig, RolloutConfig
from algorithms.branch_replay.job_config import JobConfig, PolicyJobConfig, WarmStartConfig
from algorithms.common.config import ModelConfig, from_dict
from algorithms.common.errors import FieldError
from tests.lookups import SMALL
from tests.post_training import arm, job

INPUTS = {"prompts_dir": "p", "policy_dir": "q"}


def test_a_job_survives_its_json():
    config = job(INPUTS, arm(given="x.parquet"), reward="a.b:c")
    assert from_dict(JobConfig, config.to_dict()) == config
    assert (config.ranks, config.steps, config.gpus) == (1, 6, 0)
    assert job(INPUTS, backend="nccl", ranks=4).gpus == 4
    for warm_start in (None, WarmStartConfig()):
        policy = PolicyJobConfig(
            stage="policy",
            arm_name="policy",
            job_id="",
            model=ModelConfig(),
            prompts_dir="p",
            seed=1,
            lookup=SMALL,
            warm_start=warm_start,
        )
        assert from_dict(PolicyJobConfig, policy.to_dict()) == policy
        assert policy.steps == (0 if warm_start is None else 2010)


def test_held_out_prompts_are_answered_by_the_policy_as_it_is():
    hot = arm(rollout=RolloutConfig(max_tokens=5, temperature=0.3, top_p=0.5))
    assert (hot.greedy.temperature, hot.sampled.temperature) == (0.0, 1.0)
    assert hot.greedy.top_p == hot.sampled.top_p == 1.0 and hot.sampled.max_tokens == 5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: job(INPUTS, prompts=0), "prompts: must be positive"),
        (lambda: job(INPUTS, reward="a b"), "reward: is not a name"),
        (lambda: job(INPUTS, warmup_steps=9), "warmup_steps: must be in"),
        (lambda: WarmStartConfig(stages=[[0, 1]]), "stages: must be records, at least 1"),
        (lambda: WarmStartConfig(further=[1]), "further: must be records, at least 1"),
        (lambda: WarmStartConfig(accuracy=1.0), "accuracy: must be in"),
        (
            lambda: arm(given="x", replay=ReplayConfig(mode="response_only", refresh_every=2)),
            "given: needs replay.refresh_every 1",
        ),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(FieldError, match=message):
        make()
