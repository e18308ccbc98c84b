"""Numbers worked by hand, and gradients against the scalar twin in float64."""

import math

import pytest
import torch

from algorithms.branch_replay import objectives
from algorithms.branch_replay import objectives_reference as reference
from algorithms.branch_replay.objectives import Totals

LOG2, LOG3 = math.log(2), math.log(3)
LENGTHS = (5, 1, 0, 7, 3)
REWARDS = [1.0, 0.0, 0.25, 1.0, -0.5]


def ragged(*rows):
    return [torch.tensor(row, dtype=torch.float64) for row in rows]


def random(seed, lengths=LENGTHS):
    generator = torch.Generator().manual_seed(seed)
    return [-torch.rand(n, generator=generator, dtype=torch.float64) for n in lengths]


def by_hand(loss, value):
    assert float(loss) == pytest.approx(value, rel=1e-12, abs=1e-15)


# Two responses of two tokens and one: ratios 2 and 1/2, and 3. Advantages 1 and -1.
NEW = ragged([LOG2, -LOG2], [LOG3])
OLD = ragged([0.0, 0.0], [0.0])
UP_DOWN = torch.tensor([1.0, -1.0], dtype=torch.float64)
TOTALS = Totals.of(NEW)


def test_clipped_by_hand():
    """A > 0: 2 is cut to 1.2, 1/2 stays; A < 0: 3 stays."""
    first, second = objectives.clipped(NEW, OLD, UP_DOWN, 0.2, 0.2)
    torch.testing.assert_close(first, torch.tensor([-1.2, -0.5], dtype=torch.float64))
    torch.testing.assert_close(second, torch.tensor([3.0], dtype=torch.float64))


def test_policy_losses_by_hand():
    by_hand(objectives.grpo(NEW, OLD, UP_DOWN, TOTALS), (-(1.2 + 0.5) / 2 + 3.0) / 2)
    by_hand(objectives.ppo(NEW, OLD, UP_DOWN, TOTALS), (-1.2 - 0.5 + 3.0) / 3)
    by_hand(objectives.dapo(NEW, OLD, UP_DOWN, TOTALS), (-1.28 - 0.5 + 3.0) / 3)
    by_hand(objectives.dr_grpo(NEW, OLD, UP_DOWN, TOTALS, 10), (-1.2 - 0.5 + 3.0) / 2 / 10)
    by_hand(objectives.rloo(NEW, UP_DOWN, TOTALS), (-(LOG2 - LOG2) + LOG3) / 2)


def test_gspo_by_hand():
    """The ratio of the first response is the geometric mean of 2 and 1/2: 1."""
    by_hand(objectives.gspo(NEW, OLD, UP_DOWN, TOTALS), (-1.0 + 3.0) / 2)
    new = ragged([LOG2, LOG2], [])
    by_hand(objectives.gspo(new, ragged([0.0, 0.0], []), UP_DOWN, TOTALS), (-1.0004 + 1.0) / 2)


def test_preferences_by_hand():
    """h = (log 2 - log 2) - log 3 for the pair (0, 1)."""
    rewards = torch.tensor([0.5, 0.0])
    pairs = objectives.winning_pairs(rewards)
    assert pairs.tolist() == [[0, 1]]
    by_hand(objectives.dpo(NEW, OLD, pairs, 1, beta=1.0), math.log(1 + 3))
    by_hand(objectives.ipo(NEW, OLD, pairs, 1, beta=0.25), (-LOG3 - 2.0) ** 2)
    by_hand(objectives.dpo(NEW, OLD, pairs, 4, beta=1.0), math.log(1 + 3) / 4)


