"""Checkpoints of a pipeline: each rank's weights, optimizer, and all that is under way.

Written at a pause. Resumed with the same cut, the run repeats the uninterrupted one bit for bit,
drained or not. A drained checkpoint also resumes under another cut or number of stages: weights
and optimizer state go to their new stages by parameter name. For that an optimizer must keep its
state per parameter, and the new one the same of each; settings of its groups are then those of the
new optimizer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from algorithms.async_pipeline.pipeline import Flight, Pipeline
from algorithms.async_pipeline.update import Weights
from algorithms.common.checkpoint import Checkpoints
from algorithms.common.errors import InputError


def save(checkpoints: Checkpoints, pipeline: Pipeline, extra: dict[str, Any]) -> None:
    """Write the state of all ranks, under the number of updates made. `extra` holds plain JSON
    values, equal on all ranks."""
    note = {"cut": _cut(pipeline), "drained": pipeline.drained, "settings": _settings(pipeline)}
    checkpoints.save_own(pipeline.updates, _state(pipeline), {"pipeline": note, "extra": extra})


def load(checkpoints: Checkpoints, pipeline: Pipeline) -> dict[str, Any]:
    """Restore the newest sound checkpoint into a new pipeline; its `extra`, or {} without one.

    Raises `InputError` where microbatches are under way and the cut, or a setting that decides what
    becomes of them, is another; and where it is a checkpoint of another model, of another class of
    optimizer, or, under another cut, of one that keeps other things of a weight.
    """
    step, written = checkpoints.peek()
    if step == 0:
        return {}
    note = written["pipeline"]
    changed = [key for key, value in _settings(pipeline).items() if value != note["settings"][key]]
    same_cut = _cut(pipeline) == note["cut"]
    if not note["drained"] and (changed or not same_cut):
        what = "the cut into stages" if not same_cut else changed[0]
        raise InputError(
            f"{checkpoints.folder}: {what} has changed, but microbatches are under way at update"
            f" {step}; go on with the old one until the run has drained"
        )
    if same_cut:
        _restore(pipeline, checkpoints.load_own()[1], checkpoints.folder)
        if note["drained"]:
            _set_done(pipeline, step)
    else:
        weights, states = dict[str, Any](), dict[str, Any]()
        kinds = set[str | None]()
        for rank in range(len(note["cut"])):
            _, state, _ = checkpoints.load_own(rank)
            weights |= state["weights"]
            states |= state["optimizer"]["of"]
            kinds.add(state["optimizer"].get("class"))
        for kind in kinds:
            _check_class(pipeline.optimizer, kind, checkpoints.folder)
        _check_states(pipeline.optimizer, pipeline.weights, states, kinds, checkpoints.folder)
        _copy_weights(pipeline.weights, weights, checkpoints.folder)
        _load_optimizer(pipeline.optimizer, pipeline.weights, None, states)
        _set_done(pipeline, step)
    extra: dict[str, Any] = written["extra"]
    return extra


def stage_state(weights: Weights, optimizer: Optimizer) -> dict[str, Any]:
    """A stage's weights and optimizer, for `Checkpoints.save_own`."""
    return {"weights": dict(weights), "optimizer": _optimizer_state(optimizer, weights)}


def load_stage(weights: Weights, optimizer: Optimizer, state: dict[str, Any], folder: Path) -> None:
    """Restore in place what `stage_state` gave. Raises `InputError` that names `folder`, where it
    comes from, for another model or optimizer."""
    saved = state["optimizer"]
    _check_class(optimizer, saved.get("class"), folder)
    _copy_weights(weights, state["weights"], folder)
    _load_optimizer(optimizer, weights, saved["groups"], saved["of"])


def _cut(pipeline: Pipeline) -> list[list[str]]:
    """The names of the parameters on each stage, known to all ranks."""
    names = pipeline.comm.gather_objects(list(pipeline.weights))
    cut: list[list[str]] = pipeline.comm.broadcast_object(names, src=0)
    return cut


def _settings(pipeline: Pipeline) -> dict[str, Any]:
    return {
        "delays": pipeline.delays,
        "accumulation": pipeline.accumulation,
        "stash": pipeline.stash,
        "recompute": pipeline.recompute,
    }


def _set_done(pipeline: Pipeline, updates: int) -> None:
    done = updates * pipeline.accumulation
    pipeline.start = pipeline.stop = pipeline.done = done


