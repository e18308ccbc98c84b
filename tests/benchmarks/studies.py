"""What tests of studies share: a little text, and an executor without processes."""

from concurrent.futures import Future

import numpy as np

from benchmarks.study import streams


def write_tokens(folder):
    """The file of a small corpus in `folder`."""
    generator = np.random.default_rng(0)
    documents = [np.append(generator.integers(97, 123, 60), streams.END) for _ in range(12)]
    text = np.concatenate(documents).astype(np.uint16)
    streams.write(folder / "bytes.npz", text, text[: 6 * 61])
    return folder / "bytes.npz"


class Inline:
    """An executor that works at once, in this process."""

    def __init__(self, *_, **__):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def submit(self, function, *arguments):
        future = Future()
        future.set_result(function(*arguments))
        return future
