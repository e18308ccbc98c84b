"""What optimizers of matrices share: state in cohorts, AdamW for the weights that are no matrices.

State is made when the optimizer is, on the weights' device, unless an optimizer lets a weight wait;
what `Optimizer.state` holds are views of the cohorts' buffers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from algorithms.common.cohort import Cohort, Kept, is_matrix, portions, take_over
from algorithms.common.dense import KEPT, DenseWeights, by_kind
from algorithms.common.errors import InputError

Params = Iterable[Tensor] | Iterable[dict[str, Any]]
Group = Mapping[str, Any]


class MatrixOptimizer(Optimizer):
    """Updates matrices by cohort. 0-d, 1-D and empty weights in a group of matrices get AdamW, and
    weights without a gradient are left out, as in torch."""

    _shaping: tuple[str, ...] = ()
    """Options of a group that decide what is kept, where changes are seen in the next step; others
    when cohorts are laid out anew."""

    def __init__(self, params: Params, defaults: dict[str, Any]) -> None:
        self._cohorts: list[Cohort] = []
        self._others: list[DenseWeights] = []
        self._waiting: list[Tensor] = []
        self._shapes: list[tuple[Any, ...]] = []
        self._uneven = False
        self._absent: list[bool] = []
        super().__init__(params, defaults)

    @abstractmethod
    def _check(self, group: Group) -> None:
        """Raise `InputError` for a value out of range; say what is not taken as asked."""

    @abstractmethod
    def _has_matrices(self, group: Group) -> bool: ...

    def _takes(self, parameter: Tensor) -> bool:
        """Whether a weight of a group that has matrices is updated by cohort."""
        return is_matrix(parameter)

    def _waits(self, parameter: Tensor) -> bool:
        """Whether a matrix without state has none until it has a gradient."""
        return False

    @abstractmethod
    def _kept(self, parameter: Tensor, group: Group) -> Kept:
        """State of a matrix beside its step."""

    def _begin(self, state: dict[str, Tensor]) -> None:
        """Fill the zeros of a matrix that has no state yet."""

    @abstractmethod
    def _update(self, cohort: Cohort, gradient: Tensor, group: Group) -> None:
        """Update the weights of a cohort from their gradients, flat; may overwrite those."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; makes the group's state. A group that is refused is not added."""
        self._check_state()
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_common(group)
            self._check(group)
        except Exception:
            self.param_groups.pop()
            raise
        self._take_dense(len(self.param_groups) - 1, {})
        self._lay_out()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also the end of `load_state_dict` and `copy.deepcopy`: lays what is given out anew.

        Raises `InputError` for what is of another kind of optimizer, or of other weights.
        """
        super().__setstate__(state)
        for name in sorted(self.defaults.keys() - {"differentiable"}):  # which torch has just added
            if any(name not in group for group in self.param_groups):
                raise InputError(f"state_dict: a group has no {name}: it is another optimizer's")
        self._others, self._shapes = [], []
        for index in range(len(self.param_groups)):
            self._take_dense(index, self.state)
        self._lay_out()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every weight that has a gradient; gradients are left as they are."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for cohort in self._due():
            self._update(cohort, cohort.advance(), self.param_groups[cohort.group])
        self._update_dense()
        return loss

    def _update_dense(self) -> None:
        for weights in self._others:
            weights.update(self.param_groups[weights.group])

    @torch.no_grad()
    def _take_dense(self, index: int, given: Mapping[Tensor, dict[str, Tensor]]) -> None:
        """Make state for the weights of a group that are no matrices, from what is given."""
        group = self.param_groups[index]
        matrices = set(self._matrices(group))
        dense = [each for each in group["params"] if each not in matrices]
        for alike in by_kind(dense):
            weights = DenseWeights(alike, index)
            for parameter, state in weights.states():
                if values := given.get(parameter):
                    take_over(state, values)
                self.state[parameter] = state
            self._others.append(weights)

    def _due(self) -> list[Cohort]:
        missing = [[each.grad is None for each in cohort.parameters] for cohort in self._cohorts]
        # As long as the same weights have gradients, weights of unlike ages never become alike.
        changed = self._uneven and [each[0] for each in missing] != self._absent
        changed = changed or any(len(set(each)) > 1 for each in missing)
        changed = changed or any(each.grad is not None for each in self._waiting)
        if changed or self._shape() != self._shapes:
            self._lay_out()
        return [each for each in self._cohorts if each.parameters[0].grad is not None]

    def _shape(self) -> list[tuple[Any, ...]]:
        return [tuple(group[name] for name in self._shaping) for group in self.param_groups]

    def _check_state(self) -> None:
        """Raise `InputError` where a matrix has other state than the options of its group say: the
        rest of it alone would mean something else."""
        for index, group in enumerate(self.param_groups):
            matrices = set(self._matrices(group))
            for parameter in group["params"]:
                state = self.state.get(parameter, {})
                kept = self._kept(parameter, group) if parameter in matrices else KEPT
                odd = state.keys() ^ {"step", *kept}
                if state and odd:
                    before = self._shapes[index] if index < len(self._shapes) else ()
                    options = zip(self._shaping, before, strict=False)
                    changed = [name for name, value in options if group[name] != value]
                    raise InputError(
                        f"{', '.join(changed) or 'state_dict'}: does not go with the state of"
                        f" weights {tuple(parameter.shape)}, for its {', '.join(sorted(odd))}"
                    )

    def _matrices(self, group: Group) -> list[Parameter]:
        return list(filter(self._takes, group["params"])) if self._has_matrices(group) else []

    @torch.no_grad()
    def _lay_out(self) -> None:
        """New cohorts, a function of how many gradients each matrix has seen and whether it has one
        now; so a resumed run has those of the uninterrupted one."""
        self._check_state()
        self._cohorts, self._waiting, self._shapes = [], [], self._shape()
        ages = set()
        for index, group in enumerate(self.param_groups):
            alike: dict[Any, list[Parameter]] = {}
            for parameter in self._matrices(group):
                state = self.state.get(parameter, {})
                if not state and parameter.grad is None and self._waits(parameter):
                    self._waiting.append(parameter)
                    continue
                age = (int(state.get("step", 0)), parameter.grad is None)
                ages.add(age)
                kept = tuple(self._kept(parameter, group))
                key = (parameter.dtype, parameter.device, kept, age)
                alike.setdefault(key, []).append(parameter)
            for members in alike.values():
                kept_of = partial(self._kept, group=group)
                for portion in portions(members):
                    self._settle(Cohort(portion, index, kept_of))
        self._uneven = len(ages) > 1
        self._absent = [cohort.parameters[0].grad is None for cohort in self._cohorts]

    def _settle(self, cohort: Cohort) -> None:
        for parameter, state in zip(cohort.parameters, cohort.state, strict=True):
            if not self.state[parameter]:
                self._begin(state)
                self.state[parameter] = state
        cohort.restore([self.state[parameter] for parameter in cohort.parameters])
        for parameter, state in zip(cohort.parameters, cohort.state, strict=True):
            self.state[parameter] = state
        self._cohorts.append(cohort)


def require(name: str, value: object, holds: bool) -> None:
    """Raise `InputError` naming an option unless its value `holds`."""
    if not holds:
        raise InputError(f"{name}: is {value!r}, out of range")


def _check_common(group: Group) -> None:
    beta1, beta2 = group["betas"]
    require("lr", group["lr"], group["lr"] >= 0)
    require("betas", group["betas"], 0 <= beta1 < 1 and 0 <= beta2 < 1)
    require("eps", group["eps"], group["eps"] > 0)
    require("weight_decay", group["weight_decay"], group["weight_decay"] >= 0)
