"""The header of a safetensors file: names, dtypes, shapes and places of its tensors.

A file is a little-endian u64 (the header's length), the header in JSON, and the tensors' bytes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from outrider.errors import InvalidRequestError

MAX_HEADER_BYTES: Final = 100_000_000
"""The format's own bound on the header's length."""
_LENGTH_BYTES: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor of a checkpoint as a file describes it."""

    dtype: str
    """Element type by the name that the file's format gives to it, such as BF16 or Q4_K."""
    shape: tuple[int, ...]
    file: Path | None = None
    """The file that holds it; None if only the tensor itself is known."""
    start: int = 0
    """Offset of its first byte in the file."""
    size_bytes: int = 0


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Read the tensors' descriptions by name. Raises InvalidRequestError for a damaged file."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
            begin = _LENGTH_BYTES + length
            if length > MAX_HEADER_BYTES or begin > size:
                raise ValueError("the header is longer than the file or than is allowed")
            raw = json.loads(opened.read(length))
        if not isinstance(raw, dict):
            raise ValueError("the header is no JSON object")
        raw.pop("__metadata__", None)
        tensors = {name: _parse(entry, file, begin) for name, entry in raw.items()}
        end = max((each.start + each.size_bytes for each in tensors.values()), default=begin)
        if end != size:
            raise ValueError(f"the tensors end at byte {end}, the file at byte {size}")
    except (ValueError, TypeError, LookupError, RecursionError, OSError) as error:
        raise InvalidRequestError(
            f"{file}: damaged safetensors file: {error}", reason="INVALID_CHECKPOINT"
        ) from error
    return tensors


def _parse(entry: Any, file: Path, begin: int) -> StoredTensor:
    start, end = (int(offset) for offset in entry["data_offsets"])
    shape = tuple(int(extent) for extent in entry["shape"])
    if not 0 <= start <= end or any(extent < 0 for extent in shape):
        raise ValueError("a tensor has a negative size")
    return StoredTensor(
        dtype=str(entry["dtype"]),
        shape=shape,
        file=file,
        start=begin + start,
        size_bytes=end - start,
    )