def test_penalties_by_hand():
    ref = ragged([0.0, 0.0], [0.0])
    assert [p.tolist() for p in objectives.kl(NEW, ref, "k1")] == [[LOG2, -LOG2], [LOG3]]
    by_hand(
        objectives.token_mean(objectives.kl(NEW, ref, "k2"), TOTALS), (LOG2**2 + LOG3**2 / 2) / 3
    )
    k3 = (0.5 + LOG2 - 1) + (2 - LOG2 - 1) + (1 / 3 + LOG3 - 1)
    by_hand(objectives.token_mean(objectives.kl(NEW, ref, "k3"), TOTALS), k3 / 3)
    by_hand(objectives.token_mean(objectives.entropy(NEW), TOTALS), -LOG3 / 3)


def test_advantages_by_hand():
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    std = (((0.75**2) + 3 * 0.25**2) / 3) ** 0.5
    expected = torch.tensor([0.75, -0.25, -0.25, -0.25], dtype=torch.float64)
    torch.testing.assert_close(objectives.group_advantages(rewards), expected / (std + 1e-4))
    torch.testing.assert_close(objectives.group_advantages(rewards, scale=False), expected)
    torch.testing.assert_close(
        objectives.rloo_advantages(rewards), torch.tensor([1, -1 / 3, -1 / 3, -1 / 3]).double()
    )


@pytest.mark.parametrize("advantages", [objectives.group_advantages, objectives.rloo_advantages])
@pytest.mark.parametrize("rewards", [[0.1] * 3, [0.7], [0.0] * 4, []])
def test_equal_rewards_and_single_responses_have_no_advantage(advantages, rewards):
    """0.1 three times has a mean that is not 0.1 in float32."""
    given = torch.tensor(rewards)
    assert torch.equal(advantages(given), torch.zeros(len(rewards)))


# Denominators.


def losses_of(length, value):
    """A response whose tokens' loss is `value` each under a ratio of 1."""
    return torch.zeros(length, dtype=torch.float64), torch.tensor([-value], dtype=torch.float64)


def test_the_token_mean_counts_tokens_of_all_parts_alike():
    (short, a), (long, b) = losses_of(100, 2.0), losses_of(900, 0.5)
    totals = Totals(responses=2, tokens=1000)
    whole = objectives.dapo([short, long], [short, long], torch.cat([a, b]), totals)
    parts = [objectives.dapo([x], [x], y, totals) for x, y in ((short, a), (long, b))]
    by_hand(whole, 0.65)
    by_hand(sum(parts), 0.65)
    by_hand(objectives.grpo([short, long], [short, long], torch.cat([a, b]), totals), 1.25)


def loss_on_rank(comm):
    """The gradient of one number by each rank's share of an update, summed over ranks."""
    lengths, losses = ((100,), [2.0]) if comm.rank == 0 else ((400, 500), [0.5, 0.5])
    counts = torch.tensor([len(lengths), sum(lengths)])
    comm.all_reduce(counts, "totals", "sum")
    totals = Totals(*counts.tolist())
    shift = torch.zeros((), dtype=torch.float64, requires_grad=True)
    new = [shift.expand(n) for n in lengths]
    old = [torch.zeros(n, dtype=torch.float64) for n in lengths]
    loss = objectives.dapo(new, old, -torch.tensor(losses, dtype=torch.float64), totals)
    loss.backward()
    found = torch.stack([loss.detach(), shift.grad])
    comm.all_reduce(found, "found", "sum")
    return found.tolist()


def test_ranks_of_unequal_share_add_up_to_the_whole(ranks):
    for found in ranks.run(loss_on_rank, world_size=2):
        assert found == pytest.approx([0.65, 0.65], rel=1e-12)


# Gradients.


def scalars(parts):
    return [[value.clone().requires_grad_() for value in part] for part in parts]


def policy(name, new, old, ref, a, rewards):
    """The loss of `name` by objectives.py."""
    totals = Totals.of(new)
    advantages = torch.tensor(a, dtype=torch.float64)
    if name in ("grpo", "ppo", "dapo", "gspo"):
        return getattr(objectives, name)(new, old, advantages, totals)
    if name == "dr_grpo":
        return objectives.dr_grpo(new, old, advantages, totals, 9)
    if name == "rloo":
        return objectives.rloo(new, advantages, totals)
    if name in ("dpo", "ipo"):
        pairs = objectives.winning_pairs(torch.tensor(rewards))
        return getattr(objectives, name)(new, ref, pairs, len(pairs), beta=0.3)
    return objectives.sequence_mean(objectives.kl(new, ref, name), totals)


