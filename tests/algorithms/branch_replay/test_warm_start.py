"""Sequences of the supervised start, and that it learns."""

import random

import torch

from algorithms.branch_replay.lookup import ASK, END, LookupConfig, vocabulary
from algorithms.branch_replay.warm_start import BATCH, dense_batch, warm_start
from tests.lookups import reader

CONFIG = LookupConfig(keys=4, values=2, records=2, fillers=2)


def test_every_key_is_asked_and_only_answers_are_learned():
    sequences, answers = dense_batch(CONFIG, (3, 5), random.Random(0))
    assert sequences.shape == (BATCH, 1 + 9 + 5 + 15)
    symbols = vocabulary(CONFIG)
    for row in sequences:
        words = [symbols[i] for i in row.tolist()]
        prompt, questions = words[:15], words[15:]
        for first in range(0, 15, 5):
            ask, key, a, b, end = questions[first : first + 5]
            place = prompt.index(key)
            assert (ask, end) == (ASK, END) and prompt[place + 1 : place + 3] == [a, b]
        learned = [word for word, answer in zip(words, answers.tolist(), strict=True) if answer]
        assert learned == [w for i in range(0, 15, 5) for w in questions[i + 2 : i + 5]]


def test_it_learns_and_stops_where_it_should():
    """One record whose value is one of one: nothing to read, so it is learned in a moment."""
    config = LookupConfig(keys=2, values=1, records=1, fillers=2)
    model = reader(config)
    steps = warm_start(model, config, seed=0, stages=((1, 0),), further=(1, 1), most_steps=300)
    assert 10 < steps < 310
    sequences, answers = dense_batch(config, (1, 0), random.Random(1))
    with torch.no_grad():
        logits = model(input_ids=sequences[:, :-1]).logits[:, answers[1:]]
    assert bool((logits.argmax(-1) == sequences[:, 1:][:, answers[1:]]).double().mean() > 0.9)
