"""Safetensors header reader: names, dtypes, shapes and offsets of a file's tensors.

A file is a little-endian u64 (the header's length), the header in JSON, and the tensors' bytes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from outrider.errors import InvalidRequestError

MAX_HEADER_BYTES: Final = 100_000_000
"""Maximum size of the header in bytes, as the format defines it."""
_LENGTH_BYTES: Final = 8
_LFS_START: Final = b"version https://git-lfs"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Description of one tensor in a checkpoint: its dtype, its shape and its place in a file."""

    dtype: str
    """Name of the element type in the file's format, such as BF16 or Q4_K."""
    shape: tuple[int, ...]
    file: Path | None = None
    """File that holds the tensor; None if unknown."""
    start: int = 0
    """Offset of the tensor's first byte in the file."""
    size_bytes: int = 0


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return the descriptions of all tensors of a safetensors file, by name. Raises
    InvalidRequestError for a damaged file."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            first = opened.read(len(_LFS_START))
            _check_kind(first)
            length = int.from_bytes(first[:_LENGTH_BYTES], "little")
            opened.seek(_LENGTH_BYTES)
            begin = _LENGTH_BYTES + length
            if length > MAX_HEADER_BYTES or begin > size:
                raise ValueError("the header is longer than the file or than is allowed")
            raw = _decode(opened.read(length))
        if not isinstance(raw, dict):
            raise ValueError("the header is no JSON object")
        raw.pop("__metadata__", None)
        tensors = {name: _parse(entry, file, begin) for name, entry in raw.items()}
        end = max((each.start + each.size_bytes for each in tensors.values()), default=begin)
        if end != size:
            raise ValueError(f"the tensors end at byte {end}, the file at byte {size}")
    except (ValueError, RecursionError, OSError) as error:
        raise InvalidRequestError(
            f"{file}: damaged safetensors file: {error}", reason="INVALID_CHECKPOINT"
        ) from error
    return tensors


def _decode(header: bytes) -> Any:
    try:
        return json.loads(header)
    except ValueError as error:
        raise ValueError("the header is not valid JSON") from error


def _check_kind(first: bytes) -> None:
    """Raise ValueError if the first bytes show that a file is empty or a Git LFS pointer."""
    if not first:
        raise ValueError("the file is empty")
    if first.startswith(_LFS_START):
        raise ValueError(
            "this is a Git LFS pointer, not the weights: fetch them with `git lfs pull`"
        )


def _parse(entry: Any, file: Path, begin: int) -> StoredTensor:
    if not isinstance(entry, dict):
        raise ValueError("the header describes a tensor by something else than a JSON object")
    for key in ("data_offsets", "shape"):
        if not isinstance(entry.get(key), list) or any(type(n) is not int for n in entry[key]):
            raise ValueError(f"{key} of a tensor must be a list of integers")
    if len(entry["data_offsets"]) != 2 or not isinstance(entry.get("dtype"), str):
        raise ValueError("a tensor must have two data_offsets and a dtype")
    start, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not 0 <= start <= end or any(extent < 0 for extent in shape):
        raise ValueError("a tensor has a negative size")
    return StoredTensor(
        dtype=entry["dtype"],
        shape=shape,
        file=file,
        start=begin + start,
        size_bytes=end - start,
    )
