"""Streams of bytes: who gets which document, which windows a step reads."""

import numpy as np
import pytest

from benchmarks.study import streams
from benchmarks.study.streams import END
from tasks.data_config import CorpusConfig, SourceConfig


def documents(*lengths):
    """Document i holds the byte i; each ends with END."""
    parts = [[i] * length + [END] for i, length in enumerate(lengths)]
    return np.array(sum(parts, []), dtype=np.uint16)


def test_whole_documents_are_dealt_in_turn():
    dealt = streams.deal(documents(3, 1, 2, 0, 4), 2)
    assert dealt[0].tolist() == [0, 0, 0, END, 2, 2, END, 4, 4, 4, 4, END]
    assert dealt[1].tolist() == [1, END, END]


def test_sorted_workers_have_equal_contiguous_parts_and_held_out_sets_share_no_document(tmp_path):
    path = tmp_path / "bytes.npz"
    train, held_out = documents(*[9] * 8), documents(5, 5, 5, 5)
    streams.write(path, train, held_out)
    loaded = streams.load(path, 4, "sorted")
    assert np.concatenate(loaded.train).tolist() == train.tolist()
    assert [len(part) for part in loaded.train] == [20] * 4
    assert set(loaded.validation) & set(loaded.test) == {END}
    assert len(loaded.validation) + len(loaded.test) == len(held_out)
    assert [set(part) for part in streams.load(path, 4, "in_turn").train] == [
        {i, i + 4, END} for i in range(4)
    ]


def test_an_epoch_reads_every_window_once_and_the_next_in_another_order():
    stream = np.arange(8 * 4 + 1, dtype=np.uint16)
    epochs = []
    for epoch in range(2):
        steps = [
            streams.batch(stream, seed=3, step=epoch * 4 + step, sequences=2, length=4)
            for step in range(4)
        ]
        rows = [row.tolist() for batch in steps for row in batch]
        assert all(row == list(range(row[0], row[0] + 5)) for row in rows)
        epochs.append([row[0] for row in rows])
    assert sorted(epochs[0]) == sorted(epochs[1]) == [4 * window for window in range(8)]
    assert epochs[0] != epochs[1]


def test_held_out_windows_are_spread_evenly():
    stream = np.arange(41, dtype=np.uint16)
    assert streams.spread(stream, 5, 4)[:, 0].tolist() == [0, 8, 16, 24, 32]
    assert streams.spread(stream, 100, 4)[:, 0].tolist() == [4 * w for w in range(10)]


def test_the_corpus_is_read_as_utf8_once(tmp_path, monkeypatch):
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(12):
        (texts / f"{number}.txt").write_text(f"{number} é", encoding="utf-8")
    source = SourceConfig(origin=f"path:{texts}/*.txt", slots={"text": ["**/*"]}, licence="mine")
    config = CorpusConfig(sources=[source], val_fraction=0.5)
    path = streams.prepare(config, tmp_path)
    with np.load(path) as file:
        everything = np.concatenate([file["train"], file["held_out"]])
    found = sorted(
        bytes(part[part != END].astype(np.uint8)).decode()
        for part in np.split(everything, np.flatnonzero(everything == END))
    )
    assert found == sorted(["", *(f"{number} é" for number in range(12))])
    monkeypatch.setattr("tasks.corpus.build", pytest.fail)
    assert streams.prepare(config, tmp_path) == path
