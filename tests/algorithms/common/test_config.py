"""Configs as plain dataclasses: what a job reads back is what was written, or one clear error."""

import json

import pytest

from algorithms.common.config import ModelConfig, OptimizerConfig, from_dict
from algorithms.common.errors import FieldError, InputError
from algorithms.lordo.config import ArmConfig, JobConfig
from tests import toys


def job_config() -> JobConfig:
    return JobConfig(
        stage="pretrain_lordo",
        arm_name="ddp",
        job_id="0123456789ab",
        tokens_dir="/tokens",
        model=ModelConfig(extra={"rope_theta": 5000.0}),
        training=toys.training(),
        arm=ArmConfig(optimizer=toys.OPTIMIZER),
    )


def test_a_config_survives_json():
    config = job_config()
    assert from_dict(JobConfig, json.loads(json.dumps(config.to_dict()))) == config


def test_unknown_key_is_named():
    values = job_config().to_dict()
    values["arm"]["optimizer"]["momentum"] = 0.9
    with pytest.raises(InputError, match="OptimizerConfig: unknown key 'momentum'"):
        from_dict(JobConfig, values)


def test_a_missing_key_is_named():
    values = job_config().to_dict()
    del values["arm"]["optimizer"]["lr"]
    with pytest.raises(InputError, match="OptimizerConfig: .*'lr'"):
        from_dict(JobConfig, values)


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: OptimizerConfig(lr=0.0), "lr"),
        (lambda: OptimizerConfig(lr=float("nan")), "lr"),
        (lambda: OptimizerConfig(lr=1.0, beta1=1.0), "beta1"),
        (lambda: OptimizerConfig(lr=1.0, clip_norm=-1.0), "clip_norm"),
        (lambda: ModelConfig(hidden_size=130), "hidden_size"),
        (lambda: ModelConfig(num_key_value_heads=3), "num_key_value_heads"),
        (lambda: toys.training(steps=0), "steps"),
        (lambda: toys.training(global_batch=6, ranks=4), "global_batch"),
        (lambda: toys.training(global_batch=8, ranks=2, accumulation=3), "global_batch"),
        (lambda: toys.training(steps=5, warmup_steps=6), "warmup_steps"),
    ],
)
def test_a_value_out_of_range_names_its_field(build, field):
    with pytest.raises(FieldError) as caught:
        build()
    assert caught.value.field == field
