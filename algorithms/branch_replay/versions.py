"""Which weights a state was captured with.

Version counters see in-place edits, optimizers and `load_state_dict`; identities and addresses see
replaced tensors; norms see edits through `.data`, which move no counter. Adapters (`lora.py`) that
are switched off or scaled move none of these.
"""

from __future__ import annotations

from typing import Any

import torch

from algorithms.branch_replay.errors import StaleStateError

Fingerprint = tuple[tuple[Any, ...], ...]


def fingerprint(model: Any) -> Fingerprint:
    """Equal for two calls if no parameter, buffer or adapter of `model` was touched in between."""
    tensors = [*model.parameters(), *model.buffers()]
    with torch.no_grad():
        floats = [t.detach() for t in tensors if t.is_floating_point()]
        norms = torch.stack([n.double().cpu() for n in torch._foreach_norm(floats)]).tolist()
    switches = [
        (m.disable_adapters, tuple(m.active_adapters), tuple(getattr(m, "scaling", {}).items()))
        for m in model.modules()
        if hasattr(m, "adapter_layer_names")
    ]
    return (*((id(t), t.data_ptr(), t._version) for t in tensors), tuple(norms), tuple(switches))


def require_fresh(captured: Fingerprint, model: Any) -> None:
    """Raise `StaleStateError` if `model` has other weights than those captured with."""
    if captured != fingerprint(model):
        raise StaleStateError(
            "the captured prompt is older than the weights: capture it again after every change, "
            "or set refresh_every (response_only) to reuse it with its drift measured"
        )
