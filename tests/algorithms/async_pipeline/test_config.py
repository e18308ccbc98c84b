"""The configs of stage optimizers: what they refuse, and that they survive a file."""

import dataclasses
import json

import pytest

from algorithms.async_pipeline.config import (
    PRESETS,
    ArmConfig,
    JobConfig,
    RotationConfig,
    StageOptimizerConfig,
)
from algorithms.common.config import OptimizerConfig, from_dict
from algorithms.common.errors import FieldError
from tests import toys

SETTINGS = OptimizerConfig(lr=1e-3)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_a_file(name):
    preset = PRESETS[name]
    assert from_dict(StageOptimizerConfig, json.loads(json.dumps(preset.to_dict()))) == preset


def test_our_preset_is_the_papers_with_three_more_ingredients():
    paper, ours = PRESETS["paper"], PRESETS["ours"]
    assert paper.rotation == RotationConfig()
    assert paper.rate_power == 0 and paper.rotation.nu == 1
    changed = {"nu": 1.0, "vocabulary": "adamw"}
    assert dataclasses.replace(ours.rotation, **changed) == paper.rotation
    assert ours.rate_power > 0


@pytest.mark.parametrize(
    "field, values",
    [
        ("refresh_every", {"refresh_every": 0}),
        ("refresh_blocks", {"refresh_blocks": 0}),
        ("refresh_blocks", {"refresh_blocks": 2, "source": "first"}),
        ("max_side", {"max_side": 0}),
        ("nu", {"nu": -0.1}),
    ],
)
def test_rotation_refuses(field, values):
    with pytest.raises(FieldError) as error:
        RotationConfig(**values)
    assert error.value.field == field


@pytest.mark.parametrize(
    "field, values",
    [
        ("rotation", {"name": "basis_rotation"}),
        ("rotation", {"name": "adamw", "rotation": RotationConfig()}),
        ("rate_power", {"name": "adamw", "rate_power": -1.0}),
        ("rate_power", {"name": "adamw", "rate_power": float("nan")}),
        ("correction_steps", {"name": "pipedream_lr"}),
        ("correction_steps", {"name": "adamw", "correction_steps": 10}),
        ("momentum_decay", {"name": "nesterov", "momentum_decay": -1.0}),
        ("momentum_decay", {"name": "adamw", "momentum_decay": 0.1}),
    ],
)
def test_stage_optimizer_refuses(field, values):
    with pytest.raises(FieldError) as error:
        StageOptimizerConfig(optimizer=SETTINGS, **values)
    assert error.value.field == field


def arm(**values):
    return ArmConfig(**({"stages": 4, "optimizer": PRESETS["adamw"]} | values))


FLUSHED = {"schedule": "one_f_one_b", "microbatches": 4}
SIMULATED = {"executor": "simulator"}


@pytest.mark.parametrize(
    "field, values",
    [
        ("stages", {"stages": 0}),
        ("microbatches", {"microbatches": 0}),
        ("microbatches", FLUSHED | {"microbatches": 3}),
        ("microbatches", {"schedule": "zero_bubble"}),
        ("stages", {"schedule": "gpipe", "stages": 1}),
        ("executor", FLUSHED | SIMULATED),
        ("delays", FLUSHED | {"delays": [3, 2, 1, 0]}),
        ("stash", FLUSHED | {"stash": "none"}),
        ("recompute", FLUSHED | {"recompute": True}),
        ("recompute", {"stash": "host", "recompute": True}),
        ("recompute", SIMULATED | {"recompute": True}),
        ("stash", SIMULATED | {"stash": "host"}),
        ("delays", {"delays": [1, 0]}),
        ("delays", {"delays": [0, 1, 0, 0]}),
        ("delays", {"delays": [3, 2, 1, -1]}),
        ("layers", {"layers": [2, 2]}),
        ("layers", {"layers": [2, 2, 2, -1]}),
        ("layers", FLUSHED | {"schedule": "zero_bubble", "layers": [1, 1, 1, 1]}),
    ],
)
def test_an_arm_refuses(field, values):
    with pytest.raises(FieldError) as error:
        arm(**values)
    assert error.value.field == field


def test_delays_of_an_arm_are_those_of_its_microbatches_and_updates():
    assert arm().microbatch_delays == arm().update_delays == [3, 2, 1, 0]
    assert arm(microbatches=2).update_delays == [2, 1, 1, 0]
    assert arm(delays=[5, 5, 0, 0], microbatches=5).update_delays == [1, 1, 0, 0]
    assert arm(**FLUSHED).update_delays == [0] * 4
    assert arm(schedule="zero_bubble", microbatches=4).update_delays == [0] * 8


def a_job(config):
    return JobConfig(
        stage="pretrain_async",
        arm_name="a",
        job_id="0",
        tokens_dir="t",
        model=dataclasses.replace(toys.UNTIED, num_hidden_layers=6),
        training=toys.shared_training(),
        arm=config,
    )


@pytest.mark.parametrize(
    "values, ranks", [({}, 4), (SIMULATED, 1), (FLUSHED | {"schedule": "zero_bubble"}, 4)]
)
def test_a_job_survives_a_file_and_knows_its_ranks(values, ranks):
    job = a_job(arm(**values))
    assert from_dict(JobConfig, json.loads(json.dumps(job.to_dict()))) == job
    assert job.ranks == ranks


@pytest.mark.parametrize("schedule, stages", [("async", 10**6), ("async", 9), ("zero_bubble", 5)])
def test_more_stages_than_layers_are_refused_before_a_rank_starts(schedule, stages):
    with pytest.raises(FieldError, match="6 layers cannot fill") as error:
        a_job(arm(schedule=schedule, stages=stages, microbatches=4 * stages))
    assert error.value.field == "arm.stages"


def test_a_model_that_cannot_be_cut_so_is_refused_before_a_rank_starts():
    with pytest.raises(FieldError, match="sum is 7, the model has 6 layers") as error:
        a_job(arm(stages=2, layers=[4, 3]))
    assert error.value.field == "arm.layers"
    job = a_job(arm())
    with pytest.raises(FieldError, match="must be false") as error:
        dataclasses.replace(job, model=dataclasses.replace(job.model, tie_word_embeddings=True))
    assert error.value.field == "model.tie_word_embeddings"


def test_microbatches_that_do_not_divide_the_batch_are_refused_before_a_rank_starts():
    assert a_job(arm(microbatches=8)).training.global_batch == 8
    for microbatches in (3, 16):
        with pytest.raises(FieldError, match=r"must divide training\.global_batch \(8\)") as error:
            a_job(arm(microbatches=microbatches))
        assert error.value.field == "arm.microbatches"
