"""Decoders from `transformers`: build one by its sizes or start from one, save directories.

We write no decoder of our own. What `save` leaves is an ordinary Hugging Face directory, weights in
safetensors, with the tokenizer it was trained with.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils.logging import disable_progress_bar

from algorithms.common.config import ModelConfig
from algorithms.common.errors import InputError, one_line
from algorithms.common.files import TOKENIZER_FILES
from algorithms.common.pretrained import load_model
from algorithms.common.seeding import seed_model

disable_progress_bar()  # a rank's log is a file


def build(config: ModelConfig, *, vocab_size: int, end_of_text: int, seed: int) -> nn.Module:
    """A causal language model in float32, the same weights on every rank for the same `seed`.

    Raises `InputError` for an unknown family or size, a path that holds no model, or one whose
    vocabulary is smaller than that of the tokens.
    """
    if config.path is not None:
        return _load(Path(config.path), vocab_size)
    if config.family not in CONFIG_MAPPING:
        raise InputError(f"model.family: transformers has no {config.family!r}")
    known = CONFIG_MAPPING[config.family]()
    for name in config.extra:
        if not hasattr(known, name):
            raise InputError(f"model.extra.{name}: {config.family} has no such setting")
    sizes = {k: v for k, v in config.to_dict().items() if k not in ("path", "family", "extra")}
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end_of_text)
    settings = sizes | config.extra | special | {"vocab_size": vocab_size}
    for name in config.extra:
        if settings[name] != config.extra[name]:
            raise InputError(f"model.extra.{name}: is {settings[name]}, as the tokens have it")
    name = f"model.family: {config.family}"
    seed_model(seed)
    try:
        resolved = AutoConfig.for_model(config.family, **settings)
        model: nn.Module = AutoModelForCausalLM.from_config(resolved, dtype=torch.float32)
        causal = _is_causal(model)
    except Exception as error:  # whatever a family makes of its sizes and settings
        raise InputError(f"{name}: {one_line(error)}") from None
    if not causal:
        raise InputError(f"{name} is not causal: a token's prediction depends on later tokens")
    return model


def _is_causal(model: nn.Module) -> bool:
    """Whether a token sees none of those after it, as in BERT it does."""
    model.eval()
    with torch.no_grad():
        first, second = logits(model, torch.tensor([[0, 1, 2], [0, 1, 3]]))[:, :2]
    model.train()
    return torch.allclose(first, second, atol=1e-4)


def _load(path: Path, vocab_size: int) -> nn.Module:
    model: nn.Module = load_model(path)
    rows = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    if rows < vocab_size:
        raise InputError(
            f"model.path: {path} knows {rows} tokens, the corpus was encoded with {vocab_size}; "
            "set tokens.tokenizer to the model's tokenizer.json"
        )
    return model


def logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Next-token logits `[batch, tokens, vocab]` of int64 `tokens` `[batch, tokens]`."""
    output: Any = model(input_ids=tokens, use_cache=False)
    scores: Tensor = output.logits
    return scores


def save(model: nn.Module, tokens_dir: Path, out: Path) -> None:
    """Write config, safetensors weights and the tokenizer of `tokens_dir` to the folder `out`."""
    model.save_pretrained(out)  # type: ignore[operator]
    for name in TOKENIZER_FILES:
        if (tokens_dir / name).is_file():
            shutil.copyfile(tokens_dir / name, out / name)


def weights_sha256(model: nn.Module) -> str:
    """Hash of all parameters and buffers, by name, bit for bit."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(str(tuple(tensor.shape)).encode() + str(tensor.dtype).encode())
        flat = tensor.detach().cpu().contiguous().view(-1)
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def parameter_count(model: nn.Module) -> int:
    """Number of trained values; a tied head counts once."""
    return sum(parameter.numel() for parameter in model.parameters())
