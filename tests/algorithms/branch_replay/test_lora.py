"""Adapters get the gradient of full sequences; the model without them is the reference."""

import copy
import sys

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from algorithms.branch_replay.config import (
    LearnerConfig,
    LoRAConfig,
    ObjectiveConfig,
    ReplayConfig,
    RolloutConfig,
)
from algorithms.branch_replay.errors import StaleStateError
from algorithms.branch_replay.learner import Learner, Settings
from algorithms.branch_replay.lora import (
    WithoutAdapters,
    add_lora,
    load_lora,
    lora_state,
    merged,
)
from algorithms.branch_replay.replay import BranchReplay
from algorithms.common.errors import FieldError, InputError
from tests.families import tiny, true_float64
from tests.lookups import Kept, end, lookup_prompts, reader
from tests.replays import distance, error, naive, replayed, responses, tokens


def adapted(model, seed=0, **settings):
    """With adapters that do something: B is not 0."""
    wrapped = add_lora(model, LoRAConfig(**({"rank": 3} | settings)), seed)
    assert wrapped.get_base_model() is model
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "lora_embedding_A" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def trained(model):
    return [name for name, p in model.named_parameters() if p.requires_grad]


def partly(question, found):
    return float((found < 6).double().mean())


def learner(model, reference_model=None, optimizer=torch.optim.AdamW, lr=0.01, **objective):
    return Learner(
        model,
        optimizer([p for p in model.parameters() if p.requires_grad], lr=lr),
        Settings(
            rollout=RolloutConfig(max_tokens=3, batch=5),
            replay=ReplayConfig(chunk=4, branches_per_pass=3),
            objective=ObjectiveConfig(**objective),
            learner=LearnerConfig(group=4, clip_norm=0),
        ),
        eos=[end()],
        score=partly,
        seed=7,
        reference_model=reference_model,
    )


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("llama", None),
        ("gpt2", None),
        ("gemma2", None),
        ("falcon_h1", [*ATTENTION, "in_proj"]),
        ("qwen3_next", [*ATTENTION, "in_proj_qkvz", "in_proj_ba", "out_proj"]),
        ("qwen3_moe", ATTENTION),
    ],
)
def test_adapters_get_the_gradient_of_full_sequences(family, targets):
    model = adapted(tiny(family), targets=targets)
    names = trained(model)
    assert names and all("lora_" in name for name in names)
    with true_float64(model):
        for chunk, per_pass in ((4, 2), (100, 8)):
            found = error(
                model,
                tokens(11),
                responses(5, 1, 0, 7),
                chunk=chunk,
                branches_per_pass=per_pass,
            )
            assert found <= 1e-12
        _, gradients = replayed(model, tokens(11), responses(5, 3), chunk=4)
    assert all(float(gradients[name].norm()) > 0 for name in names if "lora_B" in name)
    assert all(float(g.norm()) == 0 for name, g in gradients.items() if name not in names)


@pytest.mark.parametrize(
    "targets", [["k_proj"], ["q_proj"], ["down_proj"], ["lm_head"], ["embed_tokens"], ["v_proj"]]
)
def test_adapters_in_one_place_are_enough(targets):
    model = adapted(reader(dtype=torch.float64), targets=targets)
    with true_float64(model):
        assert error(model, tokens(9) % 12, [r % 12 for r in responses(4, 2)], chunk=4) <= 1e-12


def test_the_prompt_counts_for_adapters_of_keys_and_values():
    """Of these the gradient without the prompt is most wrong."""
    model = adapted(reader(dtype=torch.float64), targets=["k_proj", "v_proj"])
    prompt, branches = tokens(20) % 12, [r % 12 for r in responses(3, 2)]
    with true_float64(model):
        _, _, truth = naive(model, prompt, branches)
        _, without = replayed(model, prompt, branches, mode="response_only")
        _, exact = replayed(model, prompt, branches)
    assert distance(exact, truth) <= 1e-12
    assert distance(without, truth) > 0.1


def test_adapters_start_at_the_model_and_by_their_seed():
    model = reader()
    before = model(input_ids=torch.arange(8)[None]).logits
    one, other, third = (copy.deepcopy(model) for _ in range(3))
    states = []
    for each, seed in ((one, 1), (other, 1), (third, 2)):
        states.append(lora_state(add_lora(each, LoRAConfig(), seed)))
        assert torch.equal(each(input_ids=torch.arange(8)[None]).logits, before)
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert any(not torch.equal(states[0][name], states[2][name]) for name in states[0])


@pytest.mark.parametrize("objective", [{"name": "grpo", "kl": 0.1}, {"name": "dpo"}])
def test_the_reference_is_the_model_without_adapters(objective):
    plain = reader(dtype=torch.float64)
    model = adapted(copy.deepcopy(plain))
    prompts = lookup_prompts(2)
    gradients, metrics = [], []
    with true_float64(model):
        for reference in (plain, None):
            one = learner(copy.deepcopy(model), reference, optimizer=Kept, **objective)
            metrics.append(one.update(prompts, 0))
            gradients.append(one.optimizer.gradient)
    assert distance(gradients[1], gradients[0]) <= 1e-12
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-12)
    assert metrics[0]["kl"] > 1e-3


def test_the_kl_starts_at_zero_and_switching_leaves_no_trace():
    model = reader()
    add_lora(model, LoRAConfig(rank=2), seed=0)
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    names = trained(model)
    one = learner(model, kl=0.1, lr=0.05)
    first = one.update(lookup_prompts(2), 0)
    assert first["kl"] == pytest.approx(0.0, abs=1e-9) and first["grad_norm"] > 0
    assert one.update(lookup_prompts(2), 1)["kl"] > 1e-7
    assert trained(model) == names
    for name, parameter in model.named_parameters():
        if name in frozen:
            assert torch.equal(parameter, frozen[name])


