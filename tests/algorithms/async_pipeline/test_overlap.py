"""Transfers overlap compute: by the event trace of stages that sleep, over links that take time.

In stage k, 1 + D_k microbatches are under way. From its forward to its backward one needs the
compute of P-k stages, c each, and 2(P-1-k) messages, L each. So no runtime can do more than
(1 + D_k) / ((P-k) c + 2 (P-1-k) L) microbatches a second, nor more than 1 / c.

A busy machine wakes sleepers late. So c and L are what was measured on the slowest stage and link,
all figures are medians, and the best of some attempts counts: without overlap none comes near.
"""

import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from algorithms.async_pipeline.pipeline import Pipeline
from algorithms.async_pipeline.schedule import natural, stretched
from algorithms.async_pipeline.trace import COMPUTE as KINDS
from algorithms.async_pipeline.trace import utilisation
from algorithms.common.comm import Comm

FORWARD, BACKWARD = 0.05, 0.1
COMPUTE = FORWARD + BACKWARD
LINK = COMPUTE
ATTEMPTS = 4


class Nap(torch.autograd.Function):
    """The identity, which takes its time."""

    @staticmethod
    def forward(ctx, x):
        time.sleep(FORWARD)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(BACKWARD)
        return gradient


class Sleeper(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return Nap.apply(self.w * x)


class Later:
    """A transfer that another thread starts."""

    def __init__(self, future):
        self.future = future

    def wait(self):
        return self.future.result().wait()


class SlowLinks(Comm):
    """Each link takes `LINK` seconds for each message, one after the other in each direction."""

    def __init__(self, comm):
        super().__init__(comm.group, comm.device)
        self.threads = {}
        self.took = [0.0]

    def isend(self, tensor, peer, tag):
        thread = self.threads.setdefault(peer, ThreadPoolExecutor(1))
        return Later(thread.submit(self._send, tensor, peer, tag))

    def _send(self, tensor, peer, tag):
        if tag != "targets":
            started = time.perf_counter()
            time.sleep(LINK)
            self.took.append(time.perf_counter() - started)
        return super().isend(tensor, peer, tag)


def sleeping(comm, delays, microbatches):
    """On rank 0 the traces of all stages, and the median seconds of the slowest link."""

    def batches(index):
        return torch.ones(4), torch.ones(4)

    def optimizer(named, stage, stages):
        return torch.optim.SGD([weight for _, weight in named], lr=1e-3)

    def loss(output, targets):
        return (output * targets).mean()

    links = SlowLinks(comm)
    mine = Pipeline(Sleeper(), optimizer, loss, links, delays=delays)
    mine.run(batches, microbatches)
    slowest = comm.gather_objects(statistics.median(links.took))
    return mine.traces(), slowest and max(slowest)


def throughput(traces):
    """Microbatches per second of the last stage: they come in rounds of P, of which the median."""
    ends = [event.end for event in traces[-1] if event.kind == "update"]
    stages = len(traces)
    rounds = [late - early for early, late in zip(ends, ends[stages:], strict=False)]
    return stages / statistics.median(rounds)


def compute(traces):
    """Seconds per microbatch of the slowest stage."""
    return max(
        sum(statistics.median(e.end - e.start for e in events if e.kind == kind) for kind in KINDS)
        for events in traces
    )


def bound(traces, delays, link):
    """What the module's formula allows."""
    c, last = compute(traces), len(delays) - 1
    trips = [(k, (last - k + 1) * c + 2 * (last - k) * link) for k in range(last + 1)]
    return min(1 / c, *((1 + delays[k]) / trip for k, trip in trips))


def best(ranks, delays, microbatches):
    """Share of its bound that the throughput comes to, and the traces: of the first attempt that
    comes near it, or of the last."""
    for _ in range(ATTEMPTS):
        traces, link = ranks.run(sleeping, delays, microbatches, world_size=len(delays))[0]
        most = bound(traces, delays, link)
        if 0.9 < throughput(traces) / most < 1.1:
            break
    return throughput(traces) / most, most, traces


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.slow
def test_messages_as_long_as_the_compute_are_hidden_by_delays_that_allow_it(ranks, stages):
    delays = stretched(stages, 1.5)  # 1 would do if nothing ever came late
    share, most, traces = best(ranks, delays, 40)
    assert most == pytest.approx(1 / compute(traces))
    assert 0.9 < share < 1.1
    assert 0.3 < utilisation(traces) <= 1  # with fill and drain


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.slow
def test_with_the_least_delays_nothing_but_the_round_trip_bounds_the_throughput(ranks, stages):
    share, most, traces = best(ranks, natural(stages), 24)
    assert most < 0.7 / compute(traces)
    assert 0.9 < share < 1.1
