"""What workers post, and how long they wait for each other; one process, several boards."""

import threading
import time

import pytest
import torch.distributed as dist

from algorithms.common.errors import InputError
from algorithms.lordo.board import BEATS_PER_TIMEOUT, Board, Entry, Member, connect, gone, those


def boards(world: int = 2, timeout_s: float = 0.2) -> list[Board]:
    store = dist.HashStore()
    made = [Board(store, rank=r, world_size=world, timeout_s=timeout_s) for r in range(world)]
    for board in made:
        board.begin_life()
    return made


def test_an_entry_is_what_its_rank_posted_last() -> None:
    ours, theirs = boards()
    ours.wish(6)
    assert theirs.read() == [Entry(life=1, wish=6), Entry(life=1)]
    ours.come(7, stop=True)
    ours.finish(7)
    assert theirs.read()[0] == Entry(life=1, here=7, done=7, stop=True)
    ours.begin_life()
    assert theirs.read() == [Entry(life=2), Entry(life=1)]
    assert (ours.me, theirs.me) == (Member(0, 2), Member(1, 1))


def test_a_rank_that_has_not_started_can_be_read() -> None:
    board = Board(dist.HashStore(), rank=1, world_size=3, timeout_s=1.0)
    assert board.read() == [Entry()] * 3


def test_a_later_board_does_not_wipe_what_was_posted() -> None:
    ours, theirs = boards()
    ours.come(3)
    Board(ours.store, rank=1, world_size=2, timeout_s=1.0)
    assert theirs.read()[0].here == 3


def test_beats_are_few() -> None:
    [board] = boards(world=1, timeout_s=1.0)
    begun, calls = time.monotonic(), 0
    while time.monotonic() < begun + 0.5:
        board.beat()
        calls += 1
    assert calls > 100
    assert 1 <= board.read()[0].beat <= 0.5 * BEATS_PER_TIMEOUT + 1


def test_a_wait_ends_when_all_are_ready() -> None:
    ours, theirs = boards(timeout_s=20.0)
    timer = threading.Timer(0.2, theirs.come, [5])
    timer.start()
    ours.come(5)
    begun = time.monotonic()
    entries = ours.wait([Member(0, 1), Member(1, 1)], lambda entry: entry.here >= 5)
    assert time.monotonic() - begun < 5
    assert [entry.here for entry in entries] == [5, 5]


def test_a_wait_ends_after_so_much_silence_or_when_told() -> None:
    ours, theirs = boards(timeout_s=0.2)
    for silence_s, expected in ((None, 0.2), (0.4, 0.4)):
        begun = time.monotonic()
        ours.wait([theirs.me], lambda entry: False, silence_s=silence_s)
        assert expected < time.monotonic() - begun < expected + 3
    begun = time.monotonic()
    ours.wait([theirs.me], lambda entry: False, lambda: True, silence_s=20)
    assert time.monotonic() - begun < 5


def test_another_life_is_another_member() -> None:
    ours, theirs = boards(timeout_s=20.0)
    before = theirs.me
    theirs.begin_life()
    theirs.come(1)
    ours.come(1)
    entries = ours.wait([before], lambda entry: False)
    assert gone(before, entries) and not gone(theirs.me, entries)
    assert those([before, ours.me], lambda entry: entry.here == 1, entries) == [ours.me]
    whoever = [Member(1, 0), Member(0, 0)]
    assert those(whoever, lambda entry: True, entries) == [ours.me, Member(1, 2)]


def test_a_process_on_its_own_needs_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    board = Board(connect(1.0, elastic=True), rank=0, world_size=1, timeout_s=1.0)
    board.begin_life()
    assert board.read() == [Entry(life=1)]


def test_the_store_of_torchruns_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    board = Board(connect(1.0, elastic=False), rank=1, world_size=2, timeout_s=1.0)
    board.begin_life()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    again = Board(connect(1.0, elastic=False), rank=0, world_size=2, timeout_s=1.0)
    assert again.read() == [Entry()] * 2, "all were started again: nobody's past counts"
    assert server.check(["board/0/rank/1"])
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    with pytest.raises(InputError, match="^sync.elastic: needs a store that outlives every rank"):
        connect(1.0, elastic=True)
