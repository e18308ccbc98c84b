"""Models and tokenizers to start from: a local Hugging Face directory or one GGUF file.

GGUF is llama.cpp's format: weights, mostly quantised, and the tokenizer in one file. Weights are
dequantised to floats and all else is built from the metadata; `transformers` knows the names, and
turns rows of Q and K back from llama.cpp's order of rotary pairs to its own. What comes out is not
the checkpoint that was quantised: where there is a directory of that, start from it.
"""

from __future__ import annotations

import io
import struct
from contextlib import redirect_stderr
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from algorithms.common.errors import InputError, one_line

SUFFIX = ".gguf"

UNREADABLE = (OSError, ValueError, SafetensorError, UnpicklingError)
"""What libraries raise for a directory that is not what it should be."""
DAMAGED = (*UNREADABLE, RuntimeError, LookupError, TypeError, OverflowError, struct.error)
"""And for a GGUF file, which they read without checks."""


def load_model(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The causal language model at `path`, on the CPU. Raises `InputError`, which names `path`."""
    if path.suffix == SUFFIX:
        return _model_of_gguf(path, dtype)
    if not (path / "config.json").is_file():
        raise InputError(f"model.path: {path} holds no config.json")
    try:
        return AutoModelForCausalLM.from_pretrained(path, local_files_only=True, dtype=dtype)
    except UNREADABLE as error:
        raise InputError(f"model.path: {path}: {one_line(error)}") from None


def load_tokenizer(path: Path) -> Any:
    """The tokenizer at `path`, with a chat template if it has one. Raises `InputError` likewise."""
    folder, file = path, {}
    if path.suffix == SUFFIX:
        _require_gguf(path)
        folder, file = path.parent, {"gguf_file": path.name}
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, **file)
    except Exception as error:  # of the files' own reader, which has no class for them
        raise InputError(f"{path}: holds no tokenizer: {one_line(error)}") from None


def _model_of_gguf(path: Path, dtype: torch.dtype) -> Any:
    _require_gguf(path)
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    try:
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
        with redirect_stderr(io.StringIO()):  # a progress bar; a rank's log is a file
            tensors = load_gguf_checkpoint(
                str(path), return_tensors=True, model_to_load=model, torch_dtype=dtype
            )["tensors"]
        tied = set(model.all_tied_weights_keys)
        missing = sorted(set(dict(model.named_parameters())) - set(tensors) - tied)
        if missing:
            raise InputError(f"it has no weight {missing[0]}")
        model.load_state_dict(tensors, strict=False)
    except DAMAGED as error:
        raise InputError(f"model.path: {path}: not a whole GGUF: {one_line(error)}") from None
    model.tie_weights()
    return model.eval()


def _require_gguf(path: Path) -> None:
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    try:
        import gguf  # noqa: F401
    except ImportError:
        command = ".venv/bin/pip install gguf"
        raise InputError(f"{path}: needs the gguf package: {command}") from None
