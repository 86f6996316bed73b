"""Buffer of received features, which stay in their messages until a proposer consumes them.

Features are the target's hidden states, projected by the verifier for the EAGLE head. A draft batch
reads its rows directly from the messages. A message is freed once all of its rows are consumed. A
message in the ring of a shared-memory channel that is not fully consumed when the next message
arrives is copied, because the sender needs the space.

Letters in shapes: X session slots; B sessions of a batch; E entries of a message, each for one
session; F feature rows of a message; H feature width.
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
"""Converts a wire tensor to feature rows [F, H] in the proposer's element type. Returns a view if
no conversion is needed."""
_CLOSED: Final = 1 << 62
"""Value of `FeatureBuffer._consumed` for slots whose session needs no features."""


class FeatureView(NamedTuple):
    """Feature rows of one message, and the index of each session's first row among them."""

    rows: NDArray[np.generic]
    """[F, H]: all rows of the message, including those of other sessions."""
    offsets: Indices
    """[B]: index of the first row of each session."""


@dataclass(slots=True, eq=False)
class _FeatureMessage:
    """Feature rows of one message. Entry e owns the counts[e] rows from row offsets[e] on."""

    rows: NDArray[np.generic]
    slots: Indices
    firsts: Indices
    """Position of the first row of each entry in its session."""
    counts: Indices
    offsets: Indices

    def make_private_copy(self) -> None:
        """Copy rows out of the shared-memory ring so that the sender can reuse the space.

        Rows that belong to no entry are not copied.
        """
        if is_ring_view(self.rows):
            owners, places = owner_and_offset(self.counts)
            self.rows = self.rows[self.offsets[owners] + places]
            self.offsets = self.counts.cumsum() - self.counts

    def entries(self, chosen: Indices) -> _FeatureMessage:
        """Return a message with the chosen entries, in that order, over the same rows."""
        return _FeatureMessage(
            self.rows,
            self.slots[chosen],
            self.firsts[chosen],
            self.counts[chosen],
            self.offsets[chosen],
        )

    def first_rows(self, slots: Indices, starts: Indices, counts: Indices) -> Indices | None:
        """Return the index of the first row of the session in slots[i], for all i, [B].

        Returns None unless this message has an entry for every session and the entry covers exactly
        the counts[i] positions from starts[i] on. Entries of other sessions do not matter. All
        arguments are [B].
        """
        at = np.arange(len(slots))
        if len(self.slots) != len(slots) or not bool((self.slots == slots).all()):
            at = np.minimum(self.slots.searchsorted(slots), len(self.slots) - 1)
            if not bool((self.slots[at] == slots).all()):
                return None
        alike = (self.firsts[at] == starts) & (self.counts[at] == counts)
        return self.offsets[at] if bool(alike.all()) else None


