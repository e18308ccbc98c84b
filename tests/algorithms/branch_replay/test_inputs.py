"""Tokens that are none: one line that names the one that is wrong, before anything is run."""

from contextlib import contextmanager

import pytest
import torch

from algorithms.branch_replay.replay import BranchReplay
from algorithms.branch_replay.tree import Node
from algorithms.common.errors import InputError
from tests.families import VOCAB, tiny
from tests.replays import coupled, responses, take_gradients, tokens

FORM = "without padding, not"

BAD = {
    "a list": ([1, 2, 3], f"must be a tensor int64 [n] {FORM} a list"),
    "a string": ("abc", f"must be a tensor int64 [n] {FORM} a str"),
    "nothing": (None, f"must be a tensor int64 [n] {FORM} a NoneType"),
    "floats": (torch.ones(3), f"must be int64 [n] {FORM} torch.float32 [3]"),
    "int32": (torch.ones(3, dtype=torch.int32), f"must be int64 [n] {FORM} torch.int32 [3]"),
    "a mask": (torch.ones(3, dtype=torch.bool), f"must be int64 [n] {FORM} torch.bool [3]"),
    "a batch": (tokens(6).view(2, 3), f"must be int64 [n] {FORM} torch.int64 [2, 3]"),
    "a scalar": (torch.tensor(5), f"must be int64 [n] {FORM} torch.int64 []"),
    "too large": (
        torch.tensor([1, VOCAB, 3]),
        f"token {VOCAB} at position 1 is not in the vocabulary of {VOCAB}",
    ),
    "negative": (
        torch.tensor([1, 2, -100]),
        f"token -100 at position 2 is not in the vocabulary of {VOCAB}",
    ),
    "elsewhere": (torch.ones(3, dtype=torch.int64, device="meta"), "is on meta, the model on cpu"),
}


@pytest.fixture(scope="module")
def replay():
    return BranchReplay(tiny("llama"))


@contextmanager
def refused(replay, message):
    """Exactly this line, and a model without gradients."""
    with pytest.raises(InputError) as caught:
        yield
    assert str(caught.value) == message
    assert all(p.grad is None for p in replay.model.parameters())


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_prompt_is_named(replay, kind):
    bad, message = BAD[kind]
    for call in (
        lambda: replay.step(bad, responses(3), coupled),
        lambda: replay.log_probs(bad, responses(3)),
        lambda: replay.capture(bad),
    ):
        with refused(replay, f"prompt: {message}"):
            call()


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_response_is_named(replay, kind):
    bad, message = BAD[kind]
    answers = [tokens(2), tokens(0), bad, tokens(4)]
    captured = replay.capture(tokens(5))
    for call in (
        lambda: replay.step(tokens(5), answers, coupled),
        lambda: replay.step(captured, answers, coupled),
        lambda: replay.log_probs(tokens(5), answers),
    ):
        with refused(replay, f"responses[2]: {message}"):
            call()


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_node_of_a_tree_is_named_by_its_place(replay, kind):
    bad, message = BAD[kind]
    good = Node(tokens(4), [Node(tokens(2))], scored=False)
    answers = [Node(tokens(3)), Node(tokens(2), [Node(bad)])]
    with refused(replay, f"trees[1].children[1].children[0].tokens: {message}"):
        replay.step_trees([good, Node(tokens(4), answers, scored=False)], coupled)


def test_the_first_bad_one_is_named(replay):
    wrong = torch.tensor([VOCAB])
    with refused(
        replay, f"prompt: token {VOCAB} at position 0 is not in the vocabulary of {VOCAB}"
    ):
        replay.step(wrong, [wrong], coupled)


@pytest.mark.parametrize(
    ("answers", "kind"), [(None, "NoneType"), (3, "int"), (iter(responses(3)), "list_iterator")]
)
def test_responses_that_are_no_list(replay, answers, kind):
    with refused(replay, f"responses: must be a list of tensors int64 [n], not a {kind}"):
        replay.step(tokens(5), answers, coupled)


def test_trees_that_hold_no_nodes(replay):
    root = Node(tokens(4), [tokens(2)], scored=False)
    with refused(replay, "trees: must be a list of nodes, not a Node"):
        replay.step_trees(root, coupled)
    with refused(replay, "trees[0].children[0]: must be a Node, not a Tensor"):
        replay.step_trees([root], coupled)


def test_a_smaller_head_bounds_the_vocabulary_of_what_is_scored():
    """A prompt may hold tokens that no response can, for example those that stand for images."""
    model = tiny("llama")
    model.lm_head = torch.nn.Linear(model.lm_head.in_features, VOCAB - 2, dtype=torch.float64)
    replay = BranchReplay(model)
    prompt, wrong = torch.tensor([1, VOCAB - 1]), torch.tensor([VOCAB - 2])
    replay.step(prompt, [torch.tensor([VOCAB - 3])], lambda lps: lps[0].sum())
    take_gradients(model)
    message = f"token {VOCAB - 2} at position 0 is not in the vocabulary of {VOCAB - 2}"
    with refused(replay, f"responses[0]: {message}"):
        replay.step(prompt, [wrong], coupled)


def test_stacked_responses_are_a_list_of_them(replay):
    answers = torch.stack([tokens(3, 1), tokens(3, 2)])
    stacked, apart = replay.log_probs(tokens(5), answers), replay.log_probs(tokens(5), [*answers])
    assert all(torch.equal(a, b) for a, b in zip(stacked, apart, strict=True))
