"""What would give a wrong gradient in silence raises instead."""

import pytest
import torch
from torch import nn

from algorithms.branch_replay.attention import NAME, Run, our_attention, running
from algorithms.branch_replay.config import ReplayConfig
from algorithms.branch_replay.errors import SelfCheckError, StaleStateError
from algorithms.branch_replay.losses import PerBranch
from algorithms.branch_replay.replay import BranchReplay
from algorithms.branch_replay.state import make_cache
from algorithms.branch_replay.versions import fingerprint
from algorithms.common.errors import InputError, NonFiniteError
from tests.families import tiny, true_float64
from tests.replays import coupled, error, responses, take_gradients, tokens


def test_dropout_raises_in_training_only():
    model = tiny("gpt2", resid_pdrop=0.1)
    with pytest.raises(InputError, match="dropout of 0.1"):
        BranchReplay(model)
    replay = BranchReplay(model.eval())
    replay.step(tokens(5), responses(3), coupled)
    model.train()
    with pytest.raises(InputError, match="dropout of 0.1"):
        replay.step(tokens(5), responses(3), coupled)


def test_dropout_of_a_part_in_training_raises():
    """Also where the whole is in evaluation: each module has its own mode."""
    model = tiny("gpt2", resid_pdrop=0.1).eval()
    replay = BranchReplay(model)
    model.transformer.h[1].mlp.train()
    with pytest.raises(InputError, match=r"h\.1\.mlp\.dropout: dropout of 0\.1"):
        replay.step(tokens(5), responses(3), coupled)
    with pytest.raises(InputError, match=r"h\.1\.mlp\.dropout"):
        BranchReplay(model)


@pytest.mark.parametrize("part", ["all", "part"])
def test_dropout_by_a_function_call_in_training_raises(part):
    """One pass has nothing to compare with, so the probe is repeated when a mode changes."""
    model = tiny("llama", torch.float32).eval()
    mlp = model.model.layers[1].mlp
    forward = mlp.forward
    mlp.forward = lambda x: nn.functional.dropout(forward(x), 0.5, training=mlp.training)
    replay = BranchReplay(model)
    loss = PerBranch(lambda i, log_probs: log_probs.sum())
    replay.step(tokens(5), responses(3), loss)
    (model if part == "all" else mlp).train()
    for _ in range(2):
        with pytest.raises(SelfCheckError, match="does not carry over"):
            replay.step(tokens(5), responses(3), loss)
    model.eval()
    replay.step(tokens(5), responses(3), loss)


ROPE = {
    "dynamic": {"factor": 2.0},
    "longrope": {
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 12,
    },
    "linear": {"factor": 2.0},
    "yarn": {"factor": 2.0, "original_max_position_embeddings": 12},
}


@pytest.mark.parametrize("kind", ROPE)
def test_rotary_angles_that_depend_on_the_length_raise(kind):
    rope = {"rope_type": kind, "rope_theta": 10000.0} | ROPE[kind]
    model = tiny("llama", rope_parameters=rope, max_position_embeddings=12)
    if kind in ("dynamic", "longrope"):
        with pytest.raises(InputError, match=f"rope_type '{kind}'"):
            BranchReplay(model)
    else:
        with true_float64(model):
            assert error(model, tokens(9), responses(9, 3), chunk=4) <= 1e-12


def test_rotary_angles_of_one_type_of_layer_raise():
    fixed = {"rope_type": "default", "rope_theta": 10000.0}
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    rope = {"sliding_attention": fixed, "full_attention": dynamic}
    with pytest.raises(InputError, match="rope_type 'dynamic'"):
        BranchReplay(tiny("gemma3_text", rope_parameters=rope))


