"""The benchmark of reinforcement learning at toy size: its keys, its runs, and what it keeps."""

from dataclasses import replace

import pytest
import torch

from algorithms.branch_replay.lookup import LookupConfig, vocabulary
from benchmarks import rl_learning
from benchmarks.rl_study import naive
from benchmarks.rl_study.arms import GRID, RATES, ROWS
from benchmarks.rl_study.setting import READER, Arm, Setting, Start
from benchmarks.rl_study.training import (
    Kept,
    Run,
    accuracy,
    alike,
    compare,
    learner,
    lookups,
    right,
    schedule,
    shuffle,
    started,
    train,
)
from benchmarks.study import queue
from benchmarks.study.plan import Study, best_rate, needed, outcome
from tests.benchmarks.studies import Inline
from tests.replays import distance

START = Start(
    model=replace(
        READER,
        hidden_size=16,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=2,
    ),
    stages=(),
    further=(2, 1),
    steps=2,
)
TOY = Setting(
    start=START,
    task=LookupConfig(records=2, filler=12, values=2),
    prompts=4,
    group=3,
    updates=4,
    evaluate_every=2,
    held_out=24,
    samples=2,
    gradients=2,
)


def toy(row):
    return replace(row, setting=TOY)


def study(names=tuple(ROWS), **changes):
    rows = {name: toy(ROWS[name]) for name in names}
    return Study(
        **({"rows": rows, "rates": RATES, "grid": GRID, "seeds": 1, "search": False} | changes)
    )


def job(name, rate=2, seed=0):
    return toy(ROWS[name]).job(name, rate, seed)


def even(question, tokens):
    """A reward that chance often gets."""
    return float(tokens[0] % 2 == 0)


def run_of(name, folder, seed=0):
    wanted = job(name, seed=seed)
    return Run(wanted.arm, wanted.setting, seed, folder)


