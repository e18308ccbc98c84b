"""Exact bytes, and values against the obvious reference: stack what the ranks hold and reduce."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from algorithms.common import comm as communication
from algorithms.common.comm import Comm, Op, opponents
from algorithms.common.errors import InputError
from algorithms.common.meter import Counter, all_reduce_wire_bytes
from tests.distributed import RankError, RankPool
from tests.reductions import assert_reduced, values

WORLDS = pytest.mark.parametrize("world_size", [1, 2, 4])
ALONE = torch.device("cpu")


# All-reduce


def reduce_one(comm: Comm, n: int, dtype: torch.dtype, op: Op) -> tuple[Tensor, Counter]:
    tensor = values(comm.rank, n, dtype=dtype)
    assert comm.all_reduce(tensor, "test", op).wait().data_ptr() == tensor.data_ptr()
    return tensor, comm.counters["test"]


@WORLDS
@pytest.mark.parametrize("n", [0, 1, 7, 1001])
@pytest.mark.parametrize("op", ["sum", "mean", "max"])
def test_all_reduce(ranks: RankPool, world_size: int, n: int, op: Op) -> None:
    results = ranks.run(reduce_one, n, torch.float64, op, world_size=world_size)
    assert_reduced([t for t, _ in results], [values(r, n) for r in range(world_size)], op)
    wire = 2 * (world_size - 1) * ((8 * n + world_size - 1) // world_size)
    assert [counter for _, counter in results] == [Counter(8 * n, wire, 1)] * world_size


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8]
)
def test_all_reduce_of_other_dtypes(ranks: RankPool, dtype: torch.dtype) -> None:
    results = ranks.run(reduce_one, 7, dtype, "sum", world_size=2)
    size = 7 * dtype.itemsize
    expected = values(0, 7, dtype=dtype) + values(1, 7, dtype=dtype)
    for tensor, counter in results:
        assert torch.equal(tensor, expected)
        assert counter == Counter(size, 2 * ((size + 1) // 2), 1)


def reduce_in_part(comm: Comm) -> tuple[Tensor, Tensor, Counter]:
    whole = values(comm.rank, 6, 4)
    parameter = nn.Parameter(whole.clone())
    transfer = comm.all_reduce(whole.t()[1:3], "test", "mean", async_op=True)
    transfer.wait()
    transfer.wait()  # once more changes nothing
    comm.all_reduce(parameter, "leaf")
    return whole, parameter.detach(), comm.counters["test"]


@WORLDS
def test_all_reduce_of_a_view_changes_only_the_view(ranks: RankPool, world_size: int) -> None:
    results = ranks.run(reduce_in_part, world_size=world_size)
    held = [values(r, 6, 4) for r in range(world_size)]
    assert_reduced([whole[:, 1:3] for whole, _, _ in results], [h[:, 1:3] for h in held], "mean")
    assert_reduced([parameter for _, parameter, _ in results], held, "sum")
    for (whole, _, counter), before in zip(results, held, strict=True):
        assert torch.equal(whole[:, [0, 3]], before[:, [0, 3]])
        assert counter.payload_bytes == 2 * 6 * 8


# The other collectives


def gathered(comm: Comm, dtype: torch.dtype) -> tuple[list[Tensor], Tensor, Counter]:
    tensor = values(comm.rank, 3, 5, dtype=dtype).t()
    into = torch.empty(5 * comm.world_size, 3, dtype=dtype)
    comm.all_gather_into(into, tensor, "into")
    return comm.all_gather(tensor, "test"), into, comm.counters["test"]


@WORLDS
@pytest.mark.parametrize("dtype", [torch.float64, torch.int16, torch.bool])
def test_all_gather(ranks: RankPool, world_size: int, dtype: torch.dtype) -> None:
    expected = [values(r, 3, 5, dtype=dtype).t() for r in range(world_size)]
    size = 15 * dtype.itemsize
    for parts, into, counter in ranks.run(gathered, dtype, world_size=world_size):
        assert torch.equal(torch.stack(parts), torch.stack(expected))
        assert torch.equal(into, torch.cat(expected))
        assert counter == Counter(size, (world_size - 1) * size, 1)


def scattered(comm: Comm) -> tuple[Tensor, Tensor, dict[str, Counter]]:
    whole = values(comm.rank, 4 * 3, 2)
    mine = torch.empty(4 * 3 // comm.world_size, 2, dtype=torch.float64)
    comm.reduce_scatter(mine, whole, "test", "mean")
    comm.all_gather_into(whole, mine, "test")
    return mine, whole, comm.counters


@WORLDS
def test_reduce_scatter_and_all_gather_count_like_one_all_reduce(
    ranks: RankPool, world_size: int
) -> None:
    results = ranks.run(scattered, world_size=world_size)
    held = [values(r, 12, 2) for r in range(world_size)]
    assert_reduced([whole for _, whole, _ in results], held, "mean")
    assert torch.equal(torch.cat([mine for mine, _, _ in results]), results[0][1])
    size = 12 * 2 * 8
    expected = Counter(size, all_reduce_wire_bytes(size, world_size), 2)
    assert [counters["test"] for *_, counters in results] == [expected] * world_size


def exchanged(comm: Comm, dtype: torch.dtype) -> tuple[Tensor, dict[str, Counter]]:
    whole = values(comm.rank, 2, 3 * comm.world_size, dtype=dtype).t()
    output = torch.zeros(6 * comm.world_size, 2, dtype=dtype)[::2]
    comm.all_to_all(output, whole, "test")
    comm.all_gather(output[:3], "test")
    comm.all_to_all(output[:0], whole[:0], "nothing")
    return output, comm.counters


@WORLDS
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.uint8])
def test_all_to_all_counts_like_reduce_scatter(
    ranks: RankPool, world_size: int, dtype: torch.dtype
) -> None:
    held = [values(r, 2, 3 * world_size, dtype=dtype).t() for r in range(world_size)]
    results = ranks.run(exchanged, dtype, world_size=world_size)
    size = held[0].nbytes
    for rank, (output, counters) in enumerate(results):
        assert torch.equal(output, torch.cat([h[3 * rank : 3 * rank + 3] for h in held]))
        assert counters["test"] == Counter(size, all_reduce_wire_bytes(size, world_size), 2)
        assert counters["nothing"] == Counter(0, 0, 1)


@pytest.mark.parametrize("size", range(1, 10))
def test_opponents_meet_once_and_nobody_waits_for_two(size: int) -> None:
    """Played as ranks do, each in its own order: whoever is next on both sides meets."""
    left = [opponents(rank, size) for rank in range(size)]
    assert [sorted([rank, *each]) for rank, each in enumerate(left)] == [[*range(size)]] * size
    turns = 0
    while any(left):
        pairs = [(r, each[0]) for r, each in enumerate(left) if each and left[each[0]][0] == r]
        assert pairs, "all wait"
        for rank, peer in pairs:
            assert left[rank].pop(0) == peer
        turns += 1
    assert turns == (0 if size == 1 else size - 1 + size % 2)


ODD = (1, 3, 5, 77, 10_001)


def exchanged_often(comm: Comm) -> list[Tensor]:
    """Parts of odd sizes, one right after the other, while a message of the caller's own is under
    way between the same ranks."""
    size = comm.world_size
    own, received = torch.full((5,), -1.0 - comm.rank), torch.zeros(5)
    sending = comm.isend(own, (comm.rank + 1) % size, "own")
    outputs = []
    for part in ODD:
        output = torch.zeros(part * size, dtype=torch.uint8)
        comm.all_to_all(output, values(comm.rank, part * size, dtype=torch.uint8), "test")
        outputs.append(output)
    before = (comm.rank - 1) % size
    comm.recv(received, before, "own")
    sending.wait()
    assert torch.equal(received, torch.full((5,), -1.0 - before))
    payload = (size - 1) * sum(ODD)
    assert comm.counters["test"] == Counter(payload, payload, len(ODD))
    return outputs


def exchanged_in_a_group(comm: Comm) -> list[Tensor]:
    """Ranks 1 to 3 of the world, whose ranks in the group are other numbers."""
    group = dist.new_group([1, 2, 3])
    return exchanged_often(Comm(group, ALONE)) if comm.rank > 0 else []


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_all_to_all_of_odd_parts_keeps_clear_of_other_messages(
    ranks: RankPool, world_size: int
) -> None:
    assert_exchanged(ranks.run(exchanged_often, world_size=world_size))


def test_all_to_all_in_a_group(ranks: RankPool) -> None:
    assert_exchanged(ranks.run(exchanged_in_a_group)[1:])


def assert_exchanged(found: list[list[Tensor]]) -> None:
    size = len(found)
    for index, part in enumerate(ODD):
        held = [values(rank, part * size, dtype=torch.uint8) for rank in range(size)]
        for rank, outputs in enumerate(found):
            expected = [each[part * rank : part * (rank + 1)] for each in held]
            assert torch.equal(outputs[index], torch.cat(expected))


def uneven(comm: Comm) -> None:
    comm.all_to_all(torch.empty(3, 2), torch.empty(3, 2), "test")


def test_all_to_all_needs_equal_parts(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="3 rows cannot be cut into 2 equal parts"):
        ranks.run(uneven, world_size=2)


def broadcast(comm: Comm, src: int) -> tuple[Tensor, Counter]:
    tensor = values(comm.rank, 5, 3).t()
    comm.broadcast(tensor, src, "test")
    return tensor, comm.counters["test"]


@WORLDS
def test_broadcast(ranks: RankPool, world_size: int) -> None:
    src = world_size - 1
    results = ranks.run(broadcast, src, world_size=world_size)
    for rank, (tensor, counter) in enumerate(results):
        assert torch.equal(tensor, values(src, 5, 3).t())
        end_of_chain = rank == (src - 1) % world_size
        assert counter == Counter(120, 0 if end_of_chain else 120, 1)


def objects(comm: Comm) -> tuple[object, object, Counter]:
    told = comm.broadcast_object({"rank": comm.rank, "text": "x" * 1000}, src=comm.world_size - 1)
    everyone = comm.gather_objects("y" * (10 * comm.rank))
    comm.barrier()
    return told, everyone, comm.counters["control"]


@WORLDS
def test_objects_are_metered_as_control_and_kept_out_of_the_totals(
    ranks: RankPool, world_size: int
) -> None:
    results = ranks.run(objects, world_size=world_size)
    for rank, (told, everyone, counter) in enumerate(results):
        assert told == {"rank": world_size - 1, "text": "x" * 1000}
        assert everyone == (["y" * 10 * r for r in range(world_size)] if rank == 0 else None)
        assert counter.calls == 3
        smallest = 1000 + 10 * rank
        assert smallest < counter.payload_bytes < smallest + 200
        assert (counter.wire_bytes > 0) == (world_size > 1 and not (world_size == 2 and rank == 0))


# DDP


class Net(nn.Module):
    """Several buckets of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(7, 131), nn.Tanh(), nn.Linear(131, 601, bias=False))
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = (self.layers(x) * self.scale.prod()).square().mean()
        return loss


