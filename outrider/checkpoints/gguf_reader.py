"""Opens GGUF files with the `gguf` package, which needs no torch, and reads their metadata."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from outrider.errors import FailedPreconditionError, InvalidRequestError

_MAGIC: Final = b"GGUF"
_LFS_START: Final = b"version https://git-lfs"


def open_gguf_reader(path: Path) -> Any:
    """Return a `gguf.GGUFReader` of a file, which maps the file into memory.

    Raises InvalidRequestError (INVALID_CHECKPOINT) if the file is no readable GGUF file, and
    FailedPreconditionError if the `gguf` package is not installed.
    """
    try:
        import gguf
    except ImportError as error:
        raise FailedPreconditionError(
            "reading GGUF files needs the gguf package: pip install gguf"
        ) from error
    try:
        _check_start(path)
        return gguf.GGUFReader(path)
    except OSError as error:
        raise _unreadable(path, str(error)) from error
    except (ValueError, KeyError, IndexError, OverflowError, struct.error) as error:
        # The reader raises many kinds of errors for a truncated file, none with a clear message.
        raise _unreadable(path, "it is truncated or damaged") from error


def read_gguf_metadata(reader: Any) -> Mapping[str, Any]:
    """Return all metadata key-value pairs of an open `gguf.GGUFReader`, as Python values."""
    return {key: field.contents() for key, field in reader.fields.items()}


def _check_start(path: Path) -> None:
    """Raise InvalidRequestError if the file does not begin with the GGUF magic bytes."""
    with path.open("rb") as file:
        first = file.read(len(_LFS_START))
    if not first:
        raise _unreadable(path, "the file is empty")
    if first == _LFS_START:
        raise _unreadable(
            path, "this is a Git LFS pointer, not the weights: fetch them with `git lfs pull`"
        )
    if not first.startswith(_MAGIC):
        raise _unreadable(path, "it does not begin with GGUF")


def _unreadable(path: Path, why: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{path}: not a readable GGUF file: {why}", reason="INVALID_CHECKPOINT"
    )