def test_adapters_that_were_frozen_stay_frozen():
    model = adapted(reader())
    first = trained(model)[0]
    model.get_parameter(first).requires_grad_(False)
    WithoutAdapters(BranchReplay(model)).log_probs(tokens(5) % 12, [tokens(2) % 12])
    assert first not in trained(model) and len(trained(model)) > 3


def test_a_state_captured_with_adapters_is_refused_without_them():
    model = adapted(reader())
    replay = BranchReplay(model)
    captured = replay.capture(tokens(6) % 12)
    projections = [m for m in model.modules() if hasattr(m, "adapter_layer_names")]
    for enabled in (False, True):
        for projection in projections:
            projection.enable_adapters(enabled)
        if enabled:
            replay.log_probs(captured, [tokens(2) % 12])
        else:
            with pytest.raises(StaleStateError):
                replay.log_probs(captured, [tokens(2) % 12])


def test_a_run_with_adapters_resumes_to_the_same_weights():
    prompts = [lookup_prompts(2, seed=step) for step in range(4)]

    def start():
        model = reader()
        wrapped = add_lora(model, LoRAConfig(rank=2), seed=0)
        return wrapped, learner(model, kl=0.05)

    whole, one = start()
    rows = [one.update(prompts[step], step) for step in range(4)]
    half, one = start()
    [one.update(prompts[step], step) for step in range(2)]
    state = copy.deepcopy(lora_state(half))
    assert sum(v.numel() for v in state.values()) == sum(
        p.numel() for p in half.parameters() if p.requires_grad
    )
    again, resumed = start()
    load_lora(again, state)
    resumed.optimizer.load_state_dict(copy.deepcopy(one.optimizer.state_dict()))
    assert [resumed.update(prompts[step], step) for step in range(2, 4)] == rows[2:]
    for a, b in zip(again.parameters(), whole.parameters(), strict=True):
        assert torch.equal(a, b)


def test_adapters_on_bf16_are_float32_and_feel_small_steps():
    model = reader(dtype=torch.bfloat16)
    add_lora(model, LoRAConfig(rank=2), seed=0)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    before = {name: p.clone() for name, p in model.named_parameters()}
    metrics = learner(model, lr=1e-6).update(lookup_prompts(2), 0)
    assert 0 < metrics["grad_norm"] < float("inf")
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in trained(model) if "lora_B" in name}


def test_what_is_saved_is_read_by_peft(tmp_path):
    plain = reader()
    plain.save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    wrapped = add_lora(model, LoRAConfig(), seed=0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.2)
    wrapped.save_pretrained(tmp_path / "adapters")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    read = PeftModel.from_pretrained(base, tmp_path / "adapters")
    ids = torch.arange(8)[None]
    torch.testing.assert_close(read(input_ids=ids).logits, model(input_ids=ids).logits)
    with pytest.raises(InputError, match=r"is a PeftModel; give what its get_base_model returns$"):
        BranchReplay(read)
    BranchReplay(read.get_base_model())


def test_what_cannot_be_is_one_line(monkeypatch):
    with pytest.raises(InputError, match="^lora.targets: .*nothing_here"):
        add_lora(reader(), LoRAConfig(targets=["nothing_here"]), seed=0)
    with pytest.raises(InputError, match="^lora.targets: the model has no module 'k_projj'$"):
        add_lora(reader(), LoRAConfig(targets=["q_proj", "k_projj"]), seed=0)
    with pytest.raises(InputError, match="^lora.targets: .*experts is no linear layer"):
        add_lora(tiny("qwen3_moe"), LoRAConfig(), seed=0)
    with pytest.raises(InputError, match="^lora: the state has other adapters than"):
        one, other = (add_lora(reader(), LoRAConfig(rank=rank), seed=0) for rank in (2, 3))
        load_lora(one, lora_state(other))
    with pytest.raises(InputError, match="^reference: the model has no adapters to switch off$"):
        WithoutAdapters(BranchReplay(reader()))
    model = adapted(reader())
    model.model.norm.weight.requires_grad_(True)
    with pytest.raises(InputError, match="^reference: model.norm.weight is trained too"):
        WithoutAdapters(BranchReplay(model))
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(InputError, match="^lora: needs the peft package: .venv/bin/pip install"):
        add_lora(reader(), LoRAConfig(), seed=0)


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_a_weight_that_two_layers_share_is_not_merged(target):
    """Adapters of a tied head are its own, a merged weight would be the embedding's too."""
    tied = LlamaConfig(
        vocab_size=12,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        tie_word_embeddings=True,
    )
    for targets in (["q_proj"], ["q_proj", target]):
        model = LlamaForCausalLM(tied)
        add_lora(model, LoRAConfig(targets=targets), seed=0)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        if target not in targets:
            merged(model)
            continue
        with pytest.raises(InputError, match=f"{target} cannot be merged: .* are one weight$"):
            merged(model)
        after = model.state_dict()
        assert all(torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.parametrize("settings", [{"rank": 0}, {"alpha": 0.0}, {"targets": []}, {"rank": 1.5}])
def test_bad_settings_are_named(settings):
    with pytest.raises(FieldError, match=f"^{next(iter(settings))}: must"):
        LoRAConfig(**settings)
