"""Arms as configs: what a method does not read must not look as if it counted."""

import pytest

from algorithms.common.config import OptimizerConfig
from algorithms.common.errors import FieldError
from algorithms.lordo.config import ArmConfig, JobConfig, LowRankConfig, SyncConfig
from tests import toys

ADAM = OptimizerConfig(lr=1e-3)
EVERY = SyncConfig(every=4)


def arm(**settings):
    return ArmConfig(optimizer=ADAM, **settings)


def lordo(inner="lordo", **settings):
    return arm(method="local", inner=inner, low_rank=LowRankConfig(rank=2, **settings), sync=EVERY)


def thin(**settings):
    return arm(method="lowrank_ddp", low_rank=LowRankConfig(rank=2, **settings))


def test_every_method_has_a_plain_config():
    arm()
    arm(inner="muon")
    arm(method="local", sync=EVERY)
    arm(method="local", inner="muon", momentum="int4", sync=EVERY)
    arm(method="local", inner="muon", momentum="grad", sync=EVERY)
    lordo(qhm="none", omega=0.5, mu=2.0, scaling="lift", error_feedback=True, projection="local")
    lordo("lordo_ns", projection="frozen", compute="dct", carry=0.6, parameters=["*.mlp.*"])
    thin(error_feedback=True, parameters=["*.mlp.*"])


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: arm(method="local"), "sync"),
        (lambda: arm(sync=EVERY), "sync"),
        (lambda: arm(inner="lordo", low_rank=LowRankConfig(rank=2)), "inner"),
        (lambda: arm(method="local", inner="lordo", sync=EVERY), "low_rank"),
        (lambda: arm(method="local", sync=EVERY, low_rank=LowRankConfig(rank=2)), "low_rank"),
        (lambda: arm(momentum="int8"), "momentum"),
        (lambda: arm(inner="muon", momentum="grad"), "momentum"),
        (lambda: lordo(carry=0.5), "low_rank.carry"),
        (lambda: thin(carry=0.5), "low_rank.carry"),
        (lambda: LowRankConfig(rank=2, carry=1.0), "carry"),
        (lambda: lordo("lordo_ns", qhm="none"), "low_rank.qhm"),
        (lambda: lordo("lordo_ns", error_feedback=True), "low_rank.error_feedback"),
        (lambda: lordo("lordo_ns", projection="local"), "low_rank.projection"),
        (lambda: thin(projection="frozen"), "low_rank.projection"),
        (lambda: thin(omega=0.5), "low_rank.omega"),
        (lambda: LowRankConfig(rank=0), "rank"),
        (lambda: LowRankConfig(rank=2, omega=1.5), "omega"),
        (lambda: LowRankConfig(rank=2, mu=0.0), "mu"),
        (lambda: SyncConfig(every=0), "every"),
        (lambda: SyncConfig(every=4, delay=4), "delay"),
        (lambda: SyncConfig(every=4, delay=1, momentum_every=6), "momentum_every"),
        (lambda: SyncConfig(every=4, outer_momentum=0.9), "outer"),
        (lambda: SyncConfig(every=4, outer="nesterov", outer_momentum=1.0), "outer_momentum"),
        (lambda: SyncConfig(every=4, residual="weights"), "residual"),
        (lambda: SyncConfig(every=4, timeout_s=0.0), "timeout_s"),
        (lambda: SyncConfig(every=4, delay=1, elastic=True), "elastic"),
        (lambda: SyncConfig(every=4, variance_every=6, elastic=True), "variance_every"),
    ],
)
def test_what_cannot_be_names_its_field(build, field):
    with pytest.raises(FieldError) as caught:
        build()
    assert caught.value.field == field


def job(sync, **training):
    return JobConfig(
        stage="pretrain_lordo",
        arm_name="a",
        job_id="0",
        tokens_dir="t",
        model=toys.MODEL,
        training=toys.training(**training),
        arm=arm(method="local", sync=sync),
    )


def test_elastic_goes_with_gloo_alone():
    job(SyncConfig(every=4, elastic=True))
    job(EVERY, backend="nccl")
    with pytest.raises(FieldError, match="training.backend: must be gloo with an arm whose sync"):
        job(SyncConfig(every=4, elastic=True), backend="nccl")
