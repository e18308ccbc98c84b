"""A checkpoint from strangers is data: nothing in it is executed."""

import io
import logging
import os
import pickle

import pytest
import torch

from algorithms.common.checkpoint import Checkpoints
from algorithms.common.checkpoint_reader import Reader
from algorithms.common.comm import Comm
from algorithms.common.errors import InputError

ALONE = Comm(None, torch.device("cpu"))


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def saved(folder, extra=""):
    """Two checkpoints; the second one's plain value is `extra`."""
    checkpoints = Checkpoints(folder, 2, ALONE)
    checkpoints.save_own(1, {"weights": torch.ones(3)}, {"note": 1})
    state = {"weights": torch.full((3,), 2.0)}
    checkpoints.save_own(2, state, {"note": extra})
    return checkpoints


def test_an_index_that_would_run_something_is_passed_over(tmp_path, caplog):
    checkpoints = saved(tmp_path)
    index = tmp_path / "step_00000002" / ".metadata"
    bomb = pickle.dumps(Bomb(tmp_path / "exploded"))
    assert len(bomb) < (size := index.stat().st_size)
    index.write_bytes(bomb.ljust(size, b"."))  # what stands behind the end is not read
    with caplog.at_level(logging.WARNING):
        step, own, notes = checkpoints.load_own()
    assert (step, own["weights"].tolist(), notes) == (1, [1.0] * 3, {"note": 1})
    assert "posix.mkdir has no place in a checkpoint" in caplog.text
    assert not (tmp_path / "exploded").exists()


def test_a_value_that_would_run_something_is_refused(tmp_path):
    checkpoints = saved(tmp_path, extra="x" * 2000)
    folder = tmp_path / "step_00000002"
    [entry] = [
        stored
        for name, stored in Reader(folder).read_metadata().storage_data.items()
        if name.fqn == "extra"
    ]
    bomb = io.BytesIO()
    torch.save(Bomb(tmp_path / "exploded"), bomb)
    assert bomb.tell() <= entry.length
    with (folder / entry.relative_path).open("r+b") as file:
        file.seek(entry.offset)
        file.write(bomb.getvalue())
        length = bomb.tell()
    shorten(folder, length)
    with pytest.raises(
        InputError, match="step_00000002: cannot be loaded: Weights only load failed"
    ):
        checkpoints.load_own()
    assert not (tmp_path / "exploded").exists()


def shorten(folder, length):
    """Let the index say that the value `extra` has `length` bytes."""
    metadata = Reader(folder).read_metadata()
    for name, stored in metadata.storage_data.items():
        if name.fqn == "extra":
            stored.length = length
    text = pickle.dumps(metadata)
    (folder / ".metadata").write_bytes(text)
    (folder / "seal.json").write_text(f'{{".metadata": {len(text)}}}')


def test_no_index_is_one_line(tmp_path):
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(InputError, match=r"\.metadata: cannot be read: holds a dict$"):
        Reader(tmp_path).read_metadata()
