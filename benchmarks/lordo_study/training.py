"""One run: M stacked workers trained by one arm, then evaluated on both held-out sets."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers.utils import logging

from algorithms.common import model as models
from algorithms.common.errors import NonFiniteError
from algorithms.common.loop import learning_rate, token_loss
from algorithms.lordo.config import ArmConfig
from algorithms.lordo.selection import low_rank_names
from algorithms.lordo.stacked import Stacked, StackedLocal, build
from benchmarks.lordo_study.setting import Job, Setting
from benchmarks.study import streams
from benchmarks.study.queue import Result

logging.set_verbosity_error()  # a token equal to the padding's is no mistake: nothing is padded

_load = lru_cache(maxsize=2)(streams.load)


def train(job: Job, tokens: Path) -> Result:
    """Run `job` on the streams in the file `tokens`; perplexities are None where it diverged."""
    begun = time.perf_counter()
    setting = job.setting
    shared = _load(tokens, setting.workers, setting.dealing)
    replicas = [new_model(setting, job.seed) for _ in range(setting.workers)]
    stacked = build(job.arm, replicas, job.seed)
    overlaps: list[float] = []
    ended = True
    try:
        for step in range(1, setting.steps + 1):
            stacked.backward(batches(job, shared.train, step))
            lr = learning_rate(step, job.arm.optimizer.lr, setting.training(job.seed))
            stacked.update(step, lr)
            overlaps += _overlap(job.arm, stacked, step)
        stacked.flush(setting.steps)
    except NonFiniteError:
        ended = False
    held_out = {"validation": shared.validation, "test": shared.test}
    with stacked.synced() as model:
        found = {
            f"{name}_perplexity": perplexity(
                model, streams.spread(stream, setting.held_out, setting.length)
            )
            if ended
            else None
            for name, stream in held_out.items()
        }
        held = footprint(model, stacked)
    counters = stacked.meter.counters
    return {
        **found,
        **held,
        "subspace_overlap": statistics.fmean(overlaps) if overlaps else None,
        "payload_bytes": stacked.meter.payload_bytes,
        "payload_bytes_per_step": stacked.meter.payload_bytes / setting.steps,
        "wire_bytes": stacked.meter.wire_bytes,
        "payload_bytes_by_tag": {tag: each.payload_bytes for tag, each in counters.items()},
        "seconds": time.perf_counter() - begun,
    }


def footprint(model: nn.Module, stacked: Stacked) -> dict[str, int]:
    """Bytes that worker 0 holds beside weights and gradients; its optimizer's counts of steps are
    left out. `carried_bytes` are those of gradients that may not be freed between steps."""
    chosen = set(low_rank_names(model))
    sizes = {name: _kept_bytes(stacked, each) for name, each in model.named_parameters()}
    carried = [stacked.optimizer.state[each].get("carried") for each in model.parameters()]
    x_sync, outer = stacked.outer_bytes()
    return {
        "low_rank_parameters": sum(p.numel() for n, p in model.named_parameters() if n in chosen),
        "low_rank_state_bytes": sum(size for name, size in sizes.items() if name in chosen),
        "state_bytes": sum(sizes.values()),
        "carried_bytes": sum(each.nbytes for each in carried if each is not None),
        "outer_state_bytes": outer,
        "x_sync_bytes": x_sync,
    }


def _kept_bytes(stacked: Stacked, parameter: Tensor) -> int:
    state = stacked.optimizer.state[parameter]
    return sum(value.nbytes for key, value in state.items() if key not in ("step", "carried"))


def _overlap(arm: ArmConfig, stacked: Stacked, step: int) -> list[float]:
    """Of the new projections with the old, mean over weights; nothing where none were made."""
    if not isinstance(stacked, StackedLocal) or arm.sync is None or step % arm.sync.every:
        return []
    bases = stacked.workers[0].sync.bases
    if bases is None or bases.config.projection != "global":
        return []
    return [statistics.fmean(bases.overlaps.values())]


def new_model(setting: Setting, seed: int) -> nn.Module:
    """Fresh weights, the same for the same seed."""
    return models.build(
        setting.model, vocab_size=streams.VOCABULARY, end_of_text=streams.END, seed=seed
    )


def batches(job: Job, train: Sequence[streams.Stream], step: int) -> list[Tensor]:
    """Each worker's sequences of step 1, 2, ...; equal for all arms."""
    setting = job.setting
    return [
        streams.batch(
            stream,
            seed=job.seed,
            step=step - 1,
            sequences=setting.sequences,
            length=setting.length,
        )
        for stream in train
    ]


@torch.no_grad()
def perplexity(model: nn.Module, sequences: Tensor) -> float | None:
    """Of all tokens of `sequences`, int64 `[sequences, tokens + 1]`; None where it overflows."""
    model.eval()
    total = 0.0
    for start in range(0, len(sequences), 32):
        tokens = sequences[start : start + 32]
        total += token_loss(models.logits(model, tokens[:, :-1]), tokens[:, 1:], "sum").item()
    loss = total / sequences[:, 1:].numel()
    return math.exp(loss) if loss < 100 else None