@pytest.mark.parametrize("loss", ["any", "per branch"])
@pytest.mark.parametrize("kind", ["hook", "pre-hook", "patch"])
def test_what_a_user_hangs_on_the_trunk_runs_once(kind, loss):
    model = tiny("llama")
    trunk = model.model
    if kind == "hook":

        def scaled(module, inputs, output):
            output.last_hidden_state = 1.5 * output.last_hidden_state
            return output

        trunk.register_forward_hook(scaled)
    elif kind == "pre-hook":
        embed = trunk.embed_tokens

        def embedded(module, inputs, kwargs):
            ids = kwargs.pop("input_ids", None)
            assert ids is not None, "called without tokens: not in the trunk's forward"
            return inputs, {**kwargs, "inputs_embeds": 1.5 * embed(ids)}

        trunk.register_forward_pre_hook(embedded, with_kwargs=True)
    else:
        forward = trunk.forward

        def patched(*args, **kwargs):
            output = forward(*args, **kwargs)
            output.last_hidden_state = 1.5 * output.last_hidden_state
            return output

        trunk.forward = patched
    per_branch = PerBranch(lambda i, log_probs: (log_probs**2).sum())
    with true_float64(model):
        loss_fn = coupled if loss == "any" else per_branch
        assert error(model, tokens(9), responses(5, 3), loss_fn, chunk=4) <= 1e-12
    if kind == "patch":
        assert trunk.__dict__["forward"] is patched


def test_attention_dropout_raises():
    with pytest.raises(InputError, match="attention dropout of 0.1"):
        BranchReplay(tiny("llama", attention_dropout=0.1))


def test_dropout_by_a_function_call_raises():
    model = tiny("llama", torch.float32)
    replay = BranchReplay(model)
    mlp = model.model.layers[1].mlp
    mlp.register_forward_hook(lambda _, __, output: nn.functional.dropout(output, 0.5))
    with pytest.raises(SelfCheckError, match=r"in pass 1 and .* in pass 2"):
        replay.step(tokens(5), responses(3), coupled)


def test_gradient_checkpointing_raises():
    model = tiny("llama")
    replay = BranchReplay(model)
    model.activation_checkpointing_enable()
    with pytest.raises(InputError, match="gradient checkpointing"):
        replay.step(tokens(5), responses(3), coupled)
    model.eval()  # the library checkpoints in training only
    replay.step(tokens(5), responses(3), coupled)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_that_the_model_does_not_know_of_raises(reentrant):
    model = tiny("llama")
    replay = BranchReplay(model)
    layer = model.model.layers[1]
    forward = layer.forward

    def checkpointed(hidden, **kwargs):
        return torch.utils.checkpoint.checkpoint(
            lambda h: forward(h, **kwargs), hidden, use_reentrant=reentrant
        )

    layer.forward = checkpointed
    with pytest.raises(SelfCheckError, match="checkpointing"):
        replay.step(tokens(9), responses(3), coupled)


def test_a_loss_that_calls_the_model_raises():
    model = tiny("llama")

    def loss_fn(log_probs):
        return coupled(log_probs) + 0.0 * model(tokens(5)[None]).logits.detach().sum()

    with pytest.raises(SelfCheckError, match="a loss that calls the model"):
        BranchReplay(model).step(tokens(9), responses(3), loss_fn)


def test_a_padding_mask_raises():
    model = tiny("llama")
    mask = torch.ones(1, 5, dtype=torch.long)
    with our_attention(model), torch.no_grad():
        for padded in (False, True):
            mask[0, 0] = int(not padded)
            run = Run(None, 0)
            with running(run):
                call = {"cache": make_cache(run, 3, {}), "attention_mask": mask}
                if padded:
                    with pytest.raises(InputError, match="padding mask"):
                        model.model(tokens(5)[None], **call)
                else:
                    model.model(tokens(5)[None], **call)


def test_attention_that_is_neither_causal_nor_a_window_raises():
    model = tiny("llama")
    model.config.is_causal = False
    with pytest.raises(InputError):
        BranchReplay(model)


def test_a_window_that_attention_is_not_told_of_raises():
    model = tiny("mistral")
    for layer in model.model.layers:
        forward = layer.self_attn.forward

        def silent(*args, _forward=forward, _module=layer.self_attn, **kwargs):
            return _forward(*args, **kwargs)

        layer.self_attn.forward = silent
    model.model.layers[0].self_attn.config = _Without(model.config, "sliding_window")
    with pytest.raises(InputError, match="masks attention in a way"):
        BranchReplay(model)


