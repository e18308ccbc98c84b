"""Decoders from `transformers`: build one by its sizes, load and save Hugging Face directories.

We write no decoder of our own. What `save` leaves is an ordinary Hugging Face directory, weights in
safetensors, with the tokenizer it was trained with.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils.logging import disable_progress_bar

from algorithms.common.config import ModelConfig
from algorithms.common.errors import InputError, one_line
from algorithms.common.files import TOKENIZER_FILES
from algorithms.common.seeding import seed_model

disable_progress_bar()  # a rank's log is a file


def build(config: ModelConfig, *, vocab_size: int, end_of_text: int, seed: int) -> nn.Module:
    """A causal language model in float32, the same weights on every rank for the same `seed`.

    Raises `InputError` for an unknown family or size, a directory that holds no model, or one whose
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
    resolved = AutoConfig.for_model(
        config.family,
        **{**sizes, **config.extra},
        vocab_size=vocab_size,
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
        pad_token_id=end_of_text,
    )
    seed_model(seed)
    try:
        model: nn.Module = AutoModelForCausalLM.from_config(resolved, dtype=torch.float32)
    except ValueError as error:  # a family without a language model
        raise InputError(f"model.family: {config.family}: {one_line(error)}") from None
    _require_causal(model, f"model.family: {config.family}")
    return model


def _require_causal(model: nn.Module, name: str) -> None:
    """Raise `InputError` where a token sees the ones after it, as in BERT."""
    model.eval()
    with torch.no_grad():
        first, second = logits(model, torch.tensor([[0, 1, 2], [0, 1, 3]]))[:, :2]
    model.train()
    if not torch.allclose(first, second, atol=1e-4):
        raise InputError(f"{name} is not causal: a token's prediction depends on later tokens")


def _load(path: Path, vocab_size: int) -> nn.Module:
    if not (path / "config.json").is_file():
        raise InputError(f"model.path: {path} holds no config.json")
    try:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(
            path, local_files_only=True, dtype=torch.float32
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise InputError(f"model.path: {path}: {one_line(error)}") from None
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
