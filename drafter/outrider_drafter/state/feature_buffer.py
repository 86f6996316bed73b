"""Buffer of received features that are not used yet, left in the messages that brought them.

X session slots; B sessions of a batch; H feature width. A draft batch reads its rows straight from
the messages; a message is freed when all its rows were used. A message in a shared-memory channel's
memory is copied if it is still in use when the next one comes, which needs that memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.transport.shm import is_ring_view
from outrider.wire.messages import WireTensor
from outrider.wire.rounds import owner_and_offset

Indices = NDArray[np.int64]
FeatureConverter = Callable[[WireTensor], NDArray[np.generic]]
"""Rows [F, H] as their reader holds them; a view where that is how they came."""
_NOBODY: Final = 1 << 62
"""In the place of how far a session's features were used: it needs none any more."""


class FeatureView(NamedTuple):
    """All that a batch needs of one message."""

    rows: NDArray[np.generic]
    """[F, H] of the message; what else is in them is nobody's business."""
    offsets: Indices
    """[B]: the first row of each session."""


@dataclass(slots=True, eq=False)
class _FeatureMessage:
    """Rows of one message; entry e has counts[e] of them from offsets[e] on."""

    rows: NDArray[np.generic]
    slots: Indices
    firsts: Indices
    """Position of each entry's first row in its session."""
    counts: Indices
    offsets: Indices

    def make_private_copy(self) -> None:
        """See to it that nobody waits for where the rows lie; between them others may."""
        if is_ring_view(self.rows):
            owners, places = owner_and_offset(self.counts)
            self.rows = self.rows[self.offsets[owners] + places]
            self.offsets = self.counts.cumsum() - self.counts

    def entries(self, chosen: Indices) -> _FeatureMessage:
        """Some entries, in this order."""
        return _FeatureMessage(
            self.rows,
            self.slots[chosen],
            self.firsts[chosen],
            self.counts[chosen],
            self.offsets[chosen],
        )

    def row_indices(self, slots: Indices, starts: Indices, counts: Indices) -> Indices | None:
        """[B]: from which row on counts[i] rows of the session in slots[i] lie, from position
        starts[i] on, if just these were brought for each of them, whatever for others; None: if
        not. Columns [B]."""
        at = np.arange(len(slots))
        if len(self.slots) != len(slots) or not bool((self.slots == slots).all()):
            at = np.minimum(self.slots.searchsorted(slots), len(self.slots) - 1)
            if not bool((self.slots[at] == slots).all()):
                return None
        alike = (self.firsts[at] == starts) & (self.counts[at] == counts)
        return self.offsets[at] if bool(alike.all()) else None


