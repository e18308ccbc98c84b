"""Workers of an elastic run as processes that a test may kill, stop and start again.

Each runs local SGD with momentum on a quadratic of its own, `sum((A_k x - b_k)^2) / 2`, four steps
per round, with an outer Nesterov step. It writes what happens to it as lines of JSON, and meets
with the fate that a test has planned. `replayed` computes the same run, as logged, in one process.
"""

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from algorithms.common.comm import Comm
from algorithms.lordo.board import Board
from algorithms.lordo.elastic import Elastic
from algorithms.lordo.membership import Decision

WORLD, SIZE, EVERY = 4, 12, 4
LR, MOMENTUM, OUTER_LR, OUTER_MOMENTUM = 0.05, 0.5, 0.8, 0.3
PATIENCE_S = 60
"""A test's, on a busy machine."""

Fate = tuple[int, str, str]
"""From which step on, at which place: die, stall or raise."""


class Quadratic:
    """One worker's problem and what it knows; a `Worker` of algorithms/lordo/elastic.py."""

    def __init__(self, rank: int, comm: Comm, report: Callable[..., None], step_s: float) -> None:
        generator = torch.Generator().manual_seed(rank)
        self.a = torch.randn(SIZE, SIZE, generator=generator, dtype=torch.float64) / SIZE**0.5
        self.b = torch.randn(SIZE, generator=generator, dtype=torch.float64)
        self.comm = comm
        self.report = report
        self.step_s = step_s
        self.x = torch.zeros(SIZE, dtype=torch.float64)
        self.x_sync = self.x.clone()
        self.moment = torch.zeros_like(self.x)
        self.outer = torch.zeros_like(self.x)
        self.fate: Fate | None = None
        self.decision: Callable[[], Decision] = lambda: Decision(-1, [], [], False)
        self.number, self.members = -1, list[int]()

    def local_step(self) -> None:
        self.moment = MOMENTUM * self.moment + self.a.T @ (self.a @ self.x - self.b)
        self.x = self.x - LR * self.moment
        time.sleep(self.step_s)

    def regroup(self) -> None:
        self.report("group", size=self.comm.world_size)

    def present(self) -> list[int]:
        return [member.rank for member in self.decision().members]

    def exchange(self, step: int) -> torch.Tensor:
        self.number, self.members = self.decision().number, self.present()
        self.reach(step, "before")
        parts = (self.x - self.x_sync).clone().chunk(3)
        for index, part in enumerate(parts):
            if index == 1:
                self.reach(step, "within")
            self.comm.all_reduce(part, "delta", "mean")
        self.reach(step, "after")
        return torch.cat(parts)

    def apply(self, step: int, exchanged: torch.Tensor) -> None:
        self.outer = OUTER_MOMENTUM * self.outer + exchanged
        self.x_sync = self.x_sync + OUTER_LR * (exchanged + OUTER_MOMENTUM * self.outer)
        self.x = self.x_sync.clone()
        more = {"number": self.number, "members": self.members}
        self.report("round", step=step, x=self.x.tolist(), **more)
        self.reach(step, "applied")

    def state(self) -> dict[str, Any]:
        self.reach(EVERY, "handing over")
        return {"x_sync": self.x_sync, "outer": self.outer}

    def load_state(self, state: dict[str, Any]) -> None:
        self.reach(0, "loading")
        self.x_sync, self.outer = state["x_sync"], state["outer"]
        self.x, self.moment = self.x_sync.clone(), torch.zeros_like(self.x)

    def reach(self, step: int, place: str) -> None:
        """Meet with the fate that was planned for this place of this step or later, once."""
        if self.fate is None or step < self.fate[0] or place != self.fate[1]:
            return
        how, self.fate = self.fate[2], None
        if how == "raise":
            raise RuntimeError("out of luck")
        os.kill(os.getpid(), signal.SIGKILL if how == "die" else signal.SIGSTOP)


