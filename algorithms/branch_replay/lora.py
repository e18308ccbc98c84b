"""Low-rank adapters through `peft`: W x + (alpha / rank) B A x with W frozen (LoRA, 2106.09685).

Replay sees a model whose projections are two more products; that only A and B get a gradient is
autograd's business. The model without its adapters is the reference of a KL or of pairs: switching
them off takes no second copy of the weights, only a capture of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from algorithms.branch_replay.config import LoRAConfig
from algorithms.branch_replay.losses import Branches
from algorithms.branch_replay.replay import BranchReplay
from algorithms.branch_replay.tree import Node
from algorithms.common.errors import InputError, one_line
from algorithms.common.seeding import seed_model


def add_lora(model: Any, config: LoRAConfig, seed: int) -> Any:
    """Put adapters into `model`, in place, and freeze all else.

    B is 0, so nothing changes yet; A is the same on every rank for the same `seed`.

    Returned is the `PeftModel` around it, whose `save_pretrained` writes them as files that `peft`
    and vLLM read. Raises `InputError` for `targets` that do not exist or are no linear layers:
    experts and their routers, whose weights `peft` puts in place anew in every forward.
    """
    try:
        import peft
        from peft.tuners.lora.layer import ParamWrapper
    except ImportError:
        command = ".venv/bin/pip install peft"
        raise InputError(f"lora: needs the peft package: {command}") from None
    described = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=config.targets or "all-linear",
        task_type="CAUSAL_LM",
    )
    seed_model(seed)
    try:
        wrapped = peft.get_peft_model(model, described)
    except ValueError as error:
        raise InputError(f"lora.targets: {one_line(error)}") from None
    for name, module in model.named_modules():
        if isinstance(module, ParamWrapper):
            raise InputError(f"lora.targets: {name} is no linear layer; name those that are")
    names = [f".{name}" for name, module in model.named_modules() if _is_adapted(module)]
    for target in config.targets or ():  # `peft` asks for one that exists, we for all
        if not any(name.endswith(f".{target}") for name in names):
            raise InputError(f"lora.targets: the model has no module {target!r}")
    return wrapped


def lora_state(wrapped: Any) -> dict[str, Tensor]:
    """The adapters of what `add_lora` returned: all that a run has to keep of its weights."""
    from peft import get_peft_model_state_dict

    state: dict[str, Tensor] = get_peft_model_state_dict(wrapped)
    return state


def load_lora(wrapped: Any, state: dict[str, Tensor]) -> None:
    """Set them to what `lora_state` gave. Raises `InputError` where they are others than those."""
    from peft import set_peft_model_state_dict

    own = lora_state(wrapped)
    if {k: v.shape for k, v in own.items()} != {k: v.shape for k, v in state.items()}:
        raise InputError(f"lora: the state has other adapters than the model's {len(own)} matrices")
    set_peft_model_state_dict(wrapped, state)


def require_mergeable(model: Any) -> None:
    """Raise `InputError` for an adapter on a weight that another layer uses too, such as a tied
    head: merging would change both."""
    weights = dict(model.named_parameters(remove_duplicate=False))
    for name, layer in model.named_modules():
        if not _is_adapted(layer):
            continue
        shared = [other for other, each in weights.items() if each is layer.get_base_layer().weight]
        if len(shared) > 1:
            raise InputError(
                f"lora.targets: {name} cannot be merged: {' and '.join(shared)} are one weight"
            )


def merged(model: Any) -> Any:
    """`model`, in place, with what its adapters add in its weights, and without adapters. Raises
    as `require_mergeable` does."""
    require_mergeable(model)
    for name, layer in list(model.named_modules()):
        if _is_adapted(layer):
            layer.merge()
            model.set_submodule(name, layer.get_base_layer())
    return model


class WithoutAdapters:
    """A model with its adapters off, for log-probabilities of the reference.

    Raises `InputError` for a model without adapters, and one that trains other weights too: it
    would not be where it started then.
    """

    def __init__(self, replay: BranchReplay) -> None:
        found = _adapted(replay.model)
        if not found:
            raise InputError("reference: the model has no adapters to switch off")
        inside = {
            id(parameter)
            for layer in found
            for name in layer.adapter_layer_names
            for parameter in getattr(layer, name).parameters()
        }
        for name, parameter in replay.model.named_parameters():
            other = parameter.requires_grad and id(parameter) not in inside
            if other and not name.startswith("value_head."):  # log-probabilities are without it
                raise InputError(f"reference: {name} is trained too, so give a model that is not")
        self.replay = replay

    def log_probs(self, prompt: Tensor, responses: Sequence[Tensor | Node]) -> Branches:
        """As `BranchReplay.log_probs`, from a capture of its own."""
        with _off(self.replay.model):
            return self.replay.log_probs(prompt, responses)


def has_adapters(model: Any) -> bool:
    return bool(_adapted(model))


def _adapted(model: Any) -> list[Any]:
    """Layers with adapters; without `peft` there are none."""
    return [m for m in model.modules() if _is_adapted(m)]


def _is_adapted(module: Any) -> bool:
    return hasattr(module, "adapter_layer_names")


@contextmanager
def _off(model: Any) -> Iterator[None]:
    """Adapters off; which are active and which weights get a gradient is as it was afterwards."""
    layers = [layer for layer in _adapted(model) if not layer.disable_adapters]
    trained = [(p, p.requires_grad) for p in model.parameters()]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for parameter, wanted in trained:
            parameter.requires_grad_(wanted)
