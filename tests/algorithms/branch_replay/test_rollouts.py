"""Rollouts against full sequences sampled anew for each token, and against the scoring pass."""

import pytest
import torch

from algorithms.branch_replay import reference
from algorithms.branch_replay.config import ReplayConfig, RolloutConfig
from algorithms.branch_replay.errors import StaleStateError
from algorithms.branch_replay.replay import BranchReplay
from algorithms.branch_replay.rollouts import Branch, Sampler
from algorithms.common.errors import FieldError, InputError
from tests.families import FAMILIES, tiny, true_float64
from tests.replays import tokens

PROMPT = tokens(13)
NONE = torch.zeros(0, dtype=torch.long)
EOS = (3, 7, 11, 19, 23)
QUESTIONS = [tokens(n, seed=40 + n) for n in (2, 0, 3, 0, 1)]


def branches(count, questions=(NONE,)):
    return [Branch(100 + i, questions[i % len(questions)]) for i in range(count)]


def sampled(model, prompt, wanted, eos=EOS, replay_settings=None, **settings):
    replay = BranchReplay(model, ReplayConfig(**(replay_settings or {})))
    config = RolloutConfig(**({"max_tokens": 12} | settings))
    return Sampler(replay, config, eos).sample(replay.capture(prompt), wanted)


def slowly(model, prompt, branch, eos=EOS, **settings):
    whole = torch.cat([prompt, branch.question])
    config = RolloutConfig(**({"max_tokens": 12} | settings))
    return reference.sample(model, whole, branch.seed, config, eos)


