"""Point to point: values, overlap, bytes; and CUDA tensors under gloo."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from algorithms.common.comm import Comm
from algorithms.common.meter import Counter
from tests.distributed import RankError, RankPool
from tests.reductions import values


def ring(comm: Comm, rounds: int) -> tuple[list[Tensor], dict[str, Counter]]:
    """Pass tensors round the ring while computing: post, compute, wait."""
    right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    weight = values(comm.rank, 64, 64)
    received, held = [], values(comm.rank, 301, 7).round().t()
    for _ in range(rounds):
        incoming = torch.empty(7, 301, dtype=torch.float64)
        arriving = comm.irecv(incoming, left, "activations")
        leaving = comm.isend(held, right, "activations")
        for _ in range(20):
            weight = torch.tanh(weight @ weight)
        assert torch.isfinite(weight).all()
        received.append(arriving.wait())
        leaving.wait()
        held = received[-1] + 1
    return received, comm.counters


@pytest.mark.parametrize("world_size", [2, 4])
def test_transfers_overlap_compute(ranks: RankPool, world_size: int) -> None:
    results = ranks.run(ring, 5, world_size=world_size)
    for rank, (received, counters) in enumerate(results):
        for hop, tensor in enumerate(received):
            source = (rank - 1 - hop) % world_size
            assert torch.equal(tensor, values(source, 301, 7).round().t() + hop)
        size = 5 * 301 * 7 * 8
        assert counters == {"activations": Counter(size, size, 10)}


def one_way(comm: Comm, dtype: torch.dtype) -> tuple[Tensor, Counter]:
    if comm.rank == 0:
        tensor = values(0, 3, 4, dtype=dtype)
        comm.send(tensor, 1, "test")
        comm.send(torch.empty(0), 1, "test")
    else:
        whole = torch.zeros(4, 6, dtype=dtype)
        tensor = comm.recv(whole.t()[1:4], 0, "test")
        comm.recv(torch.empty(0), 0, "test")
        assert not whole[:, [0, 4, 5]].any()
    return tensor, comm.counters["test"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int16, torch.bool])
def test_sender_counts_receiver_does_not(ranks: RankPool, dtype: torch.dtype) -> None:
    sent, received = ranks.run(one_way, dtype, world_size=2)
    assert torch.equal(received[0], sent[0])
    size = 12 * dtype.itemsize
    assert (sent[1], received[1]) == (Counter(size, size, 2), Counter(0, 0, 2))


def busy_receiver(comm: Comm) -> float:
    """Seconds that rank 0 is held up by posting to a rank that is not there yet."""
    tensor = torch.ones(1_000_000)
    if comm.rank == 1:
        time.sleep(2.0)
        assert comm.recv(torch.empty(1_000_000), 0, "test").sum() == 1_000_000
        return 0.0
    start = time.monotonic()
    transfer = comm.isend(tensor, 1, "test")
    posted = time.monotonic() - start
    transfer.wait()
    return posted


def test_isend_does_not_wait_for_the_receiver(ranks: RankPool) -> None:
    assert ranks.run(busy_receiver, world_size=2)[0] < 1.0


def to_itself(comm: Comm) -> None:
    comm.send(torch.ones(1), comm.rank, "test")


def test_a_rank_is_no_peer_of_itself(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="rank 0 of 1 has no peer 0"):
        ranks.run(to_itself, world_size=1)


def on_cuda(comm: Comm) -> dict[str, Tensor]:
    """Two ranks share one device; gloo must see host memory only."""
    cuda = Comm(comm.group, torch.device("cuda", 0))
    held = values(cuda.rank, 33, 5).to(cuda.device).t()
    reduced, told = held.clone(), held.clone()
    cuda.all_reduce(reduced, "test", "mean")
    cuda.broadcast(told, 1, "test")
    peer = 1 - cuda.rank
    arriving = cuda.irecv(torch.empty_like(held), peer, "test")
    cuda.send(held, peer, "test")
    found = {"reduced": reduced, "told": told, "received": arriving.wait()}
    found["gathered"] = torch.stack(cuda.all_gather(held, "test"))
    assert all(tensor.is_cuda for tensor in found.values())
    return {name: tensor.cpu() for name, tensor in found.items()}


@pytest.mark.gpu
def test_cuda_tensors_go_through_the_host_under_gloo(ranks: RankPool) -> None:
    held = [values(r, 33, 5).t() for r in range(2)]
    for rank, found in enumerate(ranks.run(on_cuda, world_size=2)):
        assert torch.equal(found["reduced"], (held[0] + held[1]) / 2)
        assert torch.equal(found["told"], held[1])
        assert torch.equal(found["received"], held[1 - rank])
        assert torch.equal(found["gathered"], torch.stack(held))
