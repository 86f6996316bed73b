"""DraftEngine: turns messages into proposals, without threads, I/O or a clock of its own."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.grammar.grammar_cache import GrammarCache
from outrider.spec.plan import DraftMethod
from outrider.wire.messages import (
    PlanChange,
    SessionEnd,
    SessionsLost,
    SessionStart,
    Verdicts,
    WireTensor,
)
from outrider_drafter.look_ahead.scheduler import LookAheadScheduler
from outrider_drafter.look_ahead.scheduler import OutgoingProposals as OutgoingProposals
from outrider_drafter.metrics import DrafterMetrics
from outrider_drafter.proposers.interface import Proposer, SessionDrafts
from outrider_drafter.server.session_spans import DrafterSpans
from outrider_drafter.state.fair_share import MAX_BATCH_SESSIONS, choose_fairly
from outrider_drafter.state.session import (
    FollowedSession,
    SessionKey,
    VerdictLimits,
    check_announcement,
)
from outrider_drafter.state.session_grammars import SessionConstraints
from outrider_drafter.state.session_table import SessionTable

logger = logging.getLogger(__name__)

_MAX_UNBOOKED = 1024


@dataclass(frozen=True, slots=True)
class ConnectionClosed:
    """Message to the engine that a connection has ended. All sessions of the connection end with
    it."""


SessionMessage = SessionStart | Verdicts | PlanChange | SessionEnd | ConnectionClosed
Sessions = tuple[FollowedSession, ...]


class _ReplyAddresses(NamedTuple):
    """Slots, handles and connections of sessions whose proposals are sent together; arrays [B]."""

    slots: NDArray[np.int64]
    handles: NDArray[np.int64]
    owners: NDArray[np.int64]
    """Connection of each session."""
    connections: list[int]
    """All connections of the sessions, each once."""

    @classmethod
    def of_sessions(cls, sessions: Sequence[FollowedSession]) -> _ReplyAddresses:
        """Return the addresses of these sessions."""
        owners = [session.key.connection for session in sessions]
        return cls(
            slots=np.array([session.slot for session in sessions], dtype=np.int64),
            handles=np.array([session.key.handle for session in sessions], dtype=np.int64),
            owners=np.array(owners, dtype=np.int64),
            connections=list(dict.fromkeys(owners)),
        )


class DraftEngine:
    """Follows sessions and drafts for them. All methods must be called from one thread."""

    def __init__(
        self,
        proposers: Sequence[Proposer],
        *,
        limits: VerdictLimits,
        max_sessions: int,
        metrics: DrafterMetrics,
        now: Callable[[], float] = time.perf_counter,
        on_sessions: Callable[[int], None] = lambda _: None,
        grammars: GrammarCache | None = None,
        in_time: bool = True,
    ) -> None:
        """Create an engine without sessions.

        `proposers`: one proposer for each draft method. `now`: returns the time in seconds.
        `on_sessions` is called with the number of followed sessions whenever that number may have
        changed. `grammars`: compiled grammars of structured outputs, or None to draft without
        grammar masks. `in_time`: whether look-ahead passes are limited to the time until the next
        verdict.
        """
        self._forms = SessionConstraints(grammars, limits)
        self._proposers: Mapping[DraftMethod, Proposer] = {p.method: p for p in proposers}
        self._fed = [p for p in proposers if p.feature_size]
        self._limits = limits
        convert = self._fed[0].convert_features if self._fed else _as_they_are
        self._table = SessionTable(max_sessions, limits, convert)
        self.metrics = metrics
        metrics.init_series(self._proposers)
        self._now = now
        self._on_sessions = on_sessions
        self._lost: list[SessionKey] = []
        """Lost sessions whose verifiers have not been notified yet."""
        self._verdicts = 0
        """Number of received verdicts that are not yet counted in the metrics."""
        self._unbooked: list[Callable[[], None]] = []
        self._batched: tuple[int, bytes] = (-1, b"")
        """Version of the session table and slots of the sessions for which `_batches` was
        computed."""
        self._batches: list[tuple[DraftMethod, Sessions]] = []
        self._addresses: dict[int, tuple[Sequence[FollowedSession], _ReplyAddresses]] = {}
        """Addresses of the batches in `_batches` that were answered as a whole, by object identity
        of the batch."""
        self._ahead = LookAheadScheduler(
            proposers,
            self._table,
            metrics,
            now=now,
            later=lambda write: self._unbooked.append(write),
            failed=self.check_devices,
            in_time=in_time,
        )
        self._spans = DrafterSpans()
        self.device_lost = False
        """Whether a device was found unusable after a failure. No draft can be made any more."""

    @property
    def num_sessions(self) -> int:
        """Number of followed sessions."""
        return len(self._table)

    def sessions_of_connection(self, connection: int) -> list[FollowedSession]:
        """Return the sessions that a verifier has announced on this connection and has not
        ended."""
        return self._table.sessions_of_connection(connection)

    @property
    def is_compiling(self) -> bool:
        """Whether any grammar of a session is still being compiled."""
        return self._forms.is_compiling

    @property
    def has_wanted_drafts(self) -> bool:
        """Whether a session wants a draft, or a verifier must be notified of a lost session."""
        return bool(self._lost) or bool(self._table.wanting.any())

    @property
    def has_look_ahead_work(self) -> bool:
        """Whether there are pending proposals whose outcomes may still be drafted for."""
        return self._ahead.has_work

    @property
    def is_behind(self) -> bool:
        """Whether a session has new tokens or features that no proposer has processed. This work is
        not urgent."""
        return bool(self._table.behind.any())

    @property
    def has_pending_metrics(self) -> bool:
        """Whether `update_metrics` has anything to write."""
        return bool(self._unbooked or self._verdicts)

    def record_poll(self, *, waited: bool) -> None:
        """Record that the thread has just polled for messages, which it handles next. `waited`:
        whether the poll had to wait."""
        self._ahead.pace.record_poll(waited=waited)

    def handle_message(self, connection: int, message: SessionMessage) -> None:
        """Process one message that arrived on a connection. An invalid message from a peer never
        raises an error."""
        match message:
            case Verdicts():
                self._take_in(connection, message)
            case SessionStart():
                self._start(connection, message)
            case PlanChange():
                session = self._find(SessionKey(connection, message.handle))
                if session is not None:
                    session.plan = message.plan
                    self._table.version += 1
                    self._ahead.watch_session(session)
            case SessionEnd():
                self._remove(self._table.get(SessionKey(connection, message.handle)))
            case ConnectionClosed():
                for session in self._table.sessions_of_connection(connection):
                    self._remove(session)
                self._ahead.pace.forget_connection(connection)
        if not isinstance(message, Verdicts):
            self.metrics.sessions.set(len(self._table))
            self._on_sessions(len(self._table))

    def draft_wanted(self) -> Iterator[OutgoingProposals]:
        """Draft for every session that wants a draft. Yields proposals in batches, as soon as they
        are ready.

        Metrics are written later, by `update_metrics`, so that proposals are sent first.
        """
        if len(self._unbooked) >= _MAX_UNBOOKED:
            self.update_metrics()
        if self._lost:
            yield self._losses()
        for method, sessions in self._wanting():
            proposer = self._proposers.get(method)
            if proposer is None:
                yield self._none_of(sessions)
                continue
            yield from self._draft_batch(proposer, sessions)
            self._unbooked.append(partial(self.metrics.batch_sessions.observe, len(sessions)))

    def run_look_ahead(self) -> Generator[OutgoingProposals]:
        """Draft for possible outcomes of pending proposals; call this when no draft is wanted.

        Yields proposals in batches, which may be empty. Close the iterator before processing a
        message, because a message may change the sessions. The next call drafts the remaining
        outcomes.
        """
        if len(self._unbooked) >= _MAX_UNBOOKED:
            self.update_metrics()
        yield from self._ahead.run_look_ahead_pass()

    def _wanting(self) -> Iterable[tuple[DraftMethod, Sessions]]:
        """Return the sessions that want a draft, by method. As long as the sessions and their plans
        do not change, the same tuples are returned, so that values computed from them can be
        reused."""
        table = self._table
        slots = np.flatnonzero(table.wanting)
        if len(slots) > MAX_BATCH_SESSIONS:
            # The remaining sessions keep their request for the next batch.
            owners = [table.session_in(slot).key.connection for slot in slots.tolist()]
            slots = slots[choose_fairly(np.array(owners), table.used_at[slots], MAX_BATCH_SESSIONS)]
        table.wanting[slots] = False
        state = (table.version, slots.tobytes())
        if state != self._batched:
            by_method: dict[DraftMethod, list[FollowedSession]] = {}
            for session in map(table.session_in, slots.tolist()):
                if session.plan.is_speculative:
                    by_method.setdefault(session.plan.method, []).append(session)
            self._batched = state
            self._batches = [(method, tuple(them)) for method, them in by_method.items()]
            self._addresses.clear()
        return self._batches

    def update_metrics(self) -> None:
        """Add the messages received and the drafts made since the last call to the metrics."""
        self.metrics.verdicts.inc(self._verdicts)
        self._verdicts = 0
        unbooked, self._unbooked = self._unbooked, []
        for write in unbooked:
            write()

    def catch_up_session(self) -> None:
        """Let the proposers process the new tokens and features of one session."""
        slot = int(self._table.behind.argmax())
        self._table.behind[slot] = False
        session = self._table.session_in(slot)
        own = self._proposers.get(session.plan.method)
        for proposer in {*self._fed, *([own] if own else [])}:
            try:
                proposer.catch_up([session])
            except Exception:
                logger.exception("catch-up failed", extra={"session_id": session.session_id})
                self.check_devices()
                self._lose(session, "error")
                return

    def check_devices(self) -> None:
        """After a failure, check whether a device has become unusable and set `device_lost`."""
        if self.device_lost or all(proposer.is_usable for proposer in self._proposers.values()):
            return
        self.device_lost = True
        self.metrics.device_losses.inc()
        logger.critical("the device is lost")

    def _draft_batch(self, proposer: Proposer, sessions: Sessions) -> Iterator[OutgoingProposals]:
        started = self._now()
        waiting: Sequence[FollowedSession] = sessions
        only_fed = all(fed is proposer for fed in self._fed)
        try:
            self._forms.assign_grammars(sessions)
            for drafted in proposer.draft_sessions(sessions):
                waiting = _without(waiting, drafted.sessions)
                if not drafted.sessions:
                    continue
                answers = self._answers(drafted, started)
                if only_fed:
                    self._table.behind[self._address(drafted.sessions).slots] = False
                yield answers
        except Exception:
            # State half-way through a batch cannot be trusted: these sessions get no more drafts.
            logger.exception("drafting failed", extra={"sessions": len(sessions)})
            self.check_devices()
            for session in sessions:
                self._lose(session, "error")
        if self._lost:
            yield self._losses()
        if waiting:
            yield self._none_of(waiting)

    def _none_of(self, sessions: Sequence[FollowedSession]) -> OutgoingProposals:
        """Return empty proposals for these sessions, so that their verifier decodes at once without
        waiting for the proposal timeout."""
        no_nodes = np.empty(0, dtype=np.int32)
        nothing = SessionDrafts(
            sessions=sessions,
            node_counts=np.zeros(len(sessions), dtype=np.int64),
            tokens=no_nodes,
            parents=no_nodes,
            logprobs=np.empty(0, dtype=np.float32),
        )
        return self._answers(nothing, self._now())

    def _answers(self, drafted: SessionDrafts, started: float) -> OutgoingProposals:
        seconds = self._now() - started
        sessions, table = drafted.sessions, self._table
        method = sessions[0].plan.method
        self._unbooked.append(
            partial(self.metrics.record_drafts, method, drafted.node_counts, seconds)
        )
        if self._spans.traced:
            counts, now = drafted.node_counts, time.time()
            self._unbooked.append(
                partial(self._spans.record_drafts, sessions, counts, seconds, now)
            )
        if self._ahead.watched:
            self._ahead.start_proposals(drafted, seconds)
        address = self._address(sessions)
        digests, lengths = table.digests[address.slots], table.lengths[address.slots]
        proposals = drafted.proposals(address.handles, digests, lengths, seconds)
        if len(address.connections) == 1:
            return [(address.connections[0], proposals)]
        return [
            (number, proposals.select(np.flatnonzero(address.owners == number)))
            for number in address.connections
        ]

    def _address(self, sessions: Sequence[FollowedSession]) -> _ReplyAddresses:
        """Return the addresses of these sessions, cached by object identity."""
        known = self._addresses.get(id(sessions))
        if known is not None and known[0] is sessions:
            return known[1]
        address = _ReplyAddresses.of_sessions(sessions)
        if any(sessions is them for _, them in self._batches):
            self._addresses[id(sessions)] = (sessions, address)
        return address

    def _losses(self) -> OutgoingProposals:
        lost, self._lost = self._lost, []
        by_connection: dict[int, list[int]] = {}
        for connection, handle in lost:
            by_connection.setdefault(connection, []).append(handle)
        return [(number, SessionsLost(tuple(them))) for number, them in by_connection.items()]

    def _start(self, connection: int, message: SessionStart) -> None:
        key = SessionKey(connection, message.handle)
        if reason := check_announcement(message, self._limits):
            self._ignore(reason, key)
            return
        self._remove(self._table.get(key))
        self._remove(self._table.session_to_evict(connection))
        session = self._table.add_session(connection, message)
        self._forms.request_grammar(session)
        self._ahead.watch_session(session)
        self._spans.start_span(key, message)

    def _take_in(self, connection: int, verdicts: Verdicts) -> None:
        self._verdicts += len(verdicts)
        taken = self._table.apply_verdicts(connection, verdicts)
        if taken.unknown:
            self._ignored("unknown_session", taken.unknown)
        for session, reason in taken.lost:
            self._lose(session, reason)
        if self._ahead.watched:
            self._ahead.advance_sessions(taken.slots)

    def _find(self, key: SessionKey) -> FollowedSession | None:
        session = self._table.get(key)
        if session is None:
            self._ignore("unknown_session", key)
        return session

    def _ignore(self, reason: str, key: SessionKey) -> None:
        logger.debug("message ignored", extra={"handle": key.handle, "reason": reason})
        self._ignored(reason)

    def _ignored(self, reason: str, count: int = 1) -> None:
        self.metrics.ignored_messages.labels(reason).inc(count)

    def _lose(self, session: FollowedSession, reason: str) -> None:
        """Stop drafting for a session that cannot be followed. Its verifier decodes the session
        without drafts from now on."""
        logger.warning("session lost", extra={"session_id": session.session_id, "reason": reason})
        self.metrics.lost_sessions.labels(reason).inc()
        session.lost_reason = reason
        self._lost.append(session.key)
        self._table.forget_session(session)
        self._release(session)

    def _remove(self, session: FollowedSession | None) -> None:
        if session is not None:
            self._table.remove_session(session)
            self._release(session)

    def _release(self, session: FollowedSession) -> None:
        self._ahead.forget_session(session)
        self._spans.end_span(session.key, session.lost_reason)
        for proposer in self._proposers.values():
            proposer.release_session(session)


def _without(
    waiting: Sequence[FollowedSession], drafted: Sequence[FollowedSession]
) -> Sequence[FollowedSession]:
    """Return the sessions of `waiting` that are not in `drafted`."""
    if drafted is waiting:
        return ()
    done = {session.slot for session in drafted}
    return [session for session in waiting if session.slot not in done]


def _as_they_are(wire: WireTensor) -> NDArray[np.generic]:
    return wire.data