class FeatureBuffer:
    """Features by session and position, each position once and in order."""

    def __init__(self, *, max_sessions: int, width: int, convert: FeatureConverter) -> None:
        self.width = width
        """H"""
        self._convert = convert
        self._used = np.full(max_sessions, _NOBODY, dtype=np.int64)
        """[X]: positions below were used."""
        self._last: NDArray[np.generic] | None = None
        """[X, H]: the newest used one of each session, for a draft that is made again."""
        self._messages: list[_FeatureMessage] = []

    def __len__(self) -> int:
        return len(self._messages)

    def open_slot(self, slot: int) -> None:
        """A session begins."""
        self._used[slot] = 0

    def drop_slot(self, slot: int) -> None:
        """A session needs no features any more."""
        self._used[slot] = _NOBODY
        for message in self._messages:
            message.counts[message.slots == slot] = 0
        self._tidy()

    def add_rows(
        self, wire: WireTensor, slots: Indices, firsts: Indices, counts: Indices, offsets: Indices
    ) -> None:
        """Keep a message's rows: entry e brings counts[e] of them, from row offsets[e] on, for
        the positions from firsts[e] on of the session in slots[e]; all [E]."""
        for message in self._messages:
            message.make_private_copy()
        wanted = (self._used[slots] < _NOBODY) & (counts > 0)
        if not bool(wanted.any()):
            return
        rows = self._convert(wire)
        if self._last is None:
            shape = (len(self._used), self.width)
            # Address space only: the system backs what is written.
            self._last = np.empty(shape, dtype=rows.dtype)
        # Entries are struck out here when a session ends.
        message = _FeatureMessage(rows, slots, firsts, counts.copy(), offsets)
        if not bool(wanted.all()):
            message = message.entries(np.flatnonzero(wanted))
        if not bool((slots[1:] > slots[:-1]).all()):
            # In the order of batches.
            message = message.entries(np.argsort(message.slots))
        self._messages.append(message)

    def read_rows(self, slot: int, start: int, stop: int) -> NDArray[np.generic]:
        """Rows [stop - start, H] of a session; they must be held, from the last used one on."""
        used = int(self._used[slot])
        assert used - 1 <= start <= stop, (used, start, stop)
        pieces: list[NDArray[np.generic]] = []
        if start < used:
            assert self._last is not None
            pieces.append(self._last[slot][None])
        for message in self._messages:
            for entry in np.flatnonzero(message.slots == slot).tolist():
                first, offset = int(message.firsts[entry]), int(message.offsets[entry])
                begin = max(start, used, first)
                end = min(stop, first + int(message.counts[entry]))
                if begin < end:
                    pieces.append(message.rows[offset + begin - first : offset + end - first])
        rows = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        assert len(rows) == stop - start, (slot, start, stop)
        return rows

    def mark_used(self, slot: int, stop: int, last: NDArray[np.generic]) -> None:
        """Positions below `stop` of a session were used; `last` [H] is the newest of them."""
        assert self._last is not None
        self._last[slot] = last
        self._used[slot] = stop
        self._tidy()

    def find_view(self, slots: Indices, starts: Indices, counts: Indices) -> FeatureView | None:
        """Where counts[i] rows of the session in slots[i] lie, from position starts[i] on, all [B],
        if one message in a shared-memory channel's memory brought just these: a device can read
        them there. Who looks at them keeps their place from being written over."""
        for message in reversed(self._messages):
            if is_ring_view(message.rows):
                offsets = message.row_indices(slots, starts, counts)
                if offsets is not None:
                    return FeatureView(message.rows, offsets)
        return None

    def copy_rows(
        self, slots: Indices, starts: Indices, counts: Indices, out: NDArray[np.generic]
    ) -> None:
        """Write counts[i] rows of the session in slots[i], from position starts[i] on, into
        out[i]; slots, starts and counts [B], out [B, R, H]. What lies behind them in out[i] is
        some feature of the same session, or what it was."""
        size, most, width = out.shape
        flat = out.reshape(size * most, width)
        for message in reversed(self._messages):
            offsets = message.row_indices(slots, starts, counts)
            if offsets is not None:
                # One pass over its memory; behind its rows a session's last one is repeated.
                within = np.minimum(np.arange(most), counts[:, None] - 1)
                source = (offsets[:, None] + within).reshape(-1)
                np.take(message.rows, source, axis=0, out=flat, mode="clip")
                return
        row_of = np.full(len(self._used), -1, dtype=np.int64)
        row_of[slots] = np.arange(size)
        for message in self._messages:
            rows = row_of[message.slots]
            owners, places = owner_and_offset(np.where(rows >= 0, message.counts, 0))
            into = rows[owners]
            within = message.firsts[owners] + places - starts[into]
            fits = (within >= 0) & (within < counts[into])
            flat[(into * most + within)[fits]] = message.rows[
                (message.offsets[owners] + places)[fits]
            ]
        again = np.flatnonzero(starts < self._used[slots])
        if len(again):
            assert self._last is not None
            flat[again * most] = self._last[slots[again]]

    def mark_batch_used(self, slots: Indices, stops: Indices, last: NDArray[np.generic]) -> None:
        """Positions below stops[i] of the session in slots[i] were used, for all [B]; `last` [B, H]
        are the newest of them."""
        assert self._last is not None
        self._last[slots] = last
        self._used[slots] = stops
        self._tidy()

    def _tidy(self) -> None:
        self._messages = [
            message
            for message in self._messages
            if bool(
                (message.firsts + message.counts > self._used[message.slots])[
                    message.counts > 0
                ].any()
            )
        ]
