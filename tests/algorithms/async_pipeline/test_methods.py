"""An arm's config -> its stages: rates by delay and update, cuts, and what is refused."""

from dataclasses import replace

import pytest
import torch

from algorithms.async_pipeline import methods
from algorithms.async_pipeline.config import PRESETS, ArmConfig
from algorithms.common import model
from algorithms.common.comm import Comm
from algorithms.common.errors import InputError
from algorithms.common.loop import learning_rate
from tests import toys
from tests.families import tiny

ALONE = Comm(None, torch.device("cpu"))
TRAINING = toys.shared_training()


def decoder(config=toys.UNTIED):
    return model.build(config, vocab_size=toys.VOCAB, end_of_text=0, seed=0)


def simulated(optimizer, **changes):
    arm = ArmConfig(stages=4, executor="simulator", optimizer=optimizer, **changes)
    return methods.build(decoder(), arm, ALONE, TRAINING)


@pytest.mark.parametrize("update", [0, 1, 9])
def test_rates_follow_the_schedule_and_the_delay(update):
    ours = PRESETS["ours"]
    trainer = simulated(ours)
    peak = learning_rate(update + 1, ours.optimizer.lr, TRAINING)
    for stage, optimizer in enumerate(trainer.optimizers):
        trainer.simulated.delayed.before_update(optimizer, update)
        expected = peak / (4 - stage) ** ours.rate_power
        rates = [group["lr"] for group in optimizer.param_groups]
        assert rates == pytest.approx([expected] * len(rates))


def test_rates_of_pipedream_grow_to_the_schedules():
    trainer = simulated(replace(PRESETS["pipedream_lr"], correction_steps=4))
    first = trainer.optimizers[0]
    for update, factor in ((0, 1 / 3), (2, 3**-0.5), (4, 1.0), (8, 1.0)):
        trainer.simulated.delayed.before_update(first, update)
        lr = learning_rate(update + 1, 1e-3, TRAINING)
        assert first.param_groups[0]["lr"] == pytest.approx(factor * lr)


def test_layers_go_where_the_arm_says():
    trainer = simulated(PRESETS["adamw"], layers=[0, 3, 1, 0])
    assert [len(stage.model.layers) for stage in trainer.stages] == [0, 3, 1, 0]
    assert trainer.simulated.shares[1] == pytest.approx(3 * trainer.simulated.shares[2])
    assert sum(trainer.simulated.shares) == pytest.approx(1)


def test_tied_embeddings_are_refused():
    arm = ArmConfig(stages=2, executor="simulator", optimizer=PRESETS["adamw"])
    with pytest.raises(InputError, match="^model.tie_word_embeddings: "):
        methods.build(decoder(toys.MODEL), arm, ALONE, TRAINING)


@pytest.mark.parametrize("layers", [None, [1, 2]])
@pytest.mark.parametrize(("family", "part"), [("gpt2", "embed_tokens"), ("falcon_h1", "norm")])
def test_a_family_that_cannot_be_cut_is_refused_before_its_costs_are_asked_for(
    family, part, layers
):
    arm = ArmConfig(stages=2, executor="simulator", optimizer=PRESETS["adamw"], layers=layers)
    with pytest.raises(InputError, match=f"^model.family: .* without {part}"):
        methods.build(tiny(family, torch.float32), arm, ALONE, TRAINING)
