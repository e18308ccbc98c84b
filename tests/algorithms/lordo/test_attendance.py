"""A fixed set of ranks: what is said when one does not come, or does not come back."""

import multiprocessing
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist

from algorithms.common.errors import MissingRanks, NonFiniteError
from algorithms.lordo import attendance
from algorithms.lordo.attendance import Attendance
from algorithms.lordo.board import Board


def ranks(world: int, timeout_s: float) -> list[Attendance]:
    store = dist.HashStore()
    return [
        Attendance(Board(store, rank=rank, world_size=world, timeout_s=timeout_s))
        for rank in range(world)
    ]


def test_an_exchange_begins_when_all_have_come_and_returns_what_it_gave() -> None:
    first, second = ranks(2, 20.0)
    came: list[str] = []

    def late() -> int:
        time.sleep(0.2)
        came.append("second")
        return second.exchange(3, lambda: 20)

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(late)
        assert first.exchange(3, lambda: (came.append("exchange"), 10)[1]) == 10
        assert other.result(20) == 20
    assert came == ["second", "exchange"]


def test_a_step_may_have_several_exchanges() -> None:
    first, second = ranks(2, 0.2)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(second.exchange, 3, lambda: None)
        first.exchange(3, lambda: None)
        other.result(20)
    with pytest.raises(MissingRanks, match="step 3: rank 1 did not come"):
        first.exchange(3, lambda: None)


def test_ranks_that_do_not_come_are_named() -> None:
    everyone = ranks(4, 0.2)
    everyone[1].board.come(0)
    with ThreadPoolExecutor(2) as pool:
        said = [
            str(future.exception(20))
            for future in [pool.submit(everyone[r].exchange, 64, lambda: None) for r in (0, 2)]
        ]
    assert said == ["step 64: ranks 1, 3 did not come to the exchange within 0.2 s"] * 2


def test_a_rank_that_is_lost_within_the_exchange_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attendance, "GRACE_S", 0.2)
    everyone = ranks(3, 20.0)
    everyone[1].board.come(1)

    def breaks() -> None:
        raise RuntimeError("Connection closed\nby peer")

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(everyone[rank].exchange, 8, breaks) for rank in (0, 2)]
        said = {str(future.exception(20)) for future in futures}
    assert said == {
        "step 8: the exchange failed, rank 1 died or stalled in it: Connection closed by peer"
    }


def test_errors_that_name_their_cause_pass() -> None:
    [alone] = ranks(1, 1.0)

    def bad() -> None:
        raise NonFiniteError("step 8: x is nan")

    with pytest.raises(NonFiniteError):
        alone.exchange(8, bad)
    with pytest.raises(RuntimeError, match="^bug$"):  # nobody is missing: it is not the wire's
        alone.exchange(9, lambda: (_ for _ in ()).throw(RuntimeError("bug")))


def serve(rank: int, port: int, answers: Connection) -> None:
    """A gloo rank; 1 is killed within the exchange of step 2, 2 stalls before that of step 3."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=20)
    )
    attended = Attendance(Board(store, rank=rank, world_size=3, timeout_s=5.0))
    tensor = torch.ones(1)

    def work() -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(tensor)

    attended.exchange(1, lambda: dist.all_reduce(tensor))
    for step in (2, 3):
        if (rank, step) == (2, 3):
            time.sleep(60)
        begun = time.monotonic()
        try:
            attended.exchange(step, work)
        except MissingRanks as error:
            answers.send((step, str(error), time.monotonic() - begun))


@pytest.mark.slow
def test_real_ranks_that_die_and_stall() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed"])
    pipes = [context.Pipe(duplex=False) for _ in range(3)]
    processes = [
        context.Process(target=serve, args=(rank, server.port, pipes[rank][1]), daemon=True)
        for rank in range(3)
    ]
    for process in processes:
        process.start()
    try:
        assert pipes[0][0].poll(60)
        step, said, seconds = pipes[0][0].recv()
        assert step == 2 and seconds < 10, "a closed connection is noticed before the timeout"
        assert re.match(
            "step 2: the exchange failed, rank 1 died or stalled in it: "
            ".*(closed|reset|Broken pipe)",
            said,
        )
        assert pipes[0][0].poll(60)
        step, said, seconds = pipes[0][0].recv()
        assert said == "step 3: ranks 1, 2 did not come to the exchange within 5 s"
        assert seconds < 15
    finally:
        for process in processes:
            process.kill()
            process.join()