def _state(pipeline: Pipeline) -> dict[str, Any]:
    copies = {id(f.weights): f.weights for f in pipeline.flights.values() if f.weights is not None}
    numbers = {key: number for number, key in enumerate(copies)}
    return {
        **stage_state(pipeline.weights, pipeline.optimizer),
        "run": [pipeline.start, pipeline.stop, pipeline.done],
        "flights": [
            [index, flight.inputs, numbers.get(id(flight.weights))]
            for index, flight in pipeline.flights.items()
        ],
        "copies": [dict(weights) for weights in copies.values()],
        "held": pipeline.held,
        "targets": pipeline.targets,
    }


def _restore(pipeline: Pipeline, state: dict[str, Any], folder: Path) -> None:
    load_stage(pipeline.weights, pipeline.optimizer, state, folder)
    pipeline.start, pipeline.stop, pipeline.done = state["run"]
    device = pipeline.comm.device
    home = torch.device("cpu") if pipeline.stash == "host" else device
    copies = [
        {name: weight.to(home).requires_grad_() for name, weight in weights.items()}
        for weights in state["copies"]
    ]
    pipeline.flights = {
        index: Flight(
            inputs.to(device).requires_grad_(pipeline.k > 0),
            None if number is None else copies[number],
        )
        for index, inputs, number in state["flights"]
    }
    pipeline.held, pipeline.targets = state["held"], state["targets"]
    pipeline.relaunch()


def _copy_weights(weights: Weights, saved: Weights, folder: Path) -> None:
    for name, weight in weights.items():
        if name not in saved or saved[name].shape != weight.shape:
            raise InputError(f"{folder}: holds no {name} of this shape, {list(weight.shape)}")
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(saved[name])


def _check_class(optimizer: Optimizer, written: str | None, folder: Path) -> None:
    """`written`: its name in the checkpoint; None in older ones."""
    own = type(optimizer).__name__
    if written is not None and written != own:
        raise InputError(f"{folder}: holds the state of {written}, not of {own}")


def _check_states(
    optimizer: Optimizer,
    weights: Weights,
    states: dict[str, dict[str, Any]],
    kinds: set[str | None],
    folder: Path,
) -> None:
    """That what is kept of each weight is what `optimizer` keeps. Torch's optimizers say that only
    after a step, but of one class it is always the same."""
    for name, weight in weights.items():
        own, saved = optimizer.state.get(weight, {}), states.get(name, {})
        if not own and saved and None in kinds:
            raise InputError(
                f"{folder}: does not say whose state of {name} it holds; go on with the old cut"
            )
        for key in sorted(own.keys() | saved.keys()) if own and saved else []:
            if key not in saved:
                raise InputError(f"{folder}: holds no {key} of {name}, which the optimizer keeps")
            if key not in own:
                raise InputError(f"{folder}: holds a {key} of {name}, which the optimizer does not")
            if (found := _shape(saved[key])) != (wanted := _shape(own[key])):
                raise InputError(f"{folder}: {key} of {name} has shape {found}, not {wanted}")


def _shape(value: Any) -> list[int]:
    return list(value.shape) if isinstance(value, Tensor) else []


def _names(optimizer: Optimizer, weights: Weights) -> list[list[str]]:
    """Of the parameters of each group, in the order in which its state dict counts them."""
    known = {id(weight): name for name, weight in weights.items()}
    return [[known[id(weight)] for weight in group["params"]] for group in optimizer.param_groups]


def _optimizer_state(optimizer: Optimizer, weights: Weights) -> dict[str, Any]:
    packed = optimizer.state_dict()
    names = [name for group in _names(optimizer, weights) for name in group]
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in packed["param_groups"]
    ]
    states = {names[i]: state for i, state in packed["state"].items()}
    return {"class": type(optimizer).__name__, "groups": groups, "of": states}


def _load_optimizer(
    optimizer: Optimizer,
    weights: Weights,
    groups: list[dict[str, Any]] | None,
    states: dict[str, dict[str, Tensor]],
) -> None:
    packed = optimizer.state_dict()
    names = [name for group in _names(optimizer, weights) for name in group]
    packed["state"] = {i: states[name] for i, name in enumerate(names) if name in states}
    for own, saved in zip(packed["param_groups"], groups or [], strict=False):
        own |= saved
    optimizer.load_state_dict(packed)
