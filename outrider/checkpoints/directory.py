"""Reads and checks a model directory in the hub's layout: `config.json` and safetensors files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from outrider.checkpoints.fields import read_token_ids
from outrider.checkpoints.model_config import ModelConfig, config_from_hf
from outrider.checkpoints.model_tensors import check_model_tensors
from outrider.checkpoints.safetensors_header import StoredTensor, read_header
from outrider.errors import InvalidRequestError, NotFoundError

_SINGLE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class ModelDirectory:
    """A model directory that has passed all checks."""

    path: Path
    config: ModelConfig
    tensors: Mapping[str, StoredTensor]
    """Descriptions of all tensors (dtype, shape, place in a file), by name."""


def read_model_directory(path: Path, *, compare_all: bool = True) -> ModelDirectory:
    """Read the configuration and the headers of the weight files, and check that the model can be
    served.

    An output projection that must equal the embedding is compared byte by byte if `compare_all` is
    set, otherwise in samples. Raises NotFoundError for a missing file. For any other problem it
    raises InvalidRequestError, which says what is wrong and what is supported.
    """
    if not path.is_dir():
        raise NotFoundError(f"{path}: no such model directory")
    tensors = _read_tensors(path)
    config = read_model_config(path)
    check_model_tensors(str(path), config, tensors, compare_all=compare_all)
    return ModelDirectory(path, config, tensors)


def read_model_config(path: Path) -> ModelConfig:
    """Read `config.json` of a model directory, and the end-of-sequence ids of
    `generation_config.json`.

    Raises NotFoundError if `config.json` is missing, and InvalidRequestError if a file is malformed
    or needs something that is not supported.
    """
    file = path / "config.json"
    if not file.is_file():
        raise NotFoundError(f"{path}: no model here (expected a directory with config.json)")
    raw = _read_object(file)
    with _naming(file):
        config = config_from_hf(raw)
    file = path / "generation_config.json"
    with _naming(file):
        more = _read_generation_eos(file, config.vocab_size)
    return replace(config, eos_ids=tuple(sorted({*config.eos_ids, *more})))


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Add the name of the file to InvalidRequestErrors that the `with` block raises."""
    try:
        yield
    except InvalidRequestError as error:
        raise InvalidRequestError(
            f"{file}: {error.message}", reason="INVALID_CHECKPOINT"
        ) from error


def _read_object(file: Path) -> dict[str, Any]:
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise InvalidRequestError(
            f"{file}: not valid JSON: {error}", reason="INVALID_CHECKPOINT"
        ) from error
    if not isinstance(raw, dict):
        raise InvalidRequestError(f"{file}: expected a JSON object", reason="INVALID_CHECKPOINT")
    return raw


def _read_generation_eos(file: Path, vocab_size: int) -> tuple[int, ...]:
    """Return the end-of-sequence ids of generation_config.json, where chat models list all of
    theirs.

    Return none if the file is missing or is not a JSON object. Raises InvalidRequestError for ids
    outside the vocabulary.
    """
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return ()
    return read_token_ids(raw, "eos_token_id", vocab_size) if isinstance(raw, dict) else ()


def _read_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the descriptions of all tensors by name. If there is an index file, it names the
    weight files."""
    index = path / _INDEX
    if not index.is_file():
        if not (path / _SINGLE).is_file():
            found = sorted(file.name for file in path.glob("*.bin"))
            advice = (
                f": {found[0]} is not supported, save the weights as safetensors" if found else ""
            )
            raise NotFoundError(f"{path} holds neither {_SINGLE} nor {_INDEX}{advice}")
        return read_header(path / _SINGLE)
    weight_map = _read_index(index)
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(set(weight_map.values())):
        if not (path / shard).is_file():
            raise NotFoundError(f"{path}: the shard {shard} is missing")
        for name, tensor in read_header(path / shard).items():
            if weight_map.get(name, shard) == shard:
                tensors[name] = tensor
    for name, shard in weight_map.items():
        if name not in tensors:
            raise InvalidRequestError(
                f"{index}: {name} is not in the shard {shard}", reason="INVALID_CHECKPOINT"
            )
    return tensors


def _read_index(index: Path) -> dict[str, str]:
    try:
        raw = json.loads(index.read_text(encoding="utf-8"))
        if not isinstance(raw, dict) or not isinstance(raw.get("weight_map"), dict):
            raise ValueError("it must be a JSON object with the object weight_map")
        return {name: _plain_name(file) for name, file in raw["weight_map"].items()}
    except (ValueError, RecursionError, OSError) as error:
        raise InvalidRequestError(
            f"{index}: not a safetensors index: {error}", reason="INVALID_CHECKPOINT"
        ) from error


def _plain_name(file: Any) -> str:
    if not isinstance(file, str) or Path(file).name != file:
        raise ValueError(f"shard name {file!r} is not a plain file name")
    return file
