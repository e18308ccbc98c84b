"""Updates on the lookup task: equal to full sequences, to any split of them, and resumable."""

import copy
from dataclasses import replace

import pytest
import torch

from algorithms.branch_replay import collect
from algorithms.branch_replay.collect import Rolled, given, preference
from algorithms.branch_replay.config import (
    LearnerConfig,
    ObjectiveConfig,
    ReplayConfig,
    RolloutConfig,
)
from algorithms.branch_replay.errors import SelfCheckError
from algorithms.branch_replay.learner import Learner, Settings
from algorithms.branch_replay.prompts import Question
from algorithms.branch_replay.rollout_row import Rollout
from algorithms.common.errors import FieldError, InputError
from tests.families import true_float64
from tests.lookups import SMALL, Kept, end, lookup_prompts, reader, scorer
from tests.replays import distance

ROLLOUT = RolloutConfig(max_tokens=3, batch=5)


def partly(question, tokens):
    """A reward that a random reader gets often: the share of ids below 6, so groups are mixed."""
    return float((tokens < 6).double().mean())


def make(model, lr=0.0, comm=None, score=partly, optimizer=torch.optim.SGD, **parts):
    parts.setdefault("rollout", ROLLOUT)
    parts.setdefault("learner", LearnerConfig(group=4, clip_norm=0))
    return Learner(
        model,
        optimizer(model.parameters(), lr=lr),
        Settings(**parts),
        eos=[end()],
        score=score,
        seed=7,
        reference_model=reader(dtype=model.dtype, seed=1),
        comm=comm,
    )


def moved(model, run, **parts):
    """What one update reports, and the gradient it would step by."""
    learner = make(copy.deepcopy(model), optimizer=Kept, **parts)
    metrics = run(learner)
    return metrics, learner.optimizer.gradient


def naive(**settings):
    return LearnerConfig(group=4, clip_norm=0, naive=True, **settings)


@pytest.mark.parametrize(
    "objective",
    [
        {"name": "grpo", "kl": 0.1, "entropy": 0.01},
        {"name": "dr_grpo"},
        {"name": "dapo", "kl": 0.1, "kl_kind": "k2"},
        {"name": "gspo"},
        {"name": "rloo", "kl": 0.1, "kl_kind": "k1"},
        {"name": "ppo"},
        {"name": "dpo"},
        {"name": "ipo", "beta": 0.5},
    ],
    ids=lambda o: o["name"],
)
def test_an_update_is_that_of_full_sequences(objective):
    """Two questions on each prompt: a tree of two levels."""
    model = reader(dtype=torch.float64)
    prompts = lookup_prompts(2)
    chosen = ObjectiveConfig(**objective)
    with true_float64(model):
        slow, truth = moved(
            model, lambda one: one.update(prompts, 0), objective=chosen, learner=naive()
        )
        found, gradient = moved(
            model,
            lambda one: one.update(prompts, 0),
            objective=chosen,
            replay=ReplayConfig(chunk=4, branches_per_pass=3),
        )
    assert distance(gradient, truth) <= 1e-12
    assert found["train/loss"] == pytest.approx(slow["train/loss"], abs=1e-12)
    assert found["reward/mixed_groups"] > 0
    assert found["grad_norm"] > 0
    assert found["selfcheck/max"] <= 1e-10
    assert found["replay/tokens_grad"] > 0 and slow["replay/tokens_grad"] == 0


@pytest.mark.parametrize("name", ["grpo", "dpo"])
def test_a_question_that_is_a_node_gives_the_same_as_one_that_is_in_its_branches(monkeypatch, name):
    model = reader(dtype=torch.float64)
    prompts = lookup_prompts(2)
    parts = {"objective": ObjectiveConfig(name=name), "replay": ReplayConfig(chunk=4)}
    with true_float64(model):
        flat, truth = moved(model, lambda one: one.update(prompts, 0), **parts)
        monkeypatch.setattr(collect, "SHORT", 0)
        tree, gradient = moved(model, lambda one: one.update(prompts, 0), **parts)
    assert distance(gradient, truth) <= 1e-12
    assert tree["replay/tokens_grad"] < flat["replay/tokens_grad"]


