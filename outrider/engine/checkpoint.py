"""Checkpoint reader: configuration and tensors of safetensors or GGUF models, under Hugging Face
names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider.checkpoints.directory import (
    ModelDirectory,
    read_model_config,
    read_model_directory,
)
from outrider.checkpoints.model_config import ModelConfig
from outrider.engine.gguf import open_gguf
from outrider.errors import InvalidRequestError


class TensorSource(Protocol):
    """Protocol that reads the tensors of one checkpoint by their Hugging Face names."""

    def has(self, name: str) -> bool:
        """Return whether the checkpoint contains the tensor."""
        ...

    def get(self, name: str) -> Tensor:
        """Return the tensor on the CPU in its stored dtype, dequantised if it is quantised.

        Raises InvalidRequestError if the tensor is missing or damaged.
        """
        ...


class SafetensorsSource:
    """Tensors of a validated model directory with safetensors files."""

    def __init__(self, directory: ModelDirectory) -> None:
        self._path = directory.path
        self._tensors = directory.tensors
        self._files: dict[Path, Any] = {}

    def has(self, name: str) -> bool:
        """Return whether the checkpoint contains the tensor."""
        return name in self._tensors

    def get(self, name: str) -> Tensor:
        """Return the tensor as a view of its memory-mapped file.

        Raises InvalidRequestError if the tensor is missing or damaged.
        """
        stored = self._tensors.get(name)
        if stored is None or stored.file is None:
            raise InvalidRequestError(f"{self._path}: the checkpoint has no tensor {name!r}")
        with _typed_errors(self._path):
            tensor: Tensor = self._open(stored.file).get_tensor(name)
        return tensor

    def _open(self, file: Path) -> Any:
        if file not in self._files:
            self._files[file] = safe_open(file, framework="pt")
        return self._files[file]


@contextmanager
def _typed_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise InvalidRequestError(f"{path}: damaged safetensors file: {error}") from error


def open_checkpoint(path: str | Path) -> TensorSource:
    """Open a safetensors directory or a `.gguf` file.

    Raises NotFoundError if a file is missing and InvalidRequestError if the checkpoint is damaged
    or contains unknown or unsupported tensors.
    """
    path = Path(path)
    if path.suffix == ".gguf":
        return open_gguf(path)
    return SafetensorsSource(read_model_directory(path))


def load_model_config(path: str | Path) -> ModelConfig:
    """Read the configuration of a model directory (`config.json`) or of a `.gguf` file.

    Raises NotFoundError if the file is missing and InvalidRequestError if it is malformed or
    requires an unsupported feature.
    """
    path = Path(path)
    return open_gguf(path).config if path.suffix == ".gguf" else read_model_config(path)
