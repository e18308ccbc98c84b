"""The rank pool itself: results, failures, death, hanging, and that nothing is left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch

from algorithms.common.comm import Comm
from tests.distributed import RankError, RankPool


@dataclass
class Told:
    """A class of a test module, to travel both ways."""

    value: int


def identity(comm: Comm, told: Told) -> tuple[int, int, int, Told]:
    return comm.rank, comm.world_size, os.getpid(), Told(told.value + comm.rank)


def add_ranks(comm: Comm) -> float:
    total = torch.tensor(float(comm.rank))
    comm.all_reduce(total, "test")
    return total.item()


def draw(comm: Comm) -> float:
    return torch.rand(()).item()


def fail_on(comm: Comm, bad_rank: int) -> None:
    if comm.rank == bad_rank:
        raise KeyError("the marmot")


def fail_before_collective(comm: Comm) -> None:
    if comm.rank == 1:
        raise ValueError("never joins")
    comm.barrier()


def leave_a_message_and_fail(comm: Comm) -> None:
    if comm.rank == 0:
        comm.isend(torch.full((4,), 666.0), 1, "test")
    raise ValueError("all fail")


def pass_on(comm: Comm) -> torch.Tensor:
    tensor = torch.full((4,), 1.0)
    if comm.rank == 0:
        comm.send(tensor, 1, "test")
        return tensor
    return comm.recv(torch.empty(4), 0, "test")


def die(comm: Comm) -> None:
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def hang(comm: Comm) -> None:
    if comm.rank == 1:
        time.sleep(600)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_runs_on_exactly_these_ranks(ranks: RankPool, world_size: int) -> None:
    told = ranks.run(identity, Told(10), world_size=world_size)
    assert [(rank, size) for rank, size, _, _ in told] == [
        (r, world_size) for r in range(world_size)
    ]
    assert [told.value for *_, told in told] == [10 + r for r in range(world_size)]
    assert isinstance(told[0][3], Told)
    assert len({pid for _, _, pid, _ in told} - {os.getpid()}) == world_size
    assert ranks.run(add_ranks, world_size=world_size) == [sum(range(world_size))] * world_size


def test_processes_stay_and_every_run_starts_with_the_same_seed(ranks: RankPool) -> None:
    first, second = (ranks.run(identity, Told(0)) for _ in range(2))
    assert [pid for _, _, pid, _ in first] == [pid for _, _, pid, _ in second]
    assert ranks.run(draw) == ranks.run(draw)


def test_exception_names_rank_and_carries_the_remote_traceback(ranks: RankPool) -> None:
    before = ranks.run(identity, Told(0))
    with pytest.raises(RankError, match="rank 2 of 4, fail_on: KeyError: 'the marmot'") as caught:
        ranks.run(fail_on, 2)
    assert (caught.value.rank, caught.value.kind) == (2, "KeyError")
    assert 'raise KeyError("the marmot")' in str(caught.value)
    assert ranks.run(add_ranks) == [6.0] * 4
    assert [pid for *_, pid, _ in ranks.run(identity, Told(0))] == [pid for *_, pid, _ in before]


def test_messages_of_a_failed_run_do_not_reach_the_next(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="all fail"):
        ranks.run(leave_a_message_and_fail, world_size=2)
    assert torch.equal(ranks.run(pass_on, world_size=2)[1], torch.ones(4))


def test_ranks_that_wait_for_a_failed_one_are_replaced(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="rank 1 of 2, .*never joins"):
        ranks.run(fail_before_collective, world_size=2)
    assert ranks.run(add_ranks) == [6.0] * 4


def test_death_fails_clearly_and_the_pool_recovers(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="rank 1 of 2, die: died with exit code -9"):
        ranks.run(die, world_size=2)
    *_, (_, _, pid, _) = ranks.run(identity, Told(0))
    idle = next(child for child in multiprocessing.active_children() if child.pid == pid)
    idle.kill()
    idle.join()
    assert ranks.run(add_ranks) == [6.0] * 4


def test_hanging_fails_clearly_and_the_pool_recovers(ranks: RankPool) -> None:
    ranks.run(add_ranks)
    with pytest.raises(RankError, match="rank 1 of 2, hang: hung, no answer in 5 s"):
        ranks.run(hang, world_size=2, timeout=5)
    assert ranks.run(add_ranks, world_size=2) == [1.0] * 2


def test_nested_functions_are_refused(ranks: RankPool) -> None:
    with pytest.raises(ValueError, match="top level"):
        ranks.run(lambda comm: None)


INNER = """
import os, pathlib, time
from tests.distributed import ranks

def where(comm):
    return os.getpid()

def sleep(comm):
    time.sleep(600)

def test_inner(ranks):
    pathlib.Path(os.environ["PIDS"]).write_text(repr(ranks.run(where)))
    if "KILLED" in os.environ:
        ranks.run(sleep)
"""


def test_nothing_is_left_when_pytest_ends(tmp_path: Path) -> None:
    inner, mark = _start_pytest(tmp_path)
    output, _ = inner.communicate(timeout=100)
    assert inner.returncode == 0, output
    assert (tmp_path / "pids").exists()
    assert _marked_after_a_while(mark) == []


def test_nothing_is_left_when_pytest_is_killed_while_ranks_are_busy(tmp_path: Path) -> None:
    inner, mark = _start_pytest(tmp_path, KILLED="1")
    while not (tmp_path / "pids").exists():
        assert inner.poll() is None
        time.sleep(0.1)
    assert len(_marked(mark)) > 4
    inner.kill()
    inner.wait()
    assert _marked_after_a_while(mark) == []


def _start_pytest(folder: Path, **environment: str) -> tuple[subprocess.Popen[str], str]:
    """A pytest run of its own over `INNER`, and the mark that all its processes carry."""
    (folder / "test_inner.py").write_text(INNER)
    mark = f"{folder}-{os.getpid()}"
    environment |= {"PYTHONPATH": str(Path(__file__).parents[1]), "MARK": mark}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    inner = subprocess.Popen(
        [*command, "--import-mode=importlib", "--rootdir", str(folder), str(folder)],
        env={**os.environ, **environment, "PIDS": str(folder / "pids")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return inner, mark


def _marked(mark: str) -> list[int]:
    """Processes whose environment carries `mark`."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("MARK") == mark:
                found.append(process.pid)
        except (psutil.AccessDenied, psutil.NoSuchProcess):
            continue
    return found


def _marked_after_a_while(mark: str) -> list[int]:
    """The same, once it is empty or half a minute has passed: processes need a moment to end."""
    deadline = time.monotonic() + 30
    while _marked(mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    return _marked(mark)
