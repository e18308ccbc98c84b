"""Reducers on gloo ranks against `reduce_stacked` and a slow reduction, part by part."""

from __future__ import annotations

import io
import time
from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from algorithms.common.codec import CODECS, Codec
from algorithms.common.comm import Comm
from algorithms.common.meter import Counter, all_reduce_wire_bytes
from algorithms.lordo.wire import Background, Pending, Reduced, Reducer, reduce_stacked
from tests.distributed import RankError, RankPool

WORLDS = pytest.mark.parametrize("world_size", [1, 2, 3, 4])
NAMES = pytest.mark.parametrize("name", [None, *CODECS])
ALONE = torch.device("cpu")

SIZES = [0, 1, 3, 63, 1000, 20_001]
"""Empty, smaller than the ranks, smaller than a block, not a multiple of it."""
ROUNDS = 3


def buffer(rank: int, numel: int, turn: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What a rank sends in a round: multiples of 2^-20 below 64 in magnitude, heavy-tailed."""
    generator = torch.Generator().manual_seed(1000 * turn + 10 * numel + rank)
    values = torch.randn(numel, generator=generator, dtype=torch.float64) ** 3
    return (values.clamp(-63, 63) * 2**20).round().div(2**20).to(dtype)


def slow(
    flats: list[Tensor], codec: Codec | None, residuals: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Each owner's part on its own: decode what every rank wrote for it, add, divide, encode."""
    world_size, numel, dtype = len(flats), flats[0].numel(), flats[0].dtype
    block = 1 if codec is None else codec.block
    part = block
    while part * world_size < numel:
        part += block
    means: list[Tensor] = []
    sents: list[list[Tensor]] = [[] for _ in flats]
    for owner in range(world_size):
        total = torch.zeros(part, dtype=dtype)
        for rank, flat in enumerate(flats):
            own = torch.zeros(part, dtype=dtype)
            held = flat[owner * part : (owner + 1) * part]
            own[: len(held)] = held
            if codec is not None:
                own = codec.decode(codec.encode(own), part, dtype)
            sents[rank].append(own)
            total = total + own
        mean = total / world_size
        if codec is not None:
            mean = mean + residuals[owner]
            decoded = codec.decode(codec.encode(mean), part, dtype)
            residuals[owner] = mean - decoded
            mean = decoded
        means.append(mean)
    return torch.cat(means)[:numel], [torch.cat(sent)[:numel] for sent in sents]


def zeros(world_size: int, numel: int, codec: Codec) -> list[Tensor]:
    part = -(-numel // (world_size * codec.block)) * codec.block
    return [torch.zeros(max(part, codec.block)) for _ in range(world_size)]


def rounds(comm: Comm, name: str | None) -> list[tuple[list[Reduced], dict[str, Tensor], Counter]]:
    results = []
    for numel in SIZES:
        reducer = Reducer(comm, f"{numel}", CODECS[name] if name else None)
        reduced = [reducer(buffer(comm.rank, numel, turn)) for turn in range(ROUNDS)]
        results.append((reduced, reducer.state_dict(), comm.counters[f"{numel}"]))
    return results


@WORLDS
@NAMES
def test_ranks_equal_the_stacked_and_the_slow_reduction_bit_for_bit(
    ranks: RankPool, world_size: int, name: str | None
) -> None:
    codec = CODECS[name] if name else None
    found = ranks.run(rounds, name, world_size=world_size)
    for index, numel in enumerate(SIZES):
        residuals: list[Tensor] = []
        reference = zeros(world_size, numel, codec) if codec else []
        for turn in range(ROUNDS):
            flats = [buffer(rank, numel, turn) for rank in range(world_size)]
            mean, sents = reduce_stacked(flats, codec, residuals)
            slow_mean, slow_sents = slow(flats, codec, reference)
            assert torch.equal(mean, slow_mean)
            for rank in range(world_size):
                reduced = found[rank][index][0][turn]
                assert torch.equal(reduced.mean, mean)
                assert torch.equal(reduced.sent, sents[rank])
                assert torch.equal(reduced.sent, slow_sents[rank])
        for rank in range(world_size):
            state = found[rank][index][1]
            assert state.keys() == ({"residual"} if codec else set())
            if codec:
                assert torch.equal(state["residual"], residuals[rank])
                assert torch.equal(residuals[rank], reference[rank]) or numel == 0


@WORLDS
@NAMES
def test_a_buffer_is_counted_once_in_encoded_bytes(
    ranks: RankPool, world_size: int, name: str | None
) -> None:
    found = ranks.run(rounds, name, world_size=world_size)
    block, size = {
        None: (1, 4),
        "bf16": (1, 2),
        "int8": (64, 66),
        "int4": (64, 34),
        "int2": (64, 18),
        "sign": (64, 10),
        "top_k": (4096, 228),
    }[name]
    for index, numel in enumerate(SIZES):
        blocks = -(-numel // (block * world_size)) * world_size
        payload = ROUNDS * blocks * size
        wire = all_reduce_wire_bytes(payload, world_size)
        for rank in range(world_size):
            assert found[rank][index][2] == Counter(payload, wire, 2 * ROUNDS)


@NAMES
def test_without_residuals_none_are_kept_but_both_ways_are_coded(name: str | None) -> None:
    flats = [buffer(rank, 1000, 0) for rank in range(3)]
    codec = CODECS[name] if name else None
    mean, sents = reduce_stacked(flats, codec)
    kept: list[Tensor] = []
    expected, expected_sents = reduce_stacked(flats, codec, kept)
    assert torch.equal(mean, expected)
    assert_same(sents, expected_sents)
    assert len(kept) == (3 if codec else 0)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("name", list(CODECS))
def test_error_feedback_keeps_sums_exact(world_size: int, name: str) -> None:
    """In float64, where sums of these multiples of small powers of two are exact."""
    codec, numel, turns = CODECS[name], 5000, 6
    kept = [torch.zeros(numel, dtype=torch.float64) for _ in range(world_size)]
    residuals: list[Tensor] = []
    totals = {key: torch.zeros(numel, dtype=torch.float64) for key in ("held", "sent", "mean")}
    for turn in range(turns):
        held = [buffer(rank, numel, turn, torch.float64) for rank in range(world_size)]
        flats = [h + k for h, k in zip(held, kept, strict=True)]
        mean, sents = reduce_stacked(flats, codec, residuals)
        kept = [flat - sent for flat, sent in zip(flats, sents, strict=True)]
        totals["held"] += sum(held)
        totals["sent"] += sum(sents)
        totals["mean"] += mean
    assert torch.equal(totals["sent"] + sum(kept), totals["held"])
    lost = torch.cat(residuals)[:numel]
    # The code of a decoded buffer loses nothing, except int2: its levels have another scale.
    assert bool(lost.any()) == (world_size > 1 or name == "int2")
    assert torch.equal(totals["mean"] + lost, totals["sent"] / world_size)


def plain_mean(comm: Comm) -> tuple[Tensor, Tensor]:
    flat = buffer(comm.rank, 20_001, 0)
    mean = Reducer(comm, "test", None)(flat).mean
    return mean, comm.all_reduce(flat, "plain", "mean").wait()


@WORLDS
def test_without_a_codec_it_is_an_all_reduce(ranks: RankPool, world_size: int) -> None:
    for mean, plain in ranks.run(plain_mean, world_size=world_size):
        torch.testing.assert_close(mean, plain, rtol=1e-6, atol=1e-6)


# Rounds in the background


def pairs(comm: Comm, world_size: int) -> tuple[Comm, dist.ProcessGroup]:
    """Of four ranks: the comm of this rank's world, and another group of the same ranks."""
    groups = []
    for _ in range(2):
        for first in range(0, comm.world_size, world_size):
            members = list(range(first, first + world_size))
            group = dist.new_group(members)
            if comm.rank in members:
                groups.append(group)
    assert all(isinstance(group, dist.ProcessGroup) for group in groups)
    return Comm(groups[0], ALONE), groups[1]


def overlapping(comm: Comm, world_size: int, name: str | None) -> tuple[object, ...]:
    """Two reducers share a background; rounds overlap each other and collectives of the world."""
    inner, group = pairs(comm, world_size)
    background = Background(group)
    codec = CODECS[name] if name else None
    reducers = [Reducer(inner, tag, codec, background=background) for tag in ("a", "b")]
    waiting: list[list[Pending]] = [[], []]
    for turn in range(ROUNDS):
        for numel, reducer, pending in zip((20_001, 300), reducers, waiting, strict=True):
            flat = buffer(inner.rank, numel, turn)
            pending.append(reducer.start(flat))
            flat.fill_(1e9)  # the caller may
            other = torch.full((1000,), float(inner.rank))
            inner.all_reduce(other, "main")
            assert other[0] == world_size * (world_size - 1) / 2
    assert inner.counters.keys() == {"main"}  # nothing is counted before it is waited for
    states = [reducer.state_dict() for reducer in reducers]
    reduced = [[pending.wait() for pending in each] for each in waiting]
    again = [[pending.wait() for pending in each] for each in waiting]
    assert all(a.mean is b.mean for a, b in zip(sum(reduced, []), sum(again, []), strict=True))
    counters = inner.counters

    twin = Comm(inner.group, ALONE)
    plain = [Reducer(twin, tag, codec) for tag in ("a", "b")]
    for index, (numel, reducer) in enumerate(zip((20_001, 300), plain, strict=True)):
        for turn in range(ROUNDS):
            assert_same(reducer(buffer(inner.rank, numel, turn)), reduced[index][turn])
        assert_same(reducer.state_dict().values(), states[index].values())
    background.close()
    assert {tag: counters[tag] for tag in "ab"} == twin.counters
    return (reduced[0][-1].mean,)


def assert_same(found: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("name", [None, "int4", "top_k"])
def test_overlapping_rounds_equal_those_that_are_waited_for(
    ranks: RankPool, world_size: int, name: str | None
) -> None:
    results = ranks.run(overlapping, world_size, name)
    for first in range(0, 4, world_size):
        for (mean,) in results[first : first + world_size]:
            assert torch.equal(mean, results[first][0])


def unattended(comm: Comm) -> tuple[float, float]:
    """Seconds to start a round, and to wait for it after a sleep in which it can end."""
    background = Background(dist.new_group())
    reducer = Reducer(comm, "test", CODECS["int4"], background=background)
    flat = buffer(comm.rank, 20_001, 0)
    reducer(flat)
    if comm.rank == 3:
        time.sleep(2.0)  # the others' start does not wait for this rank
    begin = time.monotonic()
    pending = reducer.start(flat)
    started = time.monotonic()
    time.sleep(4.0)
    slept = time.monotonic()
    pending.wait()
    background.close()
    return started - begin, time.monotonic() - slept


def test_a_round_needs_the_main_thread_neither_to_start_nor_to_end(ranks: RankPool) -> None:
    for started, waited in ranks.run(unattended):
        assert started < 1.5 and waited < 1.0


def failing(comm: Comm) -> None:
    background = Background(dist.new_group())
    reducer = Reducer(comm, "delta", CODECS["int8"], background=background)
    reducer.load_state_dict({"residual": torch.zeros(5)})
    pending = reducer.start(torch.zeros(100))
    background.close()
    pending.wait()


def test_a_residual_of_another_world_is_refused_where_it_is_waited_for(ranks: RankPool) -> None:
    message = "delta: this rank's residual has 5 values, its part of the buffer 64"
    with pytest.raises(RankError, match=message) as caught:
        ranks.run(failing)
    assert caught.value.kind == "InputError"


# State and bad numbers


def resumed(comm: Comm, name: str) -> tuple[Reduced, Reduced]:
    whole = Reducer(comm, "test", CODECS[name])
    before = Reducer(comm, "test", CODECS[name])
    for turn in range(2):
        whole(buffer(comm.rank, 1000, turn))
        before(buffer(comm.rank, 1000, turn))
    file = io.BytesIO()
    torch.save(before.state_dict(), file)
    file.seek(0)
    after = Reducer(comm, "test", CODECS[name])
    after.load_state_dict(torch.load(file, weights_only=True))
    flat = buffer(comm.rank, 1000, 2)
    return whole(flat), after(flat)


@pytest.mark.parametrize("name", ["int4", "top_k"])
def test_a_resumed_reducer_goes_on_bit_for_bit(ranks: RankPool, name: str) -> None:
    for whole, after in ranks.run(resumed, name, world_size=2):
        assert_same(whole, after)


def resumed_under_way(comm: Comm) -> None:
    background = Background(dist.new_group())
    whole = Reducer(comm, "test", CODECS["int4"], background=background)
    whole(buffer(comm.rank, 1000, 0))
    pending = whole.start(buffer(comm.rank, 1000, 1))
    file = io.BytesIO()
    under_way = pending.state_dict()
    torch.save((whole.state_dict(), under_way, comm.state_dict()), file)
    expected = [pending.wait(), whole(buffer(comm.rank, 1000, 2))]
    background.close()

    file.seek(0)
    reducer_state, round_state, counters = torch.load(file, weights_only=True)
    twin = Comm(comm.group, ALONE)
    twin.load_state_dict(counters)
    after = Reducer(twin, "test", CODECS["int4"])
    after.load_state_dict(reducer_state)
    restored = Pending.restored(twin, round_state)
    assert_same(restored.wait(), expected[0])
    assert_same(after(buffer(comm.rank, 1000, 2)), expected[1])
    assert twin.counters == comm.counters
    assert Pending.restored(twin, pending.state_dict()).wait().mean.equal(expected[0].mean)
    assert twin.counters == comm.counters  # that one was counted before it was saved


def test_a_round_under_way_is_resumed_with_its_bytes(ranks: RankPool) -> None:
    ranks.run(resumed_under_way)


def poisoned(comm: Comm, name: str | None) -> tuple[Tensor, Tensor]:
    reducer = Reducer(comm, "test", CODECS[name] if name else None)
    flat = buffer(comm.rank, 1000, 0)
    if comm.rank == 1:
        flat[7] = float("nan")
    return reducer(flat).mean, reducer(buffer(comm.rank, 1000, 1)).mean


@NAMES
def test_every_rank_sees_what_is_not_finite_and_the_next_round_is_clean(
    ranks: RankPool, name: str | None
) -> None:
    for bad, good in ranks.run(poisoned, name, world_size=3):
        assert not bad[7].isfinite()
        assert good.isfinite().all()


def test_a_world_of_one_without_a_group_is_coded_too() -> None:
    flat = buffer(0, 1024, 0)  # whole blocks: int2 and sign have no zeros
    for name, codec in CODECS.items():
        comm = Comm(None, ALONE)
        background = Background(None)
        pending = Reducer(comm, name, codec, background=background).start(flat)
        mean, sent = pending.wait()
        background.close()
        assert torch.equal(sent, codec.decode(codec.encode(flat), 1024, flat.dtype))
        assert torch.equal(mean, codec.decode(codec.encode(sent), 1024, flat.dtype))
        assert comm.counters[name] == Counter(codec.encode(flat).numel(), 0, 2)
    for reduced in Reducer(Comm(None, ALONE), "plain", None)(flat):
        assert torch.equal(reduced, flat) and reduced.data_ptr() != flat.data_ptr()


def test_a_background_of_other_ranks_is_refused(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="the background has other ranks"):
        ranks.run(alone_in_the_background, world_size=2)


def alone_in_the_background(comm: Comm) -> None:
    Reducer(comm, "test", None, background=Background(None)).start(torch.ones(3))