def work(rank: int, port: int, folder: str, world: int, options: dict[str, Any]) -> None:
    """The life of a worker process of a `Crew`."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    train(store, Path(folder), rank, world, **options)


def train(
    store: Any,
    folder: Path,
    rank: int,
    world: int,
    *,
    timeout_s: float,
    step_s: float,
    fate: Fate | None = None,
) -> None:
    """Train until the file `quit` appears in `folder`."""
    log = os.open(folder / f"{rank}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def report(event: str, **more: Any) -> None:
        line = {"event": event, "rank": rank, "time": time.time(), **more}
        os.write(log, (json.dumps(line) + "\n").encode())

    report("start", pid=os.getpid())
    board = Board(store, rank=rank, world_size=world, timeout_s=timeout_s)
    comm = Comm(None, torch.device("cpu"))
    worker = Quadratic(rank, comm, report, step_s)
    worker.fate = fate
    elastic = Elastic(board, worker, comm)
    worker.decision = lambda: elastic.membership.decision
    step = 0

    def then(place: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def call_and_reach(*arguments: Any) -> Any:
            result = call(*arguments)
            worker.reach(step, place)
            return result

        return call_and_reach

    membership: Any = elastic.membership
    membership.meet = then("decided", membership.meet)
    membership.join = then("let in", membership.join)
    membership.stand_by = then("connecting", membership.stand_by)
    turn = elastic.join(0)
    report("joined", step=turn.step, x=worker.x.tolist(), over=turn.over)
    step = turn.step
    while not turn.over:
        step += 1
        worker.local_step()
        board.beat()
        if step % EVERY == 0:
            worker.reach(step, "arriving")
            begun = time.perf_counter()
            quits = (folder / "quit").exists()
            turn = elastic.sync(step, worker.exchange, worker.apply, quits)
            seconds = time.perf_counter() - begun
            if turn.rejoined:
                report("joined", step=turn.step, x=worker.x.tolist(), over=turn.over)
            step = turn.step
            leads = elastic.membership.leads
            report("synced", step=step, seconds=seconds, leads=leads, members=worker.present())
            if turn.stop:
                elastic.membership.once(lambda: report("result", x=worker.x.tolist()))
                elastic.membership.end()
                break
    if not turn.over:
        report("end", step=step, x=worker.x.tolist())


class Crew:
    """The processes of a run, its store, and what the workers have reported."""

    def __init__(
        self, folder: Path, *, world: int = WORLD, timeout_s: float = 3.0, step_s: float = 0.02
    ) -> None:
        self.folder, self.world = folder, world
        self.timeout_s, self.step_s = timeout_s, step_s
        self.server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        # A server that has torch already forks workers in milliseconds. (It does not find modules
        # of ours, and would not say so.)
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["torch.distributed"])
        self.processes: dict[int, BaseProcess] = {}

    def start(self, rank: int, fate: Fate | None = None) -> None:
        """Start the process of `rank`."""
        options = {"timeout_s": self.timeout_s, "step_s": self.step_s, "fate": fate}
        arguments = (rank, self.server.port, str(self.folder), self.world, options)
        process = self.context.Process(target=work, args=arguments, daemon=True)
        process.start()
        self.processes[rank] = process

    def signal(self, rank: int, number: int) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def events(self, *kinds: str, rank: int | None = None) -> list[dict[str, Any]]:
        """What was reported, in the order of time."""
        ranks = range(self.world) if rank is None else [rank]
        found = []
        for each in ranks:
            path = self.folder / f"{each}.jsonl"
            lines = path.read_text().splitlines(keepends=True) if path.exists() else []
            whole = (json.loads(line) for line in lines if line.endswith("\n"))
            found += [event for event in whole if event["event"] in kinds]
        return sorted(found, key=lambda event: float(event["time"]))

    def last_step(self) -> int:
        return max((int(event["step"]) for event in self.events("round")), default=0)

    def wait(self, condition: Callable[[], bool], restart: bool = True) -> None:
        """Until `condition`; meanwhile a worker that was killed is started again."""
        give_up = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < give_up, self.events("start", "joined", "synced")[-8:]
            for rank, process in self.processes.items():
                if restart and process.exitcode == -signal.SIGKILL:
                    self.start(rank)
                assert process.exitcode in (None, 0, -signal.SIGKILL), f"rank {rank} failed"
            time.sleep(0.01)

    def joined(self, ranks: Iterable[int], since: float) -> bool:
        """Whether all of `ranks` have joined after that moment."""
        late = [event["rank"] for event in self.events("joined") if event["time"] > since]
        return set(ranks) <= set(late)

    def rounds(self, count: int, restart: bool = True) -> None:
        """Let `count` more rounds go by."""
        goal = self.last_step() + count * EVERY
        self.wait(lambda: self.last_step() >= goal, restart)

    def newest_members(self) -> list[int]:
        """Who took part in the newest round; one that was stalled may report an older one later."""
        newest = max(self.events("round"), key=lambda event: int(event["number"]))
        return list(newest["members"])

    def all_in(self, restart: bool = True) -> None:
        """Until a round had everybody."""
        self.wait(lambda: len(self.newest_members()) == self.world, restart)

    def quit(self) -> None:
        """Have the run stop at its next sync; all processes end by themselves."""
        (self.folder / "quit").touch()
        self.wait(lambda: all(p.exitcode is not None for p in self.processes.values()), False)

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.join()


def replayed(events: list[dict[str, Any]]) -> dict[int, torch.Tensor]:
    """Weights after every round of a run with these `round` and `joined` events, computed in one
    process: worker after worker, means over those that were present."""
    rounds = {event["step"]: event["members"] for event in events if event["event"] == "round"}
    joined = {(e["step"], e["rank"]) for e in events if e["event"] == "joined" and e["step"] > 0}
    comm = Comm(None, torch.device("cpu"))
    workers = [Quadratic(rank, comm, lambda *_, **__: None, 0.0) for rank in range(WORLD)]
    after = {}
    for step in sorted(rounds):
        deltas = []
        for rank in rounds[step]:
            for _ in range(EVERY):
                workers[rank].local_step()
            deltas.append(workers[rank].x - workers[rank].x_sync)
        mean = sum(deltas[1:], deltas[0]) / len(deltas)
        for worker in workers:  # those that are away get the same when they join
            worker.apply(step, mean)
        for rank, worker in enumerate(workers):
            if (step, rank) in joined:
                worker.moment = torch.zeros_like(worker.x)
        after[step] = workers[0].x
    return after
