"""SessionTable: all followed sessions as arrays, to which verdict messages are applied.

It also records which sessions each connection announced, and their handles. Letters in shapes: X
session slots; S entries of a message, each for one session; T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.spec.digest import EMPTY_DIGEST, extend_ragged
from outrider.wire.messages import FeatureRows, SessionStart, Verdicts, WireTensor
from outrider.wire.rounds import is_last_occurrence, owner_and_offset
from outrider_drafter.state.feature_buffer import FeatureBuffer, FeatureConverter
from outrider_drafter.state.session import FollowedSession, SessionKey, TokenRow, VerdictLimits

Indices = NDArray[np.int64]


@dataclass(slots=True, eq=False)
class ConnectionSessions:
    """Sessions that one connection announced."""

    slots: Indices = field(default_factory=lambda: np.full(64, -1, dtype=np.int64))
    """Session slot of each handle, which is the index in this array; -1 if the handle has no
    session."""
    count: int = 0

    def find_slots(self, handles: Indices) -> Indices:
        """Return the slot of each handle, or -1 if no session has this handle. Handles may be any
        numbers >= 0."""
        known = handles < len(self.slots)
        return np.where(known, self.slots[np.where(known, handles, 0)], -1)

    def set_slot(self, handle: int, slot: int) -> None:
        """Record the slot of a new session by its handle."""
        if handle >= len(self.slots):
            grown = np.full(max(handle + 1, 2 * len(self.slots)), -1, dtype=np.int64)
            grown[: len(self.slots)] = self.slots
            self.slots = grown
        self.slots[handle] = slot
        self.count += 1


LOSS_REASONS: Final = (
    "",
    "repeated",
    "token_gap",
    "too_long",
    "token_range",
    "token_conflict",
    "digest",
    "feature_shape",
    "feature_gap",
    "feature_range",
)
"""Reasons why a session cannot be followed any more; a reason's number is its index. If several
apply, the first one that was detected is reported."""


class AppliedVerdicts(NamedTuple):
    """Result of applying a message of verdicts."""

    slots: Indices
    """Slots of the sessions to which the message was applied."""
    lost: list[tuple[FollowedSession, str]]
    """Sessions whose entry was invalid, each with the reason from `LOSS_REASONS`."""
    unknown: int
    """Number of entries for unknown sessions."""


class SessionTable:
    """Table of at most `max_sessions` followed sessions. Every array has one element or row for
    each session slot.

    When all slots are taken, the connection with the most sessions loses its least recently used
    session. A verifier therefore cannot displace sessions of verifiers with fewer sessions.
    """

    def __init__(self, max_sessions: int, limits: VerdictLimits, convert: FeatureConverter) -> None:
        """Create a table without sessions. `convert`: converts received features to the proposer's
        element type."""
        self._limits = limits
        self._sessions: list[FollowedSession | None] = [None] * max_sessions
        self._free = list(range(max_sessions - 1, -1, -1))
        self._connections: dict[int, ConnectionSessions] = {}
        self._ticks = 0
        self.used_at = np.zeros(max_sessions, dtype=np.int64)
        """[X]: number of the message in which each session was mentioned last; messages are counted
        from 1."""
        self.features = FeatureBuffer(
            max_sessions=max_sessions, width=limits.feature_size, convert=convert
        )
        # This only reserves address space: the system allocates pages when they are written.
        self.tokens = np.empty((max_sessions, limits.max_context), dtype=np.int32)
        """int32 [X, max_context]: tokens of each session, valid up to `lengths`."""
        self.lengths = np.zeros(max_sessions, dtype=np.int64)
        """[X]: number of known tokens."""
        self.digests = np.zeros(max_sessions, dtype=np.uint64)
        self.feature_ends = np.zeros(max_sessions, dtype=np.int64)
        """[X]: number of positions whose feature was received."""
        self.max_lens = np.zeros(max_sessions, dtype=np.int64)
        self.followed = np.zeros(max_sessions, dtype=np.bool_)
        """[X]: whether the slot holds a session that is followed; False for free slots and lost
        sessions."""
        self.wanting = np.zeros(max_sessions, dtype=np.bool_)
        """[X]: whether the verifier waits for a draft for the session's current prefix."""
        self.behind = np.zeros(max_sessions, dtype=np.bool_)
        """[X]: whether there are new tokens or features that no proposer has processed."""
        self.version = 0
        """Number that increases whenever a session or its plan is added, changed or removed."""

    def __len__(self) -> int:
        return len(self._sessions) - len(self._free)

    def draft_levels_left(self, slots: Indices) -> Indices:
        """Return the maximum number of draft levels of these sessions; see
        `FollowedSession.draft_levels_left`."""
        found: Indices = self.max_lens[slots] - self.lengths[slots] - 1
        return found

    def session_in(self, slot: int) -> FollowedSession:
        """Return the session in a slot, which must not be free."""
        session = self._sessions[slot]
        assert session is not None, slot
        return session

    def get(self, key: SessionKey) -> FollowedSession | None:
        """Return the session with this key, or None if it is unknown."""
        connection = self._connections.get(key.connection)
        if connection is None or key.handle >= len(connection.slots):
            return None
        slot = int(connection.slots[key.handle])
        return None if slot < 0 else self._sessions[slot]

    def session_to_evict(self, connection: int) -> FollowedSession | None:
        """Return the session that must be removed before a connection can have another session, or
        None if a slot is free."""
        if self._free:
            return None
        mine = self._connections.get(connection)
        most, at_most = connection, 0 if mine is None else mine.count
        for number, other in self._connections.items():
            if other.count > at_most:
                most, at_most = number, other.count
        slots = self._connections[most].slots
        held = slots[slots >= 0]
        return self.session_in(int(held[self.used_at[held].argmin()]))

    def add_session(self, connection: int, start: SessionStart) -> FollowedSession:
        """Add an announced session. A slot must be free, and the handle must not be in use."""
        self.version += 1
        slot = self._free.pop()
        session = FollowedSession(
            key=SessionKey(connection, start.handle),
            session_id=start.session_id,
            table=self,
            slot=slot,
            plan=start.plan,
            sampling=start.sampling,
            max_len=start.max_len,
            prompt_len=start.prompt_len,
            structured_output=start.structured_output,
            stop_token_ids=start.stop_token_ids,
            token_limits=start.token_limits,
            tokens=TokenRow(self, slot),
        )
        self._sessions[slot] = session
        self._connections.setdefault(connection, ConnectionSessions()).set_slot(start.handle, slot)
        self.lengths[slot] = self.feature_ends[slot] = 0
        self.digests[slot] = EMPTY_DIGEST
        self.max_lens[slot] = start.max_len
        self.followed[slot] = True
        self.wanting[slot] = self.behind[slot] = False
        self._touch(np.array([slot]))
        self.features.open_slot(slot)
        return session

    def forget_session(self, session: FollowedSession) -> None:
        """Stop following a session. Its slot stays taken, and its verdicts are ignored from now
        on."""
        self.version += 1
        slot = session.slot
        self.followed[slot] = self.wanting[slot] = self.behind[slot] = False
        self.features.drop_slot(slot)

    def remove_session(self, session: FollowedSession) -> None:
        """Remove a session and free its slot. The session must be the one in that slot."""
        assert self._sessions[session.slot] is session
        self.forget_session(session)
        connection = self._connections[session.key.connection]
        connection.slots[session.key.handle] = -1
        connection.count -= 1
        if not connection.count:
            del self._connections[session.key.connection]
        self._sessions[session.slot] = None
        self._free.append(session.slot)

    def sessions_of_connection(self, connection: int) -> list[FollowedSession]:
        """Return the sessions that a connection announced."""
        found = self._connections.get(connection)
        if found is None:
            return []
        return [self.session_in(slot) for slot in found.slots[found.slots >= 0].tolist()]

    def apply_verdicts(self, connection: int, verdicts: Verdicts) -> AppliedVerdicts:
        """Apply a message of verdicts. Invalid entries are not applied and make their sessions
        lost.

        A repeated verdict with the same contents is valid; a gap or a contradiction is invalid.
        """
        found = self._connections.get(connection)
        if found is None:
            return AppliedVerdicts(np.empty(0, dtype=np.int64), [], len(verdicts))
        slots = found.find_slots(verdicts.handles)
        if self.take_in_whole(verdicts, slots):
            return AppliedVerdicts(slots, [], 0)
        self._touch(slots[slots >= 0])
        entries = np.flatnonzero(self.followed[slots] & (slots >= 0))
        step = _CheckedVerdicts.check_message(self, verdicts, slots, entries, self._limits)
        good = step.reasons == 0
        self._apply(verdicts, step, good)
        lost = {
            int(slot): LOSS_REASONS[reason]
            for slot, reason in zip(
                step.slots[~good].tolist(), step.reasons[~good].tolist(), strict=True
            )
        }
        return AppliedVerdicts(
            slots=step.slots[good],
            lost=[(self.session_in(slot), reason) for slot, reason in lost.items()],
            unknown=int(np.count_nonzero(slots < 0)),
        )

    def take_in_whole(self, verdicts: Verdicts, slots: Indices) -> bool:
        """Apply a message in one step if every entry is valid and repeats no earlier verdict, as in
        nearly all messages. Return whether the message was applied; if not, nothing has changed,
        and the caller checks the entries one by one."""
        starts, counts, tokens = verdicts.starts, verdicts.token_counts, verdicts.tokens
        if int(slots.min()) < 0 or not bool(self.followed[slots].all()):
            return False
        ends = starts + counts
        if not bool(((starts == self.lengths[slots]) & (ends <= self.max_lens[slots])).all()):
            return False
        # One comparison for both bounds.
        if bool((tokens.astype(np.uint32) >= self._limits.vocab_size).any()):
            return False
        if not bool(is_last_occurrence(slots).all()) or not self._features_follow(
            verdicts, slots, ends
        ):
            return False
        digests = extend_ragged(self.digests[slots], counts, tokens)
        if not bool((digests == verdicts.digests).all()):
            return False
        self._touch(slots)
        self._put_tokens(slots, starts, counts, tokens)
        self.lengths[slots], self.digests[slots] = ends, digests
        if verdicts.features is not None and self._limits.feature_size:
            rows, firsts = verdicts.feature_counts, verdicts.feature_starts
            wire = WireTensor(dtype=verdicts.features.dtype, data=verdicts.features.joined())
            self.features.add_rows(wire, slots, firsts, rows, verdicts.first_rows())
            self.feature_ends[slots] = firsts + rows
        told = verdicts.draft_wanted | (counts > 0)
        self.wanting[slots[told]] = verdicts.draft_wanted[told]
        self.behind[slots] = True
        return True

    def _features_follow(self, verdicts: Verdicts, slots: Indices, ends: Indices) -> bool:
        """Return whether the message has no features, or the features of every entry start where
        the received features of the session end."""
        if verdicts.features is None or not self._limits.feature_size:
            return True
        firsts = verdicts.feature_starts
        last = ends - verdicts.draft_wanted
        follow = (firsts == self.feature_ends[slots]) & (firsts + verdicts.feature_counts <= last)
        return verdicts.features.width == self.features.width and bool(follow.all())

    def _put_tokens(
        self, slots: Indices, starts: Indices, counts: Indices, tokens: NDArray[np.int32]
    ) -> None:
        """Write the next counts[i] of `tokens` to the session in slots[i], from position starts[i]
        on, for all i."""
        flat = self.tokens.reshape(-1)
        firsts = slots * self.tokens.shape[1] + starts - (counts.cumsum() - counts)
        flat[firsts.repeat(counts) + np.arange(len(tokens))] = tokens

    def _touch(self, slots: Indices) -> None:
        self._ticks += 1
        self.used_at[slots] = self._ticks

    def _apply(self, verdicts: Verdicts, step: _CheckedVerdicts, good: NDArray[np.bool_]) -> None:
        slots, fresh = step.slots[good], step.fresh[good]
        chosen = good[step.token_owners] & step.token_fresh
        owners = step.token_owners[chosen]
        self.tokens[step.slots[owners], step.token_places[chosen]] = step.tokens[chosen]
        self.lengths[slots] += fresh
        self.digests[slots] = step.digests[good]
        if verdicts.features is not None and step.takes_features:
            rows = step.feature_rows[good]
            wire = WireTensor(dtype=verdicts.features.dtype, data=verdicts.features.joined())
            firsts = self.feature_ends[slots]
            self.features.add_rows(wire, slots, firsts, rows, step.feature_offsets[good])
            self.feature_ends[slots] = firsts + rows
        wanted = step.draft_wanted[good]
        told = wanted | (fresh > 0)
        self.wanting[slots[told]] = wanted[told]
        self.behind[slots] = True


