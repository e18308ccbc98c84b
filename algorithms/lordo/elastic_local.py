"""Method `local` where ranks may come and go: a `Local` whose rounds can be made again.

A round is cut in two: `average` does all the collectives, those on which the new projections depend
included, and changes nothing but owners' residuals, which a new group forgets; `take` changes this
worker and sends nothing. `algorithms/lordo/elastic_loop.py` puts the two into a vote.

What a worker that joins gets is all that the giver has at the end of a round, its moments included:
fresh ones would have another age than those they are averaged with. It does not get what only the
giver knows, the values that the giver's code lost; so it begins at x_sync.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from algorithms.lordo import inner
from algorithms.lordo.local import Local
from algorithms.lordo.wire import Reduced


class Averaged(NamedTuple):
    """What came of the collectives of a round, equal on all ranks but for `Reduced.sent`."""

    reduced: dict[str, Reduced]
    found: list[Tensor] | None
    """New projections, if there are any."""


class ElasticLocal(Local):
    """One worker; `comm` speaks to the present ones. A `Method` whose `update` and `meets` are not
    used."""

    def descend(self, lr: float) -> None:
        """This worker's own step."""
        inner.descend(self.optimizer, lr)

    def flush(self, step: int) -> None:
        """Nothing to do: the loop closes rounds before it evaluates."""

    def regroup(self) -> None:
        """The ranks are others: what owners' codes lost of their parts is forgotten."""
        self.reducers = {tag: self._reducer(tag) for tag in self.reducers}

    def average(self, step: int, buffers: Mapping[str, Tensor]) -> Averaged:
        """Exchange `buffers`, which `self.sync` gave out for `step`. Raises what the group raises,
        and `NonFiniteError`."""
        reduced = {
            tag: (self.reducers.get(tag) or self._reducer(tag))(flat)
            for tag, flat in buffers.items()
        }
        return Averaged(reduced, self.sync.find(step, reduced))

    def take(self, step: int, averaged: Averaged) -> None:
        """Apply it."""
        self.sync.apply(step, averaged.reduced, averaged.found)

    def global_state(self) -> dict[str, Any]:
        """After a round: what all workers share, and this one's moments."""
        alone = {"residual": None, "round": None}
        return {
            "buffers": dict(self.module.named_buffers()),
            "optimizer": self.optimizer.state_dict(),
            "sync": self.sync.state_dict() | alone,
        }

    def load_global_state(self, state: dict[str, Any]) -> None:
        """Go on from another worker's `global_state`. Raises `InputError` for another model's."""
        own = dict(self.module.named_buffers())
        with torch.no_grad():
            for name, value in state["buffers"].items():
                own[name].copy_(value)
        self.optimizer.load_state_dict(state["optimizer"])
        self.optimizer.zero_grad(set_to_none=True)
        self.sync.load_state_dict(state["sync"])
        self.sync.return_to_sync()