@pytest.mark.parametrize(
    "parts",
    [
        {"objective": ObjectiveConfig(name="grpo", kl=0.1)},
        {"objective": ObjectiveConfig(name="dpo")},
        {"learner": naive()},
        {"learner": LearnerConfig(group=4, clip_norm=0, inner_epochs=2)},
    ],
    ids=["grpo", "dpo", "naive", "inner_epochs"],
)
def test_prompts_that_are_run_as_one_batch_give_the_same(parts):
    model = reader(dtype=torch.float64)
    prompts = lookup_prompts(5)  # a batch of two, and one, and others of another length
    prompts[3:] = lookup_prompts(2, replace(SMALL, filler=5))
    with true_float64(model):
        alone, truth = moved(model, lambda one: one.update(prompts, 0), **parts)
        metrics, gradient = moved(
            model,
            lambda one: one.update(prompts, 0),
            replay=ReplayConfig(prompts_per_pass=2),
            **parts,
        )
    assert distance(gradient, truth) <= 1e-12
    assert metrics == pytest.approx(alone, rel=1e-9, abs=1e-12)


def test_response_only_and_truncated_leave_out_what_they_say():
    model = reader(dtype=torch.float64)
    prompts = lookup_prompts(1)
    gradients = {}
    with true_float64(model):
        for name, replay in {
            "exact": ReplayConfig(chunk=4),
            "response_only": ReplayConfig(chunk=4, mode="response_only"),
            "truncated": ReplayConfig(chunk=4, mode="truncated", truncated_chunks=1),
            "whole": ReplayConfig(chunk=4, mode="truncated", truncated_chunks=99),
        }.items():
            gradients[name] = moved(model, lambda one: one.update(prompts, 0), replay=replay)[1]
    far = distance(gradients["response_only"], gradients["exact"])
    nearer = distance(gradients["truncated"], gradients["exact"])
    assert 0.01 < nearer < far
    assert distance(gradients["whole"], gradients["exact"]) <= 1e-13


def update_on_rank(comm):
    """One rank has a prompt, the other two, a third none."""
    model = reader(dtype=torch.float64)
    prompts = lookup_prompts(3)
    shares = {1: [prompts], 3: [prompts[:1], prompts[1:], []]}[comm.world_size]
    metrics, gradient = moved(
        model,
        lambda one: one.update(shares[comm.rank], 0),
        comm=comm,
        objective=ObjectiveConfig(name="dapo"),
    )
    return metrics, gradient


def test_an_update_does_not_depend_on_how_ranks_share_it(ranks):
    ((alone, truth),) = ranks.run(update_on_rank, world_size=1)
    for metrics, gradient in ranks.run(update_on_rank, world_size=3):
        assert distance(gradient, truth) <= 1e-6
        assert metrics == pytest.approx(alone, rel=1e-6, abs=1e-9)


def test_an_update_says_what_replay_saved_by_the_model_of_costs():
    """Each prompt has two questions; more responses save more; without prompts none do."""
    ratios = [
        make(reader(), learner=LearnerConfig(group=group)).update(lookup_prompts(2), 0)[
            "replay/speedup_model"
        ]
        for group in (1, 8)
    ]
    assert 1 < ratios[0] < ratios[1]
    assert make(reader()).update([], 0)["replay/speedup_model"] == 1.0


def test_inner_epochs_clip_and_report_ratios():
    model = reader()
    learner = make(
        model,
        lr=0.5,
        objective=ObjectiveConfig(name="ppo"),
        learner=LearnerConfig(group=4, inner_epochs=3),
    )
    metrics = learner.update(lookup_prompts(2), 0)
    assert metrics["ratio/max"] > 1.001
    assert 0 < metrics["clip_fraction"] < 1
    first = make(reader(), lr=0.5).update(lookup_prompts(2), 0)
    assert first["ratio/max"] == 1.0 and first["clip_fraction"] == 0.0


