"""Reads a checkpoint without executing anything that it holds.

torch.distributed.checkpoint reads tensors with `weights_only=True`, but everything else, its index
`.metadata` included, with a plain unpickler, which runs whatever a strange file tells it to. Here
the index may name the classes that one is made of, and other values are what `weights_only` allows.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from algorithms.common.errors import InputError, one_line

METADATA = "torch.distributed.checkpoint.metadata"
CLASSES = {
    *((METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta")),
    *((METADATA, f"{name}StorageMetadata") for name in ("Bytes", "Chunk", "Tensor")),
    *((METADATA, name) for name in ("TensorProperties", "_MEM_FORMAT_ENCODING")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
}
"""Module and name of all that an index is made of; data types of torch come on top."""


class Reader(FileSystemReader):
    """The storage reader for `load`."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index. Raises `InputError` for a broken one and one that names anything else."""
        path = Path(self.path) / ".metadata"
        try:
            metadata = _Unpickler(io.BytesIO(path.read_bytes())).load()
            if not isinstance(metadata, Metadata):
                raise pickle.UnpicklingError(f"holds a {type(metadata).__name__}")
        except Exception as error:  # what is broken raises anything
            raise InputError(f"{path}: cannot be read: {one_line(error)}") from None
        return metadata


class Planner(DefaultLoadPlanner):
    """The planner for `load`."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take a value that is not a tensor. Raises `pickle.UnpicklingError` for one that could
        do more than be there."""
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = (module, name) in CLASSES
        if known or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint")