def equal(responses, truths):
    for response, (ids, log_probs, truncated) in zip(responses, truths, strict=True):
        assert response.tokens.tolist() == ids
        assert response.truncated is truncated
        assert response.log_probs.tolist() == pytest.approx(log_probs, rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_samples_what_full_sequences_do(family):
    """Three rows for seven branches with questions of 0 to 3 tokens, so rows differ in length."""
    model = tiny(family)
    wanted = branches(7, QUESTIONS)
    with true_float64(model):
        truths = [slowly(model, PROMPT, branch) for branch in wanted]
        responses = sampled(model, PROMPT, wanted, batch=3, replay_settings={"chunk": 5})
    equal(responses, truths)
    assert len({len(r.tokens) for r in responses}) > 1


@pytest.mark.parametrize(
    "settings",
    [{"temperature": 0}, {"temperature": 0.3}, {"top_p": 0.6}, {"temperature": 2.0, "top_p": 0.9}],
)
def test_temperature_and_top_p_shape_tokens_but_not_log_probabilities(settings):
    model = tiny("qwen3")
    wanted = branches(4)
    with true_float64(model):
        truths = [slowly(model, PROMPT, branch, **settings) for branch in wanted]
        equal(sampled(model, PROMPT, wanted, **settings), truths)


@pytest.mark.parametrize("count", [1, 2])
def test_a_prompt_of_one_or_two_tokens(count):
    model = tiny("falcon_h1")
    with true_float64(model):
        truths = [slowly(model, PROMPT[:count], branch) for branch in branches(3)]
        equal(sampled(model, PROMPT[:count], branches(3)), truths)


@pytest.mark.parametrize("settings", [{"window": 6}, {"offload": True}, {"keep_attention": True}])
def test_settings_of_the_replay_hold_for_what_is_sampled(settings):
    """Scored by the same replay: its window is no model's."""
    model = tiny("llama")
    replay = BranchReplay(model, ReplayConfig(chunk=4, **settings))
    prompt = replay.capture(PROMPT)
    responses = Sampler(replay, RolloutConfig(max_tokens=12, batch=2), EOS).sample(
        prompt, branches(5)
    )
    scores = replay.log_probs(prompt, [r.tokens for r in responses])
    for response, score in zip(responses, scores, strict=True):
        torch.testing.assert_close(response.log_probs, score, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("batch", [1, 3, 8, 64])
def test_what_a_branch_samples_depends_on_its_seed_alone(batch):
    model = tiny("qwen3_next", torch.float32)
    alone = [sampled(model, PROMPT, [branch], batch=1)[0] for branch in branches(6)]
    together = sampled(model, PROMPT, branches(6)[::-1], batch=batch)[::-1]
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one.tokens, other.tokens)
        torch.testing.assert_close(one.log_probs, other.log_probs, rtol=1e-4, atol=1e-4)
    assert len({tuple(one.tokens.tolist()) for one in alone}) > 1


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_log_probabilities_are_those_of_the_scoring_pass(dtype, tolerance):
    model = tiny("llama", dtype, initializer_range=0.05)
    replay = BranchReplay(model, ReplayConfig())
    prompt = replay.capture(PROMPT)
    responses = Sampler(replay, RolloutConfig(max_tokens=12, batch=3), EOS).sample(
        prompt, branches(6)
    )
    scores = replay.log_probs(prompt, [r.tokens for r in responses])
    for response, score in zip(responses, scores, strict=True):
        assert float((response.log_probs - score).abs().max()) <= tolerance


def test_the_prompt_is_run_once_and_the_batch_stays_full():
    """Steps are counted: with rows that are handed on, as few as the tokens allow."""
    model = tiny("llama", torch.float32)
    replay = BranchReplay(model, ReplayConfig())
    prompt = replay.capture(PROMPT)
    seen = []
    model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    responses = Sampler(replay, RolloutConfig(max_tokens=12, batch=3), EOS).sample(
        prompt, branches(9)
    )
    lengths = [len(r.tokens) for r in responses]
    rows = [shape[0] for shape in seen]
    assert all(shape[1] == 1 for shape in seen)
    assert sum(rows) == sum(lengths)
    waiting = 6  # branches beyond the first three
    assert rows == sorted(rows, reverse=True) and len(set(lengths)) > 1
    assert rows.count(3) * 3 >= sum(sorted(lengths)[:waiting])


def test_an_end_is_part_of_the_response_and_a_truncated_one_has_none():
    model = tiny("llama")
    responses = sampled(model, PROMPT, branches(12), max_tokens=4)
    ended = [r for r in responses if not r.truncated]
    cut = [r for r in responses if r.truncated]
    assert ended and cut
    assert all(int(r.tokens[-1]) in EOS and not set(r.tokens[:-1].tolist()) & {*EOS} for r in ended)
    assert all(len(r.tokens) == 4 and not set(r.tokens.tolist()) & {*EOS} for r in cut)


def test_an_end_in_the_prompt_or_a_question_ends_nothing():
    model = tiny("llama")
    prompt = torch.tensor([EOS[0], 5, EOS[1], EOS[1]])
    wanted = branches(4, [torch.tensor([EOS[0], EOS[2]])])
    with true_float64(model):
        truths = [slowly(model, prompt, branch) for branch in wanted]
        equal(sampled(model, prompt, wanted), truths)


def test_without_ends_every_response_is_of_full_length():
    responses = sampled(tiny("llama"), PROMPT, branches(3), eos=())
    assert [len(r.tokens) for r in responses] == [12] * 3 and all(r.truncated for r in responses)


def test_no_branches_give_no_responses():
    assert sampled(tiny("llama"), PROMPT, []) == []


def test_a_prompt_older_than_the_weights_is_refused_unless_it_may_be_reused():
    model = tiny("llama")
    config = RolloutConfig(max_tokens=2)
    for settings, allowed in (({}, False), ({"mode": "response_only", "refresh_every": 2}, True)):
        replay = BranchReplay(model, ReplayConfig(**settings))
        prompt = replay.capture(PROMPT)
        with torch.no_grad():
            next(model.parameters()).add_(0.01)
        if allowed:
            assert len(Sampler(replay, config, EOS).sample(prompt, branches(1))) == 1
        else:
            with pytest.raises(StaleStateError):
                Sampler(replay, config, EOS).sample(prompt, branches(1))


def test_questions_that_are_not_the_models_are_refused():
    with pytest.raises(InputError, match=r"^branches\[0\].question: token 61 at position 1"):
        sampled(tiny("llama"), PROMPT, [Branch(0, torch.tensor([1, 61]))])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens": 0}, "max_tokens: must be positive"),
        ({"max_tokens": 2.0}, "max_tokens: must be an integer"),
        ({"batch": 0}, "batch: must be positive"),
        ({"temperature": -1.0}, "temperature: must be finite, not negative"),
        ({"top_p": 0.0}, r"top_p: must be in \(0, 1\]"),
        ({"top_p": float("nan")}, "top_p: must be a number"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(FieldError, match=message):
        RolloutConfig(**({"max_tokens": 5} | settings))