def slow(name, new, old, ref, a, rewards):
    """The same by the twin."""
    if name in ("grpo", "ppo", "dapo", "dr_grpo"):
        high = 0.28 if name == "dapo" else 0.2
        term = reference.clip_term(new, old, a, 0.2, high)
        if name == "grpo":
            return reference.sequence_mean(new, term)
        if name == "dr_grpo":
            return reference.sequence_sum(new, term, 9)
        return reference.token_mean(new, term)
    if name == "gspo":
        return reference.gspo(new, old, a, 3e-4, 4e-4)
    if name == "rloo":
        return reference.sequence_sum(new, lambda i, t: -a[i] * new[i][t])
    if name in ("dpo", "ipo"):
        return reference.preference(new, ref, rewards, 0.3, identity=name == "ipo")
    return reference.sequence_mean(new, reference.kl_term(new, ref, name))


@pytest.mark.parametrize(
    "name",
    ["grpo", "dr_grpo", "dapo", "ppo", "gspo", "rloo", "dpo", "ipo", "k1", "k2", "k3"],
)
def test_values_and_gradients_equal_the_twin(name):
    old, ref = random(1), random(2)
    new = [part.requires_grad_() for part in random(0)]
    a = reference.rloo_advantages(REWARDS)
    loss = policy(name, new, old, ref, a, REWARDS)
    loss.backward()

    single = scalars(random(0))
    truth = slow(name, single, scalars(old), scalars(ref), a, REWARDS)
    truth.backward()
    by_hand(loss.detach(), float(truth.detach()))
    ratios = torch.cat([n.detach() - o for n, o in zip(new, old, strict=True)]).exp()
    assert bool((ratios > 1.28).any()) and bool((ratios < 0.8).any())  # both clips are met
    for part, values in zip(new, single, strict=True):
        expected = [0.0 if v.grad is None else float(v.grad) for v in values]
        found = [0.0] * len(part) if part.grad is None else part.grad.tolist()
        assert found == pytest.approx(expected, rel=1e-12, abs=1e-15)
    assert any(part.grad is not None and bool(part.grad.any()) for part in new)


@pytest.mark.parametrize("scale", [True, False])
def test_advantages_equal_the_twin(scale):
    given = torch.tensor(REWARDS, dtype=torch.float64)
    expected = reference.group_advantages(REWARDS, scale)
    assert objectives.group_advantages(given, scale=scale).tolist() == pytest.approx(expected)
    expected = reference.rloo_advantages(REWARDS)
    assert objectives.rloo_advantages(given).tolist() == pytest.approx(expected)


@pytest.mark.parametrize(("gamma", "decay"), [(1.0, 1.0), (0.9, 0.7), (0.99, 0.0)])
def test_ppo_with_values_equals_the_twin(gamma, decay):
    old, values, target = random(1), random(3), random(4)
    new = [part.requires_grad_() for part in random(0)]
    advantages = [objectives.gae(r, v, gamma, decay) for r, v in zip(REWARDS, values, strict=True)]
    slow_advantages = [
        reference.gae(r, v.tolist(), gamma, decay) for r, v in zip(REWARDS, values, strict=True)
    ]
    for one, other in zip(advantages, slow_advantages, strict=True):
        assert one.tolist() == pytest.approx(other, rel=1e-12)
    loss = objectives.ppo(new, old, advantages, Totals.of(new))
    loss.backward()
    single = scalars(random(0))
    term = reference.clip_term(single, scalars(old), slow_advantages, 0.2, 0.2)
    truth = reference.token_mean(single, term)
    truth.backward()
    by_hand(loss.detach(), float(truth.detach()))
    for part, ones in zip(new, single, strict=True):
        expected = [0.0 if v.grad is None else float(v.grad) for v in ones]
        found = [0.0] * len(part) if part.grad is None else part.grad.tolist()
        assert found == pytest.approx(expected, rel=1e-12, abs=1e-15)
    squares = reference.token_mean(values, lambda i, t: (values[i][t] - target[i][t]) ** 2)
    by_hand(objectives.value_error(values, target, Totals.of(values)), float(squares))


