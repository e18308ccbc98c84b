"""Trees of any depth: turns of a user in between, branches inside branches, several trees."""

import pytest
import torch

from algorithms.branch_replay import reference
from algorithms.branch_replay.config import ReplayConfig
from algorithms.branch_replay.replay import BranchReplay
from algorithms.branch_replay.tree import Node, plan, walk
from algorithms.common.errors import InputError
from tests.families import tiny, true_float64
from tests.replays import coupled, distance, responses, take_gradients, tokens

HYBRID = "falcon_h1"


def forest() -> list[Node]:
    """P -> {A -> {B, C}, D}, then a dialogue whose answer to a question forks again."""
    inner = Node(tokens(5, 1), [Node(tokens(3, 2)), Node(tokens(1, 3))])
    first = Node(tokens(9), [inner, Node(tokens(4, 4))], scored=False)
    answers = [Node(tokens(6, 5)), Node(tokens(2, 6)), Node(tokens(0, 6))]
    question = Node(tokens(3, 7), answers, scored=False)
    aside = Node(tokens(1, 8), [Node(tokens(2, 9), scored=False), Node(tokens(1, 9))])
    second = Node(tokens(6, 10), [Node(tokens(4, 11), [question]), aside], scored=False)
    return [first, second]


def loss_fn(trees):
    return coupled([branch for tree in trees for branch in tree])


@pytest.mark.parametrize("family", ["llama", "mistral", HYBRID, "qwen3_5_text", "lfm2"])
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_a_forest_equals_full_sequences(family, chunk):
    model = tiny(family)
    with true_float64(model):
        loss, log_probs, _ = reference.step_trees(model, forest(), loss_fn)
        truth = take_gradients(model)
        replay = BranchReplay(model, ReplayConfig(chunk=chunk, branches_per_pass=2))
        out = replay.step_trees(forest(), loss_fn)
        gradients = take_gradients(model)
    assert out.loss == pytest.approx(loss, rel=1e-11)
    for ours, theirs in zip(out.log_probs, log_probs, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    assert distance(gradients, truth) <= 1e-12


def test_tokens_before_a_fork_are_run_once_a_pass():
    model = tiny("llama")
    out = BranchReplay(model, ReplayConfig(chunk=100)).step_trees(forest()[:1], loss_fn)
    take_gradients(model)
    inputs = 8 + 5 + 3 + 1 + 4
    assert out.tokens_with_graph == inputs
    assert out.tokens_without_graph == inputs + 5  # the inner node is captured in both passes


def test_deep_chains_do_not_recurse():
    model = tiny("llama", num_hidden_layers=1, max_position_embeddings=4096)
    replay = BranchReplay(model, ReplayConfig(chunk=1))
    out = replay.step(tokens(1100), responses(2), coupled)
    assert out.tokens_with_graph == 1101


def test_every_token_has_one_owner():
    tree = forest()[1]
    segments = list(walk(plan(tree, ReplayConfig(chunk=2)).roots))
    scored = [s for s in segments if s.targets is not None]
    owned = sorted(i for s in scored for i in range(s.offset, s.offset + len(s.inputs)))
    assert owned == list(range(4 + 6 + 2 + 1 + 1))
    assert all(len(s.inputs) <= 2 for s in segments)
    assert all(c.start == s.end for s in segments for c in s.children)
    assert (
        sum(len(s.inputs) * s.branches for s in segments) == 3 * 5 + 3 * 4 + 3 * 3 + 8 + 2 * 6 + 3
    )


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (Node(tokens(0), scored=False), "at least one token"),
        (Node(tokens(3)), "root of a tree cannot be scored"),
    ],
)
def test_trees_that_are_none(tree, message):
    with pytest.raises(InputError, match=message):
        plan(tree, ReplayConfig())