@dataclass(slots=True, eq=False)
class _CheckedVerdicts:
    """Checked contents of a message: the new tokens and features of each entry, and the reasons for
    invalid entries. Columns have one element per entry for a followed session."""

    slots: Indices
    reasons: Indices
    fresh: Indices
    """Number of new tokens."""
    digests: NDArray[np.uint64]
    """Prefix digest after the new tokens."""
    draft_wanted: NDArray[np.bool_]
    tokens: NDArray[np.int32]
    """[T]: tokens of these entries."""
    token_owners: Indices
    """[T]: index of the entry that each token belongs to."""
    token_places: Indices
    """[T]: position of each token in the session."""
    token_fresh: NDArray[np.bool_]
    takes_features: bool
    feature_rows: Indices
    """Number of new feature rows."""
    feature_offsets: Indices
    """Index of the first new feature row in the message."""

    @classmethod
    def check_message(
        cls,
        table: SessionTable,
        verdicts: Verdicts,
        all_slots: Indices,
        entries: Indices,
        limits: VerdictLimits,
    ) -> _CheckedVerdicts:
        """Check a message against the table; see `LOSS_REASONS`."""
        slots = all_slots[entries]
        starts, counts = verdicts.starts[entries], verdicts.token_counts[entries]
        owners, within = owner_and_offset(counts)
        begins = (np.cumsum(verdicts.token_counts) - verdicts.token_counts)[entries]
        step = cls(
            slots=slots,
            reasons=np.zeros(len(entries), dtype=np.int64),
            fresh=np.zeros(len(entries), dtype=np.int64),
            digests=table.digests[slots],
            draft_wanted=verdicts.draft_wanted[entries],
            tokens=verdicts.tokens[begins[owners] + within],
            token_owners=owners,
            token_places=starts[owners] + within,
            token_fresh=np.zeros(len(owners), dtype=np.bool_),
            takes_features=bool(limits.feature_size),
            feature_rows=np.zeros(len(entries), dtype=np.int64),
            feature_offsets=np.zeros(len(entries), dtype=np.int64),
        )
        step._bound(table, starts, counts, limits)
        step._follow(table, starts, counts, verdicts.digests[entries])
        if verdicts.features is not None and limits.feature_size:
            wishes = verdicts.draft_wanted[entries]
            step._take_features(table, verdicts, verdicts.features, entries, wishes)
        return step

    def _refuse(self, bad: NDArray[np.bool_], reason: str) -> None:
        self.reasons[bad & (self.reasons == 0)] = LOSS_REASONS.index(reason)

    def _owned_by(self, tokens: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return which entries own at least one of the marked tokens."""
        found = np.zeros(len(self.slots), dtype=np.bool_)
        found[self.token_owners[tokens]] = True
        return found

    def _bound(
        self, table: SessionTable, starts: Indices, counts: Indices, limits: VerdictLimits
    ) -> None:
        """Check the ranges of lengths and token ids, and that no session has two entries."""
        if not bool(is_last_occurrence(self.slots).all()):
            again = self.slots[~is_last_occurrence(self.slots)]
            self._refuse(np.isin(self.slots, again), "repeated")
        self._refuse(starts > table.lengths[self.slots], "token_gap")
        self._refuse(starts + counts > table.max_lens[self.slots], "too_long")
        outside = (self.tokens < 0) | (self.tokens >= limits.vocab_size)
        self._refuse(self._owned_by(outside), "token_range")

    def _follow(
        self,
        table: SessionTable,
        starts: Indices,
        counts: Indices,
        digests: NDArray[np.uint64],
    ) -> None:
        """Separate new tokens from repeated ones, and check the repeated tokens and the digests.
        Entries that were found invalid before count as empty."""
        good = self.reasons == 0
        overlap = np.where(good, table.lengths[self.slots] - starts, 0)
        self.fresh = np.where(good, np.maximum(counts - overlap, 0), 0)
        owners = self.token_owners
        told_before = self.token_places < table.lengths[self.slots[owners]]
        self.token_fresh = ~told_before & good[owners]
        repeated = told_before & good[owners]
        if bool(repeated.any()):
            known = table.tokens[self.slots[owners[repeated]], self.token_places[repeated]]
            differs = repeated.copy()
            differs[repeated] = known != self.tokens[repeated]
            self._refuse(self._owned_by(differs), "token_conflict")
        self.digests = extend_ragged(self.digests, self.fresh, self.tokens[self.token_fresh])
        whole = counts >= overlap
        self._refuse(whole & (self.digests != digests), "digest")
        self.draft_wanted = self.draft_wanted & whole

    def _take_features(
        self,
        table: SessionTable,
        verdicts: Verdicts,
        features: FeatureRows,
        entries: Indices,
        wishes: NDArray[np.bool_],
    ) -> None:
        rows, firsts = verdicts.feature_counts[entries], verdicts.feature_starts[entries]
        some, ends = rows > 0, table.feature_ends[self.slots]
        last = table.lengths[self.slots] + self.fresh - wishes
        self._refuse(some & (features.width != table.features.width), "feature_shape")
        self._refuse(some & (firsts > ends), "feature_gap")
        self._refuse(some & (firsts + rows > last), "feature_range")
        skipped = np.minimum(np.maximum(ends - firsts, 0), rows)
        offsets = verdicts.first_rows()[entries]
        self.feature_rows = rows - skipped
        self.feature_offsets = offsets + skipped
