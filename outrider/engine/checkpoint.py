"""Reading a checkpoint, whatever the file format: its configuration, and its tensors by their
Hugging Face names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider.engine.config import ModelConfig, config_from_hf, eos_ids_of
from outrider.engine.gguf import open_gguf
from outrider.errors import InvalidRequestError, NotFoundError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class TensorSource(Protocol):
    """Tensors of one checkpoint."""

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds the tensor."""
        ...

    def get(self, name: str) -> Tensor:
        """The tensor on the CPU as it is stored (dequantised if need be).

        Raises InvalidRequestError when it is missing or damaged.
        """
        ...


class SafetensorsSource:
    """A directory with `model.safetensors` or an index and its shards."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files: dict[str, Any] = {}
        self._weight_map = self._read_map()

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds the tensor."""
        return name in self._weight_map

    def get(self, name: str) -> Tensor:
        """The tensor, mapped from the file."""
        if name not in self._weight_map:
            raise InvalidRequestError(f"{self._path}: the checkpoint has no tensor {name!r}")
        with _typed_errors(self._path):
            tensor: Tensor = self._open(self._weight_map[name]).get_tensor(name)
        return tensor

    def _read_map(self) -> dict[str, str]:
        index = self._path / _INDEX
        if index.is_file():
            try:
                weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                return {str(name): _plain_name(file) for name, file in weight_map.items()}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise InvalidRequestError(f"{index}: not a safetensors index: {error}") from error
        if not (self._path / _SINGLE).is_file():
            raise NotFoundError(f"{self._path} holds neither {_SINGLE} nor {_INDEX}")
        with _typed_errors(self._path):
            return dict.fromkeys(self._open(_SINGLE).keys(), _SINGLE)

    def _open(self, file: str) -> Any:
        if file not in self._files:
            if not (self._path / file).is_file():
                raise NotFoundError(f"{self._path}: the shard {file} is missing")
            self._files[file] = safe_open(self._path / file, framework="pt")
        return self._files[file]


def _plain_name(file: Any) -> str:
    if not isinstance(file, str) or Path(file).name != file:
        raise ValueError(f"shard name {file!r} is not a plain file name")
    return file


@contextmanager
def _typed_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise InvalidRequestError(f"{path}: damaged safetensors file: {error}") from error


def open_checkpoint(path: str | Path) -> TensorSource:
    """Open a safetensors directory or a `.gguf` file."""
    path = Path(path)
    if path.suffix == ".gguf":
        return open_gguf(path)
    if not path.is_dir():
        raise NotFoundError(f"{path}: no such model directory")
    return SafetensorsSource(path)


def load_model_config(path: str | Path) -> ModelConfig:
    """Read the configuration of a model directory (`config.json`) or of a `.gguf` file.

    Raises NotFoundError when there is no such file and InvalidRequestError when it is not
    understood or asks for something that is not supported.
    """
    path = Path(path)
    if path.suffix == ".gguf":
        return open_gguf(path).config
    file = path / "config.json"
    if not file.is_file():
        raise NotFoundError(f"{path}: no model here (expected a directory with config.json)")
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise InvalidRequestError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise InvalidRequestError(f"{file}: expected a JSON object")
    generation = path / "generation_config.json"
    return config_from_hf(raw, more_eos_ids=_generation_eos(generation))


def _generation_eos(file: Path) -> tuple[int, ...]:
    """End-of-sequence ids of generation_config.json, where chat models list all of theirs."""
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        return eos_ids_of(raw.get("eos_token_id"))
    except (OSError, ValueError, AttributeError):
        return ()