def gradients(comm: Comm, hooked: bool) -> tuple[list[list[Tensor]], Counter | None]:
    model = Net()
    wrapped = DistributedDataParallel(model, process_group=comm.group, bucket_cap_mb=0.1)
    if hooked:
        wrapped.register_comm_hook(None, comm.ddp_hook("gradients"))
    steps = []
    for step in range(3):
        model.zero_grad()
        wrapped(values(10 * step + comm.rank, 5, 7, dtype=torch.float32)).backward()
        steps.append([parameter.grad.clone() for parameter in model.parameters()])  # type: ignore[union-attr]
    return steps, comm.counters.get("gradients")


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ddp_hook_changes_no_bit_and_counts_every_byte(ranks: RankPool, world_size: int) -> None:
    plain = ranks.run(gradients, False, world_size=world_size)
    hooked = ranks.run(gradients, True, world_size=world_size)
    for (expected, _), (found, counter) in zip(plain, hooked, strict=True):
        for before, after in zip(expected, found, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert counter is not None
        assert counter.payload_bytes == 3 * sum(p.nbytes for p in Net().parameters())
        assert counter.calls > 3  # more than one bucket a step
        assert (counter.wire_bytes > 0) == (world_size > 1)


# A world of one without a group


def test_without_a_group_everything_is_the_identity() -> None:
    comm = Comm(None, ALONE)
    assert (comm.rank, comm.world_size, comm.backend) == (0, 1, "none")
    tensor = values(0, 3, 4)
    operations: list[Callable[[], object]] = [
        lambda: comm.all_reduce(tensor, "a", "mean"),
        lambda: comm.all_reduce(tensor, "a", "max", async_op=True).wait(),
        lambda: comm.broadcast(tensor, 0, "b"),
        lambda: comm.barrier(),
        lambda: comm.reduce_scatter(tensor, tensor.clone(), "a"),
        lambda: comm.all_to_all(tensor, tensor.clone(), "a"),
        lambda: comm.all_gather_into(tensor, tensor.clone(), "a"),
    ]
    for operation in operations:
        operation()
        assert torch.equal(tensor, values(0, 3, 4))
    assert torch.equal(comm.all_gather(tensor, "a")[0], tensor)
    assert comm.broadcast_object([1], src=0) == [1]
    assert comm.gather_objects("x") == ["x"]
    assert comm.wire_bytes == 0
    assert comm.counters["a"] == Counter(96 * 2 + 0 + 0 + 96 + 96, 0, 6)


# Sends of others


def sent_by_torch(comm: Comm) -> tuple[Tensor, Counter]:
    settings = {"group": comm.group, "group_peer": 1 - comm.rank}
    message, received = values(comm.rank, 2, 3).t(), torch.zeros(3, 2, dtype=torch.float64)
    sends = comm.metered([dist.P2POp(dist.isend, message, **settings)], "test")
    for work in dist.batch_isend_irecv([*sends, dist.P2POp(dist.irecv, received, **settings)]):
        work.wait()
    return received, comm.counters["test"]


def test_sends_that_torch_makes_are_counted_and_may_lie_anyhow(ranks: RankPool) -> None:
    results = ranks.run(sent_by_torch, world_size=2)
    for rank, (received, counter) in enumerate(results):
        assert torch.equal(received, values(1 - rank, 2, 3).t())
        assert counter == Counter(48, 48, 1)


# init


def test_init_without_torchrun_is_a_world_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    comm = communication.init("gloo")
    assert comm.group is None and comm.world_size == 1 and not dist.is_initialized()
    communication.shutdown(comm)


def test_init_under_torchrun_joins_the_world(
    monkeypatch: pytest.MonkeyPatch, free_port: int
) -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port)}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    comm = communication.init("gloo")
    assert (comm.rank, comm.world_size, comm.backend) == (0, 1, "gloo")
    communication.shutdown(comm)
    assert not dist.is_initialized()


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_init_never_swaps_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "99")  # more than any machine has
    with pytest.raises(InputError, match="^backend: nccl needs one CUDA device.* 99 has none"):
        communication.init("nccl")
    with pytest.raises(InputError, match="^backend: 'mpi' is unknown"):
        communication.init("mpi")
