"""Layout of exchange buffers: offsets of the arrays in the memory that drafter and verifier share.

The module `outrider.engine.kernels.exchange.buffers` describes the content of the arrays. A buffer
begins with a round number, which is followed by its banks. A bank holds the data of one round.

Shapes: B decode rows of a round, N nodes of a row (the root included), K = N - 1 draft tokens, Q
prefill chunks of P tokens, H width of a feature, X session slots of the verifier, E entries of a
distribution (a token id and a count each).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from outrider.errors import InvalidRequestError

_ALIGNMENT: Final = 256
NUMBER_BYTES: Final = _ALIGNMENT
"""Number of bytes before the first bank. They hold only the round number, so that polling it does
not slow accesses to other data."""
_MAX_BYTES: Final = 1 << 31
"""Maximum size of a buffer in bytes."""
_MAX_DISTRIBUTION_BYTES: Final = 1 << 26
"""Maximum size of the draft distributions of all sessions, in bytes."""
_ENTRY_BYTES: Final = 8
"""Size of an entry in bytes: an id and a count, int32 each."""


class BufferField(NamedTuple):
    """One array of a buffer."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Offset from the start of the bank in bytes, a multiple of 256."""

    @property
    def num_bytes(self) -> int:
        """Size of the array in bytes."""
        size = self.dtype.itemsize
        for length in self.shape:
            size *= length
        return size


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """Layout of an exchange buffer: the arrays of a bank in order, the size of a bank in bytes, and
    `depth`, the number of banks."""

    fields: tuple[BufferField, ...]
    bank_bytes: int
    depth: int

    @property
    def num_bytes(self) -> int:
        """Size of the buffer in bytes."""
        return NUMBER_BYTES + self.depth * self.bank_bytes

    @classmethod
    def of_arrays(
        cls, depth: int, *arrays: tuple[str, torch.dtype, tuple[int, ...]]
    ) -> BufferLayout:
        """Return the layout of banks that hold these arrays in order, each aligned to 256 bytes.
        Raises InvalidRequestError for more than 2 GiB."""
        fields: list[BufferField] = []
        end = 0
        for name, dtype, shape in arrays:
            field = BufferField(name, dtype, shape, end)
            fields.append(field)
            end = -(-(end + field.num_bytes) // _ALIGNMENT) * _ALIGNMENT
        layout = cls(tuple(fields), end, depth)
        if layout.num_bytes > _MAX_BYTES:
            raise InvalidRequestError(
                f"an exchange buffer would take {layout.num_bytes} bytes, at most {_MAX_BYTES} are "
                "allowed"
            )
        return layout


def distribution_entries(wanted: int, *, num_slots: int, draft_length: int) -> int:
    """Return E, the number of entries per distribution: `wanted`, or fewer if the distributions of
    all slots would exceed 64 MiB, but at least 1 if `wanted` is not 0.

    The verifier needs the same amount of memory three more times: for a private copy and for two
    workspaces of acceptance.
    """
    room = _MAX_DISTRIBUTION_BYTES // (num_slots * draft_length * _ENTRY_BYTES)
    return min(wanted, max(room, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeShape:
    """Sizes of the buffers of a drafter and a verifier. Both sides must agree on all of them."""

    num_slots: int
    """X: number of session slots of the verifier, including its padding slot."""
    max_rows: int
    """B: maximum number of decode rows of a round."""
    draft_length: int
    """K: maximum number of tokens of a draft chain."""
    max_chunks: int
    """Q: maximum number of prefill chunks of a round."""
    chunk_tokens: int
    """P: number of tokens of a prefill chunk."""
    feature_size: int
    """H: width of a feature."""
    feature_dtype: torch.dtype
    distribution_entries: int
    """E: maximum number of entries of a distribution; 0 if drafts have no distributions."""
    fan_out: int = 0
    """F: number of outcomes per session for which the drafter drafts while a round runs; 0 for no
    look-ahead."""
    ahead_rows: int = 0
    """Maximum number of decode rows of a round with look-ahead. For outcomes of larger rounds the
    drafter makes no drafts."""
    depth: int = 8
    """Maximum number of rounds that the verifier may be ahead of its drafter."""

    def __post_init__(self) -> None:
        for name in (
            "num_slots",
            "max_rows",
            "draft_length",
            "chunk_tokens",
            "feature_size",
            "depth",
        ):
            if getattr(self, name) < 1:
                raise InvalidRequestError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("max_chunks", "distribution_entries", "fan_out", "ahead_rows"):
            if getattr(self, name) < 0:
                raise InvalidRequestError(f"{name} must be >= 0, got {getattr(self, name)}")

    @property
    def num_nodes(self) -> int:
        """N: number of nodes of a row, including the root."""
        return 1 + self.draft_length

    def verdict_layout(self) -> BufferLayout:
        """Return the layout of the verdict buffer."""
        rows, nodes, chunks = self.max_rows, self.num_nodes, self.max_chunks
        width, dtype = self.feature_size, self.feature_dtype
        return BufferLayout.of_arrays(
            self.depth,
            ("slots", torch.int32, (rows,)),
            ("counts", torch.int32, (rows,)),
            ("starts", torch.int32, (rows,)),
            ("digests", torch.int64, (rows,)),
            ("tokens", torch.int32, (rows, nodes)),
            ("features", dtype, (rows, nodes, width)),
            ("chunk_slots", torch.int32, (chunks,)),
            ("chunk_counts", torch.int32, (chunks,)),
            ("chunk_starts", torch.int32, (chunks,)),
            ("chunk_digests", torch.int64, (chunks,)),
            ("chunk_tokens", torch.int32, (chunks, self.chunk_tokens)),
            ("chunk_features", dtype, (chunks, self.chunk_tokens, width)),
            ("outcomes", torch.int32, (rows,)),
        )

    def draft_layout(self) -> BufferLayout:
        """Return the layout of the draft buffer."""
        slots, drafts, entries = self.num_slots, self.draft_length, self.distribution_entries
        return BufferLayout.of_arrays(
            1,
            ("digests", torch.int64, (slots,)),
            ("tokens", torch.int32, (slots, drafts)),
            ("sizes", torch.int32, (slots, drafts)),
            ("entry_ids", torch.int32, (slots, drafts, entries)),
            ("entry_counts", torch.int32, (slots, drafts, entries)),
            ("drafting_ns", torch.int64, (1,)),
            ("ahead_number", torch.int32, (1,)),
            ("ahead_digests", torch.int64, (slots, self.fan_out)),
            ("ahead_tokens", torch.int32, (slots, self.fan_out, drafts)),
        )