def test_a_run_resumes_to_the_same_weights():
    prompts = [lookup_prompts(2, seed=step) for step in range(4)]

    def run(model, learner, steps):
        return [learner.update(prompts[step], step) for step in steps]

    whole = reader()
    rows = run(whole, make(whole, lr=0.01, optimizer=torch.optim.AdamW), range(4))
    half = reader()
    learner = make(half, lr=0.01, optimizer=torch.optim.AdamW)
    run(half, learner, range(2))
    again = reader(seed=5)
    again.load_state_dict(half.state_dict())
    resumed = make(again, lr=0.01, optimizer=torch.optim.AdamW)
    resumed.optimizer.load_state_dict(learner.optimizer.state_dict())
    assert run(again, resumed, range(2, 4)) == rows[2:]
    for a, b in zip(again.parameters(), whole.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_reference_is_where_it_was_and_the_kl_starts_at_zero():
    model = reader()
    learner = make(model, lr=0.1, objective=ObjectiveConfig(kl=0.1))
    reference = learner.reference.model
    reference.load_state_dict(model.state_dict())
    before = [p.clone() for p in reference.parameters()]
    first = learner.update(lookup_prompts(2), 0)
    assert first["kl"] == pytest.approx(0.0, abs=1e-9)
    assert learner.update(lookup_prompts(2), 1)["kl"] > 1e-7
    for a, b in zip(before, reference.parameters(), strict=True):
        assert torch.equal(a, b) and b.grad is None


def test_a_captured_prompt_is_used_for_several_steps():
    model = reader()
    replay = ReplayConfig(mode="response_only", refresh_every=2, refresh_bound=10.0)
    learner = make(model, lr=0.05, replay=replay)
    prompts = lookup_prompts(2)
    held = []
    for step in range(4):
        learner.update(prompts, step)
        held.append(list(learner._captured.values()))
        assert [captured.age for captured in held[-1]] == [step % 2] * 2
        assert learner.resumable(step) == (step % 2 == 1)
    assert held[0][0] is held[1][0] and held[1][0] is not held[2][0]


def test_a_replay_that_disagrees_with_sampling_stops_the_update(monkeypatch):
    model = reader()
    learner = make(model, lr=1.0)
    before = [p.detach().clone() for p in model.parameters()]
    collect = learner.collector.collect

    def off_by_a_little(*args):
        rolled = collect(*args)
        rolled.groups[0].recorded[1] = rolled.groups[0].recorded[1] - 0.01
        return rolled

    monkeypatch.setattr(learner.collector, "collect", off_by_a_little)
    with pytest.raises(SelfCheckError, match=r"^prompt train/0/0, response 1: .* tolerance 0.001$"):
        learner.update(lookup_prompts(1), 0)
    for parameter, kept in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, kept) and parameter.grad is None


def test_given_rollouts_teach_what_own_ones_do():
    """Their log-probabilities are taken as they are given."""
    model = reader(dtype=torch.float64)
    prompts = lookup_prompts(2)
    own = make(copy.deepcopy(model))
    rolled = [own.collector.collect(p, ROLLOUT, 4, "step 0", None) for p in prompts]
    rows = [r.to_row() for item in rolled for group in item.groups for r in group.to_rollouts()]
    rollouts = [Rollout.from_row(row, "r") for row in rows[::-1]]
    device = torch.device("cpu")

    _, sampled = moved(model, lambda one: one.update(prompts, 0))
    metrics, learned = moved(model, lambda one: one.learn(given(prompts, rollouts, device)))
    assert distance(learned, sampled) <= 1e-6
    assert metrics["ratio/max"] == pytest.approx(1.0, abs=1e-4)
    for rollout in rollouts:
        rollout.log_probs = [lp - 1.0 for lp in rollout.log_probs]
    off = make(copy.deepcopy(model)).learn(given(prompts, rollouts, device))
    assert off["ratio/max"] == pytest.approx(2.718, rel=1e-3) and off["clip_fraction"] == 1.0


def test_rollouts_without_a_prompt_or_there_twice_are_refused():
    prompts, device = lookup_prompts(1), torch.device("cpu")
    rollout = Rollout(prompts[0].questions[0].prompt_id, 0, [1], [-1.0], 0.0, False)
    stranger = Rollout("other", 0, [1], [-1.0], 0.0, False)
    assert len(given(prompts, [rollout], device)[0].groups) == 1
    with pytest.raises(InputError, match="^prompt_id 'other' is none of the prompts'$"):
        given(prompts, [rollout, stranger], device)
    with pytest.raises(InputError, match="^branch 0 of prompt_id 'train/0/0' is there twice$"):
        given(prompts, [rollout, rollout], device)


