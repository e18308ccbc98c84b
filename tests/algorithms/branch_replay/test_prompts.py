"""What rows of one prompt share."""

import pytest
import torch

from algorithms.branch_replay.prompts import Prompt, Question, joined, shared_prompt
from algorithms.common.errors import InputError


@pytest.mark.parametrize(
    ("rows", "shared", "questions"),
    [
        ([[1, 2, 3]], [1, 2, 3], [[]]),
        ([[1, 2, 3], [1, 2, 4, 5]], [1, 2], [[3], [4, 5]]),
        ([[1, 2], [1, 2, 4]], [1, 2], [[], [4]]),
        ([[10], [1, 0], [10, 2]], None, None),
    ],
)
def test_what_all_rows_begin_with_is_shared(rows, shared, questions):
    named = [(f"r{i}", tokens, {}) for i, tokens in enumerate(rows)]
    if shared is None:
        with pytest.raises(InputError, match="^prompt r0: its rows have no first token in common$"):
            shared_prompt(named)
        return
    prompt = shared_prompt(named)
    assert prompt.tokens.tolist() == shared
    assert [q.tokens.tolist() for q in prompt.questions] == questions
    assert [q.prompt_id for q in prompt.questions] == [name for name, _, _ in named]


def test_prompts_of_equal_length_are_joined_unless_a_question_is_long():
    def prompt(name, length, asked=2):
        questions = [
            Question(f"{name}{i}", torch.ones(n, dtype=torch.long), {})
            for i, n in enumerate([asked, 0])
        ]
        return Prompt(torch.full((length,), ord(name)), questions)

    given = [prompt("a", 3), prompt("b", 5), prompt("c", 3), prompt("d", 3, 9), prompt("e", 3)]
    assert joined(given, 1) == given
    first, second, third, fourth = joined(given, 2)
    assert first.tokens.tolist() == [[ord("a")] * 3, [ord("c")] * 3]
    asked = [(q.prompt_id, q.behind) for q in first.questions]
    assert asked == [("a0", 0), ("a1", 0), ("c0", 1), ("c1", 1)]
    assert [second, third, fourth] == [given[1], given[3], given[4]]