@pytest.mark.slow
def test_all_keys_are_there(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(queue, "ProcessPoolExecutor", Inline)
    monkeypatch.setattr("benchmarks.rl_study.training.right", even)
    figures = rl_learning.measure_study(study(), tmp_path)
    for key in (
        "heldout_start",
        "heldout_exact",
        "heldout_response_only",
        "gap_exact_response_only",
        "gap_good_reader",
        "shuffled_gain",
        "seconds_to_060_naive_over_exact",
        "cosine_start",
        "cosine_end",
        "selfcheck_max",
        "heldout_best",
    ):
        assert {key, f"{key}_spread"} <= set(figures)
    assert 0 < figures["selfcheck_max"] <= 1e-3
    assert -1 <= figures["cosine_end"] < 0.999
    assert figures["naive.lr"] == GRID[RATES["exact"]]
    assert (tmp_path / "curves.png").is_file()
    lines = [line for line in capsys.readouterr().out.splitlines() if "seed 0" in line]
    # Without their settings some rows are the same run.
    assert len(lines) == len({toy(row).job("", 2, 0).key("") for row in ROWS.values()})


def test_a_run_has_its_curve_and_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(queue, "ProcessPoolExecutor", Inline)
    one = study(("exact",))
    results = queue.Results(tmp_path, train)
    queue.run_jobs(lambda: needed(one, results.find), tmp_path, results)
    result = results.find(job("exact"))
    assert [point[0] for point in result["curve"]] == [0, 2, 4]
    seconds = [point[1] for point in result["curve"]]
    assert seconds == sorted(seconds) and seconds[1] > 0
    assert len(result["cosines"]) == 3 and 0 < result["selfcheck"] <= 1e-3
    again = queue.Results(tmp_path, train)
    monkeypatch.setattr(again, "train", pytest.fail)
    queue.run_jobs(lambda: needed(one, again.find), tmp_path, again)


def test_a_warm_start_is_made_once_and_equal_for_all_arms(tmp_path):
    first, _ = started(START, 0, tmp_path)
    (kept,) = tmp_path.glob("start-*.pt")
    made = kept.stat().st_mtime_ns
    second = run_of("naive", tmp_path).model
    assert kept.stat().st_mtime_ns == made
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    other, _ = started(START, 1, tmp_path)
    assert not torch.equal(next(other.parameters()), next(first.parameters()))


def gradient(run, rolled, step):
    run.optimizer = run.learner.optimizer = Kept(run.model.parameters(), lr=0.0)
    step(run, rolled)
    return {str(i): part for i, part in enumerate(run.optimizer.gradient)}


def test_naive_has_the_gradient_of_exact(tmp_path):
    runs = [run_of(name, tmp_path) for name in ("naive", "exact")]
    rolled = []
    for run in runs:
        rolled.append(run.learner.sample(run.prompts(0), 0))
        for item in rolled[-1]:
            for i, group in enumerate(item.groups):  # chance alone would leave them all wrong
                group.rewards = torch.tensor([1.0, 0.0, i % 2], dtype=torch.float64)
    slow = gradient(
        runs[0],
        rolled[0],
        lambda run, r: naive.learn(run.model, run.optimizer, run.learner.criterion, r),
    )
    exact = gradient(runs[1], rolled[1], lambda run, r: run.learner.learn(r))
    assert float(sum(part.square().sum() for part in exact.values())) > 0
    assert distance(exact, slow) <= 1e-5


def test_arms_get_the_prompts_of_their_seed_and_reuse_them(tmp_path):
    exact, other, four = (run_of(n, tmp_path) for n in ("exact", "response_only", "reuse_4"))
    ids = [[p.tokens.tolist() for p in run.prompts(5)] for run in (exact, other)]
    assert ids[0] == ids[1] != [p.tokens.tolist() for p in exact.prompts(4)]
    held = [[p.tokens.tolist() for p in four.prompts(step)] for step in (4, 7, 8)]
    assert held[0] == held[1] != held[2]
    assert four.learner.settings.replay.refresh_every == 4
    recaptured = run_of("recaptured_8", tmp_path)
    assert recaptured.arm.reuse == 8 and recaptured.learner.settings.replay.refresh_every == 1


def test_the_temperature_rises_while_answers_are_right(tmp_path):
    run = run_of("best", tmp_path)
    temperatures = []
    for reward in (1.0, 1.0, 0.0, 0.0, 0.0):
        run.learner.collector.score = lambda q, t, r=reward: r
        run.update(run.prompts(run.done))
        temperatures.append(run.learner.settings.rollout.temperature)
    assert temperatures == pytest.approx([1.05, 1.1025, 1.05, 1.0, 1.0])


def test_tasks_share_the_prompts_of_an_update(tmp_path):
    few = replace(TOY.task, filler=0)
    run = Run(Arm(lr=0.1), replace(TOY, mixed=(TOY.task, few)), 0, tmp_path)
    assert [len(prompt.tokens) for prompt in run.prompts(0)] == [21, 21, 9, 9]


def test_a_question_is_right_by_both_values_and_the_end():
    (prompt,) = lookups(TOY.task, 1, 0, "test")
    (question,) = prompt.questions
    answer = question.row["answer"]
    assert len(prompt.tokens) == 1 + 3 * 2 + 12 + 2 and len(answer) == 3
    assert right(question, answer) == 1.0
    assert right(question, answer[:2]) == right(question, answer.roll(1)) == 0.0
    symbols = prompt.tokens.tolist()
    at = symbols.index(symbols[-1])  # the key that is asked stands in its record
    assert symbols[at + 1 : at + 3] == answer[:2].tolist()


def test_prompts_with_the_first_value_in_another_record_are_alike():
    prompts = lookups(TOY.task, 20, 0, "test")
    symbols = vocabulary(LookupConfig())
    for prompt in prompts:
        text = [symbols[token] for token in prompt.tokens[:-1]]
        firsts = [text[i + 1] for i, s in enumerate(text[:-1]) if s.startswith("k")]
        assert len(firsts) == 2
        assert alike(prompt) == (firsts[0] == firsts[1])
    assert len({alike(prompt) for prompt in prompts}) == 2


def test_accuracy_is_the_share_of_right_answers(tmp_path, monkeypatch):
    run = run_of("exact", tmp_path)
    prompts = lookups(TOY.task, 24, 0, "test")
    assert accuracy(run, prompts) == accuracy(run, prompts)
    monkeypatch.setattr("benchmarks.rl_study.training.right", lambda question, tokens: 0.25)
    assert accuracy(run, prompts) == accuracy(run, prompts, greedy=True) == 0.25


def test_shuffled_rewards_are_the_same_ones_elsewhere(tmp_path):
    run = run_of("shuffled", tmp_path)
    rolled = run.learner.sample(run.prompts(0), 0)
    groups = [group for item in rolled for group in item.groups]
    for i, group in enumerate(groups):
        group.rewards = torch.tensor([3.0 * i, 3.0 * i + 1, 3.0 * i + 2], dtype=torch.float64)
    before = torch.cat([group.rewards for group in groups])
    shuffle(rolled, "0/0")
    after = torch.cat([group.rewards for group in groups])
    assert not torch.equal(before, after) and torch.equal(before.sort()[0], after.sort()[0])


def test_the_cosine_of_exact_with_itself_is_one(tmp_path, monkeypatch):
    run = run_of("exact", tmp_path)
    monkeypatch.setattr("benchmarks.rl_study.training.right", even)
    assert compare(run, 0) < 0.999

    def always_exact(model, optimizer, arm, setting, seed):
        return learner(model, optimizer, replace(arm, mode="exact"), setting, seed)

    monkeypatch.setattr("benchmarks.rl_study.training.learner", always_exact)
    assert compare(run, 0) == pytest.approx(1.0)


def test_the_rate_warms_up_and_falls_to_a_tenth():
    assert [schedule(0, 300), schedule(9, 300)] == pytest.approx([0.1, 0.973])
    assert schedule(299, 300) == pytest.approx(0.103)


def test_rates_are_searched_by_validation_over_the_row_s_seeds():
    """Accuracies are made up: most at rate 3."""
    searched = study(("exact", "naive", "dpo_exact"), search=True, seeds=2)
    results = {}

    def lookup(each):
        return results.get(each.key(""))

    ran = []
    while waiting := [each for each in needed(searched, lookup) if lookup(each) is None]:
        each = waiting[0]
        rate = GRID.index(each.arm.lr)
        results[each.key("")] = {"validation": 0.9 - 0.1 * abs(rate - 3)}
        ran.append((each.name, rate, each.seed))
    assert [best_rate(searched, name, lookup) for name in searched.rows] == [3, 3, 3]
    assert {seed for name, rate, seed in ran if (name, rate) == ("exact", 4)} == {0, 1, 2}
    assert sorted((r, s) for name, r, s in ran if name == "dpo_exact") == [
        (1, 0),
        (2, 0),
        (3, 0),
        (3, 1),
        (4, 0),
    ]
    rates, seeds = outcome(searched, lookup)
    assert rates == {"exact": 3, "naive": 3, "dpo_exact": 3} and len(seeds) == 2


def test_every_row_has_a_rate_or_follows_one_that_has():
    for name, row in ROWS.items():
        assert (name in RATES) == (row.follows is None)
        assert row.follows is None or row.follows in RATES