def test_preferences_widen_the_margin():
    model = reader()
    learner = make(model, lr=0.02, objective=ObjectiveConfig(name="dpo"))
    prompt = lookup_prompts(1)[0]
    question = Question("pair", torch.tensor([4, 5]), {})
    pair = preference(question, torch.tensor([6, 7, 1]), torch.tensor([8, 1]))
    losses = [learner.learn([Rolled(prompt, [pair])])["train/loss"] for _ in range(5)]
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.01


@pytest.mark.parametrize("count", [1, 4])
def test_equal_rewards_change_nothing(count):
    model = reader()
    before = [p.detach().clone() for p in model.parameters()]
    learner = make(
        model,
        lr=1.0,
        score=lambda question, tokens: 0.1,
        learner=LearnerConfig(group=count),
    )
    metrics = learner.update(lookup_prompts(1), 0)
    assert metrics["grad_norm"] == 0.0 and metrics["reward/mean"] == pytest.approx(0.1)
    assert metrics["reward/mixed_groups"] == 0.0
    for parameter, kept in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, kept)


def test_empty_and_truncated_responses_take_part():
    model = reader(dtype=torch.float64)
    prompts = lookup_prompts(1)
    name = prompts[0].questions[0].prompt_id
    rollouts = [
        Rollout(name, 0, [], [], 0.0, True),
        Rollout(name, 1, [5, 6, 7], [-2.0, -2.0, -2.0], 1.0, True),
        Rollout(name, 2, [end()], [-2.0], 0.5, False),
    ]
    rolled = given(prompts, rollouts, torch.device("cpu"))
    with true_float64(model):
        _, truth = moved(model, lambda one: one.learn(rolled), learner=naive())
        rolled[0].old = None
        metrics, gradient = moved(model, lambda one: one.learn(rolled))
    assert distance(gradient, truth) <= 1e-12
    assert metrics["response/tokens"] == pytest.approx(4 / 3)
    assert metrics["response/truncated"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            {"objective": {"name": "rloo"}, "learner": {"inner_epochs": 2}},
            "learner.inner_epochs: must be 1 with rloo, which has no ratio",
        ),
        (
            {
                "replay": {"mode": "response_only", "refresh_every": 2},
                "learner": {"inner_epochs": 2},
            },
            "learner.inner_epochs: must be 1 with refresh_every above 1",
        ),
        (
            {"replay": {"mode": "response_only"}, "learner": {"naive": True}},
            "learner.naive: has no mode response_only",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(parts, message):
    kinds = {"objective": ObjectiveConfig, "learner": LearnerConfig, "replay": ReplayConfig}
    with pytest.raises(InputError) as error:
        make(reader(), **{name: kinds[name](**values) for name, values in parts.items()})
    assert str(error.value) == message


def test_an_objective_that_needs_a_reference_says_so():
    model = reader()
    settings = Settings(rollout=ROLLOUT, objective=ObjectiveConfig(name="dpo"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(InputError, match="^objective: dpo with kl 0.0 needs a reference$"):
        Learner(model, optimizer, settings, eos=[1], score=partly, seed=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "rloo", "clip_high": 0.3}, "clip_high: has no effect on rloo"),
        ({"name": "dpo", "kl": 0.1}, "kl: must be 0 with dpo"),
        ({"clip_low": 1.0}, "clip_low: must be below 1"),
        ({"beta": 0.0}, "beta: must be positive"),
        ({"entropy": float("nan")}, "entropy: must be a number"),
    ],
)
def test_bad_objectives_are_named(settings, message):
    with pytest.raises(FieldError, match=message):
        ObjectiveConfig(**settings)


def test_the_task_of_these_tests_has_its_sizes():
    prompts = lookup_prompts(2)
    assert [len(p.questions) for p in prompts] == [SMALL.questions] * 2
    assert scorer()(prompts[0].questions[0], torch.tensor([0])) == 0.0