# Odd cases.


def test_equal_rewards_leave_the_gradient_of_the_penalty_alone():
    new = [part.requires_grad_() for part in random(0)]
    old, ref, totals = random(1), random(2), Totals.of(new)
    advantages = objectives.group_advantages(torch.full((len(new),), 0.1, dtype=torch.float64))
    loss = objectives.grpo(new, old, advantages, totals)
    penalty = 0.5 * objectives.sequence_mean(objectives.kl(new, ref), totals)
    both = torch.autograd.grad(loss + penalty, new, retain_graph=True)
    alone = torch.autograd.grad(penalty, new)
    assert all(torch.equal(x, y) for x, y in zip(both, alone, strict=True))
    assert any(bool(x.any()) for x in both)


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0)])
def test_no_tokens_give_a_loss_of_zero_or_of_a_constant_ratio(lengths):
    new = random(0, lengths)
    advantages = torch.ones(len(lengths), dtype=torch.float64)
    totals = Totals.of(new)
    for loss in (objectives.grpo, objectives.ppo, objectives.dapo):
        assert float(loss(new, new, advantages, totals)) == 0.0
    assert float(objectives.rloo(new, advantages, totals)) == 0.0
    assert float(objectives.gspo(new, new, advantages, totals)) == (-1.0 if lengths else 0.0)
    assert float(objectives.dpo(new, new, torch.zeros(0, 2, dtype=torch.long), 0)) == 0.0


def test_ratios_that_would_overflow_give_finite_losses_and_gradients():
    new = [torch.tensor([-1.0, -2.0], requires_grad=True)]
    old = [torch.tensor([-500.0, 300.0])]
    for a in (1.0, 0.0, -1.0):
        loss = objectives.grpo(new, old, torch.tensor([a]), Totals.of(new))
        (gradient,) = torch.autograd.grad(loss, new)
        assert bool(torch.isfinite(loss)) and bool(torch.isfinite(gradient).all())


def distribution(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=True)


def test_penalties_have_in_expectation_the_gradients_that_they_claim():
    """Over one token's distribution, enumerated."""
    logits, other = distribution(0), distribution(1).detach().log_softmax(0)
    lp = logits.log_softmax(0)
    weights = lp.exp().detach()

    def gradient(loss):
        return torch.autograd.grad(loss, logits, retain_graph=True)[0]

    def expected(terms):
        return gradient((weights * terms[0]).sum())

    kl = (lp.exp() * (lp - other)).sum()
    reverse = (other.exp() * (other - lp)).sum()
    entropy = -(lp.exp() * lp).sum()
    torch.testing.assert_close(expected(objectives.kl([lp], [other], "k2")), gradient(kl))
    torch.testing.assert_close(expected(objectives.kl([lp], [other], "k3")), gradient(reverse))
    torch.testing.assert_close(
        expected(objectives.kl([lp], [other], "k1")), torch.zeros_like(logits)
    )
    torch.testing.assert_close(expected(objectives.negative_entropy([lp])), -gradient(entropy))
    torch.testing.assert_close(expected(objectives.entropy([lp])), torch.zeros_like(logits))
    by_hand((weights * objectives.entropy([lp])[0]).sum().detach(), float(entropy.detach()))
    for kind in ("k1", "k3"):
        by_hand(
            (weights * objectives.kl([lp], [other], kind)[0]).sum().detach(), float(kl.detach())
        )
