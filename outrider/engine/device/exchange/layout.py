"""Layout of exchange buffers: what lies where in the memory that drafter and verifier share. Pure.

See `outrider.engine.kernels.exchange.buffers` for what the arrays are. A buffer begins with the
number of a round; its banks follow.

B decode rows of a round, N nodes of a row (the root included), K = N - 1 drafts, Q prefill chunks
of P tokens, H width of a feature, X session slots of the verifier, E entries of a distribution.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from outrider.errors import InvalidRequestError

_ALIGNMENT: Final = 256
NUMBER_BYTES: Final = _ALIGNMENT
"""Bytes before the first bank: polling the number there disturbs nothing else."""
_MAX_BYTES: Final = 1 << 31
"""Bytes of a buffer, at most."""
_MAX_DISTRIBUTION_BYTES: Final = 1 << 26
"""Bytes of the draft distributions of all sessions, at most."""
_ENTRY_BYTES: Final = 8
"""An id and a count, int32 each."""


class BufferField(NamedTuple):
    """One array of a buffer."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of its bank, a multiple of 256."""

    @property
    def num_bytes(self) -> int:
        """Its size."""
        size = self.dtype.itemsize
        for length in self.shape:
            size *= length
        return size


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """The arrays of a bank, in order, and how many banks there are."""

    fields: tuple[BufferField, ...]
    bank_bytes: int
    depth: int

    @property
    def num_bytes(self) -> int:
        """Size of the buffer."""
        return NUMBER_BYTES + self.depth * self.bank_bytes

    @classmethod
    def of_arrays(
        cls, depth: int, *arrays: tuple[str, torch.dtype, tuple[int, ...]]
    ) -> BufferLayout:
        """Banks of arrays one behind the other, each aligned. Raises InvalidRequestError for more
        than 2 GiB."""
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
    """E, at most `wanted`: as many as all distributions have room for in 64 MiB, but at least 1 if
    any are wanted. The verifier has the like of it three times more: a private copy, and two
    workspaces of acceptance."""
    room = _MAX_DISTRIBUTION_BYTES // (num_slots * draft_length * _ENTRY_BYTES)
    return min(wanted, max(room, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeShape:
    """What the buffers of a pair are made for; both sides must agree on all of it."""

    num_slots: int
    """X: session slots of the verifier, its padding slot included."""
    max_rows: int
    """B: decode rows of a round, at most."""
    draft_length: int
    """K: tokens of a draft chain, at most."""
    max_chunks: int
    """Q: prefill chunks of a round, at most."""
    chunk_tokens: int
    """P."""
    feature_size: int
    """H."""
    feature_dtype: torch.dtype
    distribution_entries: int
    """E; 0: drafts come without distributions."""
    fan_out: int = 0
    """F: outcomes of a round that the drafter drafts for while it runs, a session; 0: none."""
    ahead_rows: int = 0
    """Decode rows of a round, at most, whose outcomes are drafted for."""
    depth: int = 8
    """Rounds that the verifier may be ahead of its drafter."""

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
        """N: nodes of a row, the root included."""
        return 1 + self.draft_length

    def verdict_layout(self) -> BufferLayout:
        """The layout of the verdict buffer."""
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
        """The layout of the draft buffer."""
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