class FeatureBuffer:
    """Buffer of received features. A feature is found by its session and position. The features of
    a session are received in order of position, each once."""

    def __init__(self, *, max_sessions: int, width: int, convert: FeatureConverter) -> None:
        self.width = width
        """H, width of a feature."""
        self._convert = convert
        self._consumed = np.full(max_sessions, _CLOSED, dtype=np.int64)
        """[X]: number of consumed positions of each session; `_CLOSED` for slots whose session
        needs no features."""
        self._last_consumed: NDArray[np.generic] | None = None
        """[X, H]: the newest consumed feature of each session, needed when a draft is repeated."""
        self._messages: list[_FeatureMessage] = []

    def __len__(self) -> int:
        return len(self._messages)

    def open_slot(self, slot: int) -> None:
        """Start to collect the features of the new session in this slot."""
        self._consumed[slot] = 0

    def drop_slot(self, slot: int) -> None:
        """Drop the features of the session in this slot and collect none from now on."""
        self._consumed[slot] = _CLOSED
        for message in self._messages:
            message.counts[message.slots == slot] = 0
        self._free_consumed()

    def add_rows(
        self, wire: WireTensor, slots: Indices, firsts: Indices, counts: Indices, offsets: Indices
    ) -> None:
        """Add the rows of a message.

        Entry e has counts[e] rows from row offsets[e] on. They belong to the positions from
        firsts[e] on of the session in slots[e]. The arrays are all [E].
        """
        for message in self._messages:
            message.make_private_copy()
        wanted = (self._consumed[slots] < _CLOSED) & (counts > 0)
        if not bool(wanted.any()):
            return
        rows = self._convert(wire)
        if self._last_consumed is None:
            shape = (len(self._consumed), self.width)
            # This only reserves address space: the system allocates pages when they are written.
            self._last_consumed = np.empty(shape, dtype=rows.dtype)
        # `drop_slot` sets counts to 0, so the message needs its own array.
        message = _FeatureMessage(rows, slots, firsts, counts.copy(), offsets)
        if not bool(wanted.all()):
            message = message.entries(np.flatnonzero(wanted))
        if not bool((slots[1:] > slots[:-1]).all()):
            # `first_rows` searches the slots by bisection.
            message = message.entries(np.argsort(message.slots))
        self._messages.append(message)

    def read_rows(self, slot: int, start: int, stop: int) -> NDArray[np.generic]:
        """Return the features of a session at the positions from `start` to `stop` - 1, [stop -
        start, H].

        The rows must be in the buffer; `start` may be the newest consumed position.
        """
        consumed = int(self._consumed[slot])
        assert consumed - 1 <= start <= stop, (consumed, start, stop)
        pieces: list[NDArray[np.generic]] = []
        if start < consumed:
            assert self._last_consumed is not None
            pieces.append(self._last_consumed[slot][None])
        for message in self._messages:
            for entry in np.flatnonzero(message.slots == slot).tolist():
                first, offset = int(message.firsts[entry]), int(message.offsets[entry])
                begin = max(start, consumed, first)
                end = min(stop, first + int(message.counts[entry]))
                if begin < end:
                    pieces.append(message.rows[offset + begin - first : offset + end - first])
        rows = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        assert len(rows) == stop - start, (slot, start, stop)
        return rows

    def mark_consumed(self, slot: int, stop: int, last: NDArray[np.generic]) -> None:
        """Mark the positions below `stop` of a session as consumed.

        `last` [H]: feature of position `stop` - 1.
        """
        assert self._last_consumed is not None
        self._last_consumed[slot] = last
        self._consumed[slot] = stop
        self._free_consumed()

    def find_view(self, slots: Indices, starts: Indices, counts: Indices) -> FeatureView | None:
        """Return a view of counts[i] rows of the session in slots[i], from position starts[i] on,
        for all i.

        Returns None unless one message in the ring of a shared-memory channel has exactly these
        rows of the sessions. A device can read the rows there. The sender does not overwrite them
        while the view's array is referenced. All arguments are [B].
        """
        for message in reversed(self._messages):
            if is_ring_view(message.rows):
                offsets = message.first_rows(slots, starts, counts)
                if offsets is not None:
                    return FeatureView(message.rows, offsets)
        return None

    def copy_rows(
        self, slots: Indices, starts: Indices, counts: Indices, out: NDArray[np.generic]
    ) -> None:
        """Write counts[i] rows of the session in slots[i], from position starts[i] on, into out[i].

        slots, starts and counts are [B], out is [B, R, H]. The remaining rows of out[i] either
        repeat the session's last row or keep their values.
        """
        size, most, width = out.shape
        flat = out.reshape(size * most, width)
        for message in reversed(self._messages):
            offsets = message.first_rows(slots, starts, counts)
            if offsets is not None:
                # One pass over the output: the remaining rows of a session repeat its last row.
                within = np.minimum(np.arange(most), counts[:, None] - 1)
                source = (offsets[:, None] + within).reshape(-1)
                np.take(message.rows, source, axis=0, out=flat, mode="clip")
                return
        row_of = np.full(len(self._consumed), -1, dtype=np.int64)
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
        again = np.flatnonzero(starts < self._consumed[slots])
        if len(again):
            assert self._last_consumed is not None
            flat[again * most] = self._last_consumed[slots[again]]

    def mark_batch_consumed(
        self, slots: Indices, stops: Indices, last: NDArray[np.generic]
    ) -> None:
        """Mark the positions below stops[i] of the session in slots[i] as consumed, for all i.

        slots and stops are [B]. `last` [B, H]: feature of position stops[i] - 1 of each session.
        """
        assert self._last_consumed is not None
        self._last_consumed[slots] = last
        self._consumed[slots] = stops
        self._free_consumed()

    def _free_consumed(self) -> None:
        """Free the messages whose rows are all consumed."""
        self._messages = [
            message
            for message in self._messages
            if bool(
                (message.firsts + message.counts > self._consumed[message.slots])[
                    message.counts > 0
                ].any()
            )
        ]