class _Without:
    """A config one of whose settings is None."""

    def __init__(self, config, name):
        self._config, self._name = config, name

    def __getattr__(self, name):
        return None if name == self._name else getattr(self._config, name)


def test_a_layer_that_does_not_call_the_attention_interface_raises():
    model = tiny("llama")
    # As models do whose attention is written out: the implementation that is set is ignored.
    model.model.layers[1].self_attn.config = _Eager(model.config)
    with pytest.raises(SelfCheckError, match=r"without keys: \[1\]"):
        BranchReplay(model)


class _Eager(_Without):
    def __init__(self, config):
        super().__init__(config, "nothing")

    @property
    def _attn_implementation(self):
        return "eager"


def test_a_state_that_the_engine_does_not_know_of_raises():
    """A layer that mixes in the previous token without telling the cache."""
    model = tiny("llama")

    def shift(module, inputs, output):
        return output + 0.5 * output.roll(1, dims=1) * (torch.arange(output.shape[1]) > 0)[:, None]

    model.model.layers[0].mlp.register_forward_hook(shift)
    with pytest.raises(SelfCheckError, match="does not carry over"):
        BranchReplay(model)


@pytest.mark.parametrize("change", ["optimizer", "in_place", "data", "load", "assign", "replace"])
def test_a_captured_prompt_older_than_the_weights_raises(change):
    model = tiny("llama")
    replay = BranchReplay(model, ReplayConfig(chunk=4))
    captured = replay.capture(tokens(9))
    replay.step(captured, responses(3), coupled)  # twice with the same weights is fine
    replay.log_probs(captured, responses(3))
    weight = model.model.layers[1].mlp.up_proj.weight
    state = {name: 1.001 * tensor for name, tensor in model.state_dict().items()}
    if change == "optimizer":
        torch.optim.SGD(model.parameters(), lr=1e-3).step()
    elif change == "in_place":
        with torch.no_grad():
            weight[0, 0] += 1e-6
    elif change == "data":
        weight.data[0, 0] += 1e-3
    elif change == "load":
        model.load_state_dict(state)
    elif change == "assign":
        model.load_state_dict(state, assign=True)
    else:
        model.model.layers[1].mlp.up_proj.weight = nn.Parameter(weight.detach().clone())
    with pytest.raises(StaleStateError):
        replay.step(captured, responses(3), coupled)
    with pytest.raises(StaleStateError):
        replay.log_probs(captured, responses(3))
    replay.step(replay.capture(tokens(9)), responses(3), coupled)


def test_weights_that_change_inside_the_loss_raise():
    model = tiny("llama")

    def loss_fn(log_probs):
        with torch.no_grad():
            model.model.norm.weight.mul_(1.1)
        return coupled(log_probs)

    with pytest.raises(StaleStateError):
        BranchReplay(model).step(tokens(9), responses(3), loss_fn)


def test_a_fingerprint_is_stable():
    model = tiny("mamba2")
    before = fingerprint(model)
    BranchReplay(model).step(tokens(9), responses(3), coupled)
    assert fingerprint(model) == before


def test_losses_that_are_none():
    replay = BranchReplay(tiny("llama"))
    with pytest.raises(InputError, match="scalar"):
        replay.step(tokens(5), responses(3), lambda lps: lps[0])
    with pytest.raises(NonFiniteError, match="nan"):
        replay.step(tokens(5), responses(3), lambda lps: lps[0].sum() * float("nan"))


def test_the_model_is_left_as_it_was():
    model = tiny("llama")
    before = model.config._attn_implementation
    replay = BranchReplay(model)
    replay.step(tokens(5), responses(3), coupled)
    take_gradients(model)
    assert model.config._attn_implementation == before != NAME
    assert "forward" not in model.model.__dict__
    with pytest.raises(ZeroDivisionError):
        replay.step(tokens(5), responses(3), lambda lps: lps[0].sum() / 0 if 1 / 0 else None)
    assert model.config._attn_implementation == before
    model(tokens(5)[None])
