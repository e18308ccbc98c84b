"""The wire model, the totals and the counters' state."""

from __future__ import annotations

import torch

from algorithms.common.comm import Comm
from algorithms.common.meter import (
    Counter,
    all_gather_wire_bytes,
    all_reduce_wire_bytes,
    broadcast_wire_bytes,
    reduce_scatter_wire_bytes,
)

ALONE = torch.device("cpu")


def test_wire_formulas() -> None:
    assert [all_reduce_wire_bytes(1000, m) for m in (1, 2, 3, 4)] == [0, 1000, 1336, 1500]
    assert [reduce_scatter_wire_bytes(10, m) for m in (1, 2, 4)] == [0, 5, 9]
    assert [all_gather_wire_bytes(10, m) for m in (1, 2, 4)] == [0, 10, 30]
    assert [broadcast_wire_bytes(10, 4, rank, 2) for rank in range(4)] == [10, 0, 10, 10]
    assert broadcast_wire_bytes(10, 1, 0, 0) == 0
    assert all_reduce_wire_bytes(0, 4) == 0


def test_metrics_totals_and_state() -> None:
    comm = Comm(None, ALONE)
    comm.all_reduce(torch.ones(3), "gradients")
    comm.all_reduce(torch.ones(5), "moments")
    comm.broadcast_object("x")
    control = comm.counters["control"].payload_bytes
    assert comm.metrics() == {
        "comm/payload_bytes": 32,
        "comm/wire_bytes": 0,
        "comm/gradients/payload_bytes": 12,
        "comm/moments/payload_bytes": 20,
        "comm/control/payload_bytes": control,
    }
    resumed = Comm(None, ALONE)
    resumed.load_state_dict(comm.state_dict())
    assert resumed.counters == comm.counters
    resumed.all_reduce(torch.ones(2), "gradients")
    assert resumed.counters["gradients"] == Counter(20, 0, 2)
    assert comm.counters["gradients"] == Counter(12, 0, 1)
    plain = comm.state_dict()["gradients"]
    assert plain == {"payload_bytes": 12, "wire_bytes": 0, "calls": 1}
    assert all(type(value) is int for value in plain.values())


def test_add_counts_what_another_counted() -> None:
    comm, other = Comm(None, ALONE), Comm(None, ALONE)
    comm.all_reduce(torch.ones(3), "a")
    for tag in "aab":
        other.all_reduce(torch.ones(5), tag)
    comm.add(other)
    assert comm.counters == {"a": Counter(52, 0, 3), "b": Counter(20, 0, 1)}
    assert other.counters["a"] == Counter(40, 0, 2)
