"""Tiny random decoders of 14 families of `transformers`, to be run in `true_float64`."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from benchmarks.float64 import true_float64

__all__ = ["COMMON", "FAMILIES", "VOCAB", "tiny", "true_float64"]

VOCAB = 61

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}

FAMILIES: dict[str, dict] = {
    "llama": {},
    "qwen3": {},
    "gpt2": {
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 256,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    },
    "mistral": {"sliding_window": 7},
    "gemma3_text": {
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 8,
    },
    "gemma2": {
        "sliding_window": 7,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 8,
    },
    "gpt_oss": {
        **EXPERTS,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "qwen3_moe": {**EXPERTS},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 12,
        "q_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "num_key_value_heads": 4,
        "head_dim": 4,
    },
    "qwen3_next": {**EXPERTS, **DELTA_NET, "shared_expert_intermediate_size": 16},
    "qwen3_5_text": {**DELTA_NET},
    "mamba2": {
        "num_heads": 8,
        "head_dim": 8,
        "state_size": 8,
        "n_groups": 2,
        "chunk_size": 8,
        "conv_kernel": 4,
        "expand": 2,
    },
    "falcon_h1": {
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 8,
        "mamba_d_conv": 4,
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3},
}


def tiny(family: str, dtype: torch.dtype = torch.float64, **changes) -> PreTrainedModel:
    """A random model of `family`, all parameters far from their usual initial values."""
    torch.manual_seed(0)
    settings = COMMON | FAMILIES[family] | changes
    if family == "gpt2":
        settings = {k: v for k, v in settings.items() if k not in ("hidden_size", "head_dim")}
    config = AutoConfig.for_model(family, **settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(parameter + (0.2 if parameter.ndim > 1 else 0.1) * noise)
    model = model.to(dtype)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped product has no float64
    return model.train()
