"""What an update reports: sums and largest values over its prompts, and over ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from algorithms.branch_replay import objectives
from algorithms.branch_replay.collect import Rolled
from algorithms.branch_replay.criterion import Criterion
from algorithms.branch_replay.passes import StepOutput
from algorithms.common.comm import Comm

SUMS = (
    "responses",
    "tokens",
    "reward",
    "truncated",
    "groups",
    "mixed",
    "steps_tokens",
    "loss",
    "entropy",
    "kl",
    "value_error",
    "ratios",
    "clipped",
    "tokens_grad",
    "tokens_nograd",
    "naive_flops",
    "replay_flops",
)
LARGEST = ("ratio", "selfcheck")


class Tally:
    """Counts one update of this rank; `valued`: with a value head."""

    def __init__(self, valued: bool = False) -> None:
        self.valued = valued
        self.sums = dict.fromkeys(SUMS, 0.0)
        self.largest = dict.fromkeys(LARGEST, 0.0)

    def rewards(self, item: Rolled) -> None:
        """What was sampled, once in an update."""
        for group in item.groups:
            self.sums["responses"] += len(group.responses)
            self.sums["tokens"] += sum(map(len, group.responses))
            self.sums["reward"] += float(group.rewards.sum())
            self.sums["truncated"] += sum(group.truncated)
            self.sums["groups"] += 1
            self.sums["mixed"] += bool((group.rewards != group.rewards[:1]).any())

    def replay(self, out: StepOutput) -> None:
        """What the engine ran."""
        self.sums["tokens_grad"] += out.tokens_with_graph
        self.sums["tokens_nograd"] += out.tokens_without_graph

    def flops(self, naive: float, replay: float) -> None:
        """Of one prompt in one optimizer step, modelled."""
        self.sums["naive_flops"] += naive
        self.sums["replay_flops"] += replay

    def selfcheck(self, apart: float) -> None:
        self.largest["selfcheck"] = max(self.largest["selfcheck"], apart)

    def step(self, loss: float, new: list[Tensor], item: Rolled, criterion: Criterion) -> None:
        """One prompt in one optimizer step; `new` are the log-probabilities before it."""
        self.sums["loss"] += loss
        self.sums["steps_tokens"] += sum(map(len, new))
        self.sums["entropy"] += _total(objectives.entropy(new))
        if item.ref is not None:
            self.sums["kl"] += _total(objectives.kl(new, item.ref))
        if item.old is not None and not criterion.config.pairwise:
            ratios = criterion.ratios(new, item.old)
            low, high = criterion.config.clip
            self.sums["ratios"] += len(ratios)
            self.sums["clipped"] += int(((ratios < 1 - low) | (ratios > 1 + high)).sum())
            if len(ratios):
                self.largest["ratio"] = max(self.largest["ratio"], float(ratios.max()))

    def values(self, values: list[Tensor], returns: list[Tensor]) -> None:
        """Of one prompt in one optimizer step."""
        pairs = zip(values, returns, strict=True)
        self.sums["value_error"] += _total([(v - r).square() for v, r in pairs])

    def metrics(self, comm: Comm | None) -> dict[str, float]:
        """Over all ranks, by their names in metrics.jsonl."""
        sums = torch.tensor([self.sums[name] for name in SUMS], dtype=torch.float64)
        largest = torch.tensor([self.largest[name] for name in LARGEST], dtype=torch.float64)
        if comm is not None:
            sums, largest = sums.to(comm.device), largest.to(comm.device)
            comm.all_reduce(sums, "metrics", "sum")
            comm.all_reduce(largest, "metrics", "max")
        found: dict[str, float] = dict(zip(SUMS, sums.tolist(), strict=True))
        most: dict[str, float] = dict(zip(LARGEST, largest.tolist(), strict=True))

        def mean(name: str, count: str) -> float:
            return found[name] / max(found[count], 1.0)

        saved = found["naive_flops"] / found["replay_flops"] if found["replay_flops"] else 1.0
        metrics = {
            "train/loss": found["loss"],
            "reward/mean": mean("reward", "responses"),
            "reward/mixed_groups": mean("mixed", "groups"),
            "response/tokens": mean("tokens", "responses"),
            "response/truncated": mean("truncated", "responses"),
            "kl": mean("kl", "steps_tokens"),
            "entropy": mean("entropy", "steps_tokens"),
            "ratio/max": most["ratio"],
            "clip_fraction": mean("clipped", "ratios"),
            "selfcheck/max": most["selfcheck"],
            "replay/tokens_grad": found["tokens_grad"],
            "replay/tokens_nograd": found["tokens_nograd"],
            "replay/speedup_model": saved,
        }
        if self.valued:
            metrics["value/error"] = mean("value_error", "steps_tokens")
        return metrics


def _total(terms: list[Tensor]) -> float:
    return sum(float(part.sum()) for part in terms)
