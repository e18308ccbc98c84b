"""Tokens that are none: one line that names the one that is wrong, before anything is run."""

from contextlib import contextmanager

import pytest
import torch

from algorithms.branch_replay.config import ReplayConfig
from algorithms.branch_replay.losses import PerBranch
from algorithms.branch_replay.replay import BranchReplay
from algorithms.branch_replay.tree import Node
from algorithms.common.errors import InputError
from tests.families import VOCAB, tiny
from tests.replays import coupled, distance, responses, take_gradients, tokens

FORM = "without padding, not"

BAD = {
    "a list": ([1, 2, 3], f"must be a tensor int64 [n] {FORM} a list"),
    "a string": ("abc", f"must be a tensor int64 [n] {FORM} a str"),
    "nothing": (None, f"must be a tensor int64 [n] {FORM} a NoneType"),
    "floats": (torch.ones(3), f"must be int64 [n] {FORM} torch.float32 [3]"),
    "int32": (torch.ones(3, dtype=torch.int32), f"must be int64 [n] {FORM} torch.int32 [3]"),
    "a mask": (torch.ones(3, dtype=torch.bool), f"must be int64 [n] {FORM} torch.bool [3]"),
    "batches": (tokens(6).view(1, 2, 3), f"must be int64 [n] {FORM} torch.int64 [1, 2, 3]"),
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


def test_a_scalar_is_no_list_of_responses(replay):
    with refused(replay, "responses: must be a list of tensors int64 [n], not a scalar tensor"):
        replay.step(tokens(5), torch.tensor(3), coupled)


@pytest.mark.parametrize(("children", "kind"), [(None, "NoneType"), (3, "int"), ({}, "dict")])
def test_children_that_are_no_list(replay, children, kind):
    tree = Node(tokens(4), [Node(tokens(2), children)], scored=False)
    with refused(replay, f"trees[0].children[0].children: must be a list of nodes, not a {kind}"):
        replay.step_trees([tree], lambda trees: coupled(trees[0]))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: None, "must be a causal language model of transformers, not a NoneType"),
        (lambda: torch.nn.Linear(2, 2), "must be a causal language model .* not a Linear"),
        (lambda: tiny("llama").model, "LlamaModel has no vocabulary head"),
    ],
)
def test_what_is_no_language_model(model, message):
    with pytest.raises(InputError, match=f"^model: {message}"):
        BranchReplay(model())


def test_weights_made_in_inference_mode():
    with torch.inference_mode():
        model = tiny("llama")
    with pytest.raises(InputError, match="^model: its weights were made in torch.inference_mode"):
        BranchReplay(model)


@pytest.mark.parametrize("config", [{"chunk": 4}, "exact", 4])
def test_what_is_no_config(config):
    with pytest.raises(InputError, match="^config: must be a ReplayConfig, not a "):
        BranchReplay(tiny("llama"), config)


def test_autocast_around_replay(replay):
    captured = replay.capture(tokens(5))
    tree = Node(tokens(4), [Node(tokens(2))], scored=False)
    with torch.autocast("cpu", torch.bfloat16):
        for call in (
            lambda: BranchReplay(replay.model),
            lambda: replay.step(tokens(5), responses(3), coupled),
            lambda: replay.step(captured, responses(3), coupled),
            lambda: replay.step_trees([tree], lambda trees: coupled(trees[0])),
            lambda: replay.log_probs(tokens(5), responses(3)),
            lambda: replay.capture(tokens(5)),
        ):
            with pytest.raises(InputError, match="^torch.autocast: "):
                call()
    with torch.autocast("cuda", torch.bfloat16, enabled=torch.cuda.is_available()):
        replay.log_probs(tokens(5), responses(3))  # of another device


CAPTURED = {
    "window": ({"window": 3}, {}, "window 3, this replay has None"),
    "no window": ({}, {"window": 5}, "window None, this replay has 5"),
    "kv_dtype": ({"kv_dtype": "bf16"}, {}, "kv_dtype bf16, this replay has model"),
    "no kv_dtype": ({}, {"kv_dtype": "bf16"}, "kv_dtype model, this replay has bf16"),
    "chunk": ({}, {"chunk": 5}, "chunk 4, this replay has 5"),
    "kept": ({"keep_attention": True}, {"keep_attention": True, "chunk": 3}, "chunk 4, this"),
    "old": ({}, {"mode": "response_only", "refresh_every": 2, "chunk": 8}, "chunk 4, this"),
}


@pytest.mark.parametrize("case", CAPTURED)
def test_a_prompt_captured_with_other_settings(case):
    model = tiny("llama")
    then, now, message = CAPTURED[case]
    captured = BranchReplay(model, ReplayConfig(**({"chunk": 4} | then))).capture(tokens(12))
    other = BranchReplay(model, ReplayConfig(**({"chunk": 4} | now)))
    for call in (
        lambda: other.step(captured, responses(3), coupled),
        lambda: other.step(captured, responses(3), PerBranch(lambda i, lp: lp.sum())),
        lambda: other.log_probs(captured, responses(3)),
    ):
        with pytest.raises(InputError, match=f"^prompt: was captured with {message}"):
            call()
        assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "response_only"},
        {"mode": "truncated", "truncated_chunks": 2},
        {"offload": True},
        {"keep_attention": True},
        {"branches_per_pass": 1, "head_chunk": 2},
    ],
)
def test_settings_that_a_captured_prompt_does_not_depend_on(settings):
    """Captured with them and used without, and the other way around: as if captured anew."""
    model = tiny("llama")
    configs = [ReplayConfig(chunk=4), ReplayConfig(chunk=4, **settings)]
    for then, now in (configs, configs[::-1]):
        replay = BranchReplay(model, now)
        captured = BranchReplay(model, then).capture(tokens(12))
        replay.step(captured, responses(6, 3), coupled)
        found = take_gradients(model)
        replay.step(tokens(12), responses(6, 3), coupled)
        assert distance(found, take_gradients(model)) <= 1e-6


@pytest.mark.parametrize("per_branch", [False, True])
def test_tokens_written_to_after_they_were_handed_in(replay, per_branch):
    """After a capture and inside of the loss: what counts is what they were."""
    model = replay.model

    def run(spoil):
        handed = []

        def term(i, log_probs):
            for each in handed if spoil else ():
                each.fill_(2)
            return (i + 1) * log_probs.square().sum()

        whole = PerBranch(term)
        loss_fn = whole if per_branch else lambda lps: whole(lps)
        prompt, answers = tokens(9), responses(5, 3)
        handed[:] = [prompt, *answers]
        captured = replay.capture(prompt)
        if spoil:
            prompt.fill_(1)
        replay.step(captured, answers, loss_fn)
        prompt, answers = tokens(9), responses(5, 3)
        handed[:] = [prompt, *answers]
        replay.step(prompt, answers, loss_fn)
        tree = Node(tokens(9), [Node(tokens(4))], scored=False)
        handed[:] = [tree.tokens, tree.children[0].tokens]
        replay.step_trees([tree], lambda trees: whole(trees[0]))
        return take_gradients(model)

    clean, spoilt = run(False), run(True)
    assert all(torch.equal(clean[name], spoilt[name]) for name in clean)
