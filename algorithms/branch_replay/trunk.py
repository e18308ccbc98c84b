"""A `transformers` decoder without its head, run from any state.

Nothing is assumed about a family. A probe of eight tokens, whole and cut in two, finds which layers
attend and which carry recurrent states, and proves that these are all the state there is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from algorithms.branch_replay.attention import Run, TopReached, Write, our_attention, running
from algorithms.branch_replay.errors import SelfCheckError
from algorithms.branch_replay.path import Path
from algorithms.branch_replay.state import State, make_cache, read_state
from algorithms.common.errors import InputError

PROBE = 8
CUT = 3


class Trunk:
    """`model`: any causal language model of transformers, e.g. LlamaForCausalLM."""

    def __init__(self, model: Any, window: int | None = None) -> None:
        self.window = window
        """Imposed on every attention layer."""
        self.model = model
        self.layers: int = model.config.get_text_config().num_hidden_layers
        self.attention: set[int] | None = None
        """Layers that attend; None before the first forward."""
        self.recurrent = False
        self.top: frozenset[Write] = frozenset()
        """What the last layer with a state writes."""
        self._modes: list[bool] = []
        """Whether each module is in training mode, at the last probe."""
        self.check_settings()

    def check_settings(self) -> None:
        """Before every call, as settings may have changed since the last: refuse some, and probe
        again what other code runs in another mode (training or evaluation)."""
        refuse(self.model)
        modes = [module.training for module in self.model.modules()]
        if modes != self._modes:
            with our_attention(self.model), torch.no_grad():
                self._probe()
            self._modes = modes

    def forward(self, inputs: Tensor, run: Run, state: State) -> tuple[Tensor | None, State]:
        """Hidden states [batch, tokens, width] of `inputs` int64 [batch, tokens] and the state
        after them; None where `run` stopped at the top layer. `state` may be written in."""
        positions = {}
        if run.rows is not None and self.attention:
            positions["position_ids"] = run.rows.positions
        run.window = self.window
        cache = make_cache(run, self.layers, state)
        hidden = None
        try:
            out = self.model.base_model(input_ids=inputs, cache=cache, use_cache=True, **positions)
            hidden = out.last_hidden_state
        except TopReached:
            pass
        run.over = True
        if self.attention is None:
            self.attention = set(run.keys)
        run.check(self.attention)
        return hidden, read_state(cache)

    @contextmanager
    def graph(self, run: Run, tokens: int) -> Iterator[None]:
        """Around a forward of `tokens` tokens each and its backward."""
        # Recurrent layers have kernels for one token that write into the state they read.
        in_place = self.recurrent and tokens == 1
        mutations = torch.autograd.graph.allow_mutation_on_saved_tensors()
        with running(run), torch.enable_grad(), mutations if in_place else nullcontext():
            yield

    def _probe(self) -> None:
        device = self.model.get_input_embeddings().weight.device
        vocabulary = self.model.get_input_embeddings().weight.shape[0]
        tokens = (torch.arange(PROBE, device=device) % vocabulary)[None]
        whole = self._probe_run(tokens, Run(None, 0), {})[0]
        run = Run(None, 0)
        _, state = self._probe_run(tokens[:, :CUT], run, {})
        self.recurrent = any(kind == "recurrent" for _, kind in state)
        writes = {(layer, "attention") for layer in run.keys} | set(state)
        if not writes:
            raise InputError("no layer of the model keeps a state that replay knows of")
        last = max(layer for layer, _ in writes)
        self.top = frozenset(write for write in writes if write[0] == last)
        path = Path(CUT)
        for layer in run.keys:
            path.write(layer, 0, run.keys[layer], run.values[layer])
        given = {key: kept.clone() for key, kept in state.items()}
        joined = self._probe_run(tokens[:, CUT:], Run(path, CUT), given)[0]
        empty = Path(CUT)
        for layer in run.keys:
            zero = torch.zeros_like(run.keys[layer]), torch.zeros_like(run.values[layer])
            empty.write(layer, 0, *zero)
        ignored = self._probe_run(tokens[:, CUT:], Run(empty, CUT), {})[0]
        self._compare(whole[:, CUT:], joined, ignored)

    def _probe_run(self, tokens: Tensor, run: Run, state: State) -> tuple[Tensor, State]:
        with running(run):
            hidden, after = self.forward(tokens, run, state)
        assert hidden is not None
        return hidden, after

    def _compare(self, whole: Tensor, joined: Tensor, ignored: Tensor) -> None:
        """Two runs in a row must be far closer to one than a run that forgot the first part."""
        size = whole.double().norm()
        wrong = float((joined.double() - whole.double()).norm() / size)
        forgot = float((ignored.double() - whole.double()).norm() / size)
        exact = whole.dtype in (torch.float32, torch.float64)
        if not wrong <= max((0.01 if exact else 0.5) * forgot, 16 * torch.finfo(whole.dtype).eps):
            raise SelfCheckError(
                f"the model's state does not carry over: {CUT} + {PROBE - CUT} tokens differ from "
                f"{PROBE} by {wrong:.1e} (by {forgot:.1e} when the state is dropped)"
            )


def refuse(model: Any) -> None:
    """Raise `InputError` for settings under which two passes over the same tokens would differ.

    Dropout of attention arrives at the attention function, which refuses it; what a model does by a
    function call alone is left to the probe and to the comparison of the passes.
    """
    for name, module in model.named_modules():
        kinds = getattr(module, "rope_type", None)  # one, or one for each type of layer
        for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
            if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope"):
                raise InputError(
                    f"{name}: rope_type {kind!r} turns old keys by other angles when the sequence "
                    "grows, so they cannot be kept"
                )
        if not module.training:
            continue
        if getattr(module, "gradient_checkpointing", False) is True:
            raise InputError(
                f"{name or 'model'}: gradient checkpointing drops the prompt's state, turn it off "
                "(replay bounds memory by itself, see chunk)"
            )
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            raise InputError(f"{name}: dropout of {module.p}; set it to 0 or call model.eval()")
