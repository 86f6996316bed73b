"""Messages in, proposals out: the drafter without threads, clocks of its own, or I/O."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from outrider.spec.plan import DraftMethod
from outrider.spec.tree import DraftTree
from outrider.wire.messages import (
    PlanChange,
    Proposal,
    Proposals,
    SessionEnd,
    SessionStart,
    Verdict,
    Verdicts,
)
from outrider_drafter.growth import Draft
from outrider_drafter.metrics import Metrics
from outrider_drafter.sessions import (
    Limits,
    Session,
    SessionKey,
    SessionTable,
    apply_step,
    check_verdict,
    open_session,
)
from outrider_drafter.source import Drafted, DraftSource

logger = logging.getLogger(__name__)

NO_DRAFT = Draft(
    tree=DraftTree(np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.float32)), law=None
)
"""Sent when there is nothing to propose, so that the row decodes plainly without any patience."""
_MAX_UNBOOKED = 1024


@dataclass(frozen=True, slots=True)
class ConnectionClosed:
    """A connection ended: its sessions are gone."""


SessionMessage = SessionStart | Verdicts | PlanChange | SessionEnd | ConnectionClosed
Answers = list[tuple[int, Proposals]]
"""(connection, proposals): what goes out together."""


class DraftEngine:
    """Follows sessions and drafts for them. Every method is called from one thread."""

    def __init__(
        self,
        sources: Sequence[DraftSource],
        *,
        limits: Limits,
        max_sessions: int,
        metrics: Metrics,
        now: Callable[[], float] = time.perf_counter,
        on_sessions: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`on_sessions` is told how many sessions are followed whenever that may have changed."""
        self._sources: Mapping[DraftMethod, DraftSource] = {s.method: s for s in sources}
        self._fed = [s for s in sources if s.feature_size]
        self._limits = limits
        self._table = SessionTable(max_sessions)
        self.metrics = metrics
        self._now = now
        self._on_sessions = on_sessions
        self._wanting: dict[SessionKey, Session] = {}
        self._behind: dict[SessionKey, Session] = {}
        """Sessions with news that no source has taken in."""
        self._verdicts = 0
        """Verdicts that are not in the metrics yet."""
        self._unbooked: list[Callable[[], None]] = []
        self.device_lost = False
        """Whether a device was found not to work after a failure; no draft can follow."""

    @property
    def num_sessions(self) -> int:
        """Sessions followed now."""
        return len(self._table)

    @property
    def wants_drafting(self) -> bool:
        """Whether a draft is wanted."""
        return bool(self._wanting)

    @property
    def is_behind(self) -> bool:
        """Whether there is catch-up work that nobody waits for."""
        return bool(self._behind)

    @property
    def has_unbooked(self) -> bool:
        """Whether `book` has something to do."""
        return bool(self._unbooked or self._verdicts)

    def handle(self, connection: int, message: SessionMessage) -> None:
        """Take in one message. Never raises for anything that a peer may have sent."""
        match message:
            case Verdicts():
                for verdict in message.entries():
                    self._verdict(SessionKey(connection, verdict.handle), verdict)
            case SessionStart():
                self._start(connection, message)
            case PlanChange():
                session = self._find(SessionKey(connection, message.handle))
                if session is not None:
                    session.plan = message.plan
            case SessionEnd():
                self._forget(self._table.remove(SessionKey(connection, message.handle)))
            case ConnectionClosed():
                for session in self._table.of_connection(connection):
                    self._forget(self._table.remove(session.key))
        if not isinstance(message, Verdicts):
            self.metrics.sessions.set(len(self._table))
            self._on_sessions(len(self._table))

    def draft(self) -> Iterator[Answers]:
        """Draft for every session that wants it; yields the proposals that are ready together.

        What the metrics are to know of it waits for `book`: each proposal leaves first.
        """
        if len(self._unbooked) >= _MAX_UNBOOKED:
            self.book()
        wanting, self._wanting = self._wanting, {}
        by_method: dict[DraftMethod, list[Session]] = {}
        for session in wanting.values():
            session.wants_draft = False
            by_method.setdefault(session.plan.method, []).append(session)
        for method, sessions in by_method.items():
            source = self._sources.get(method)
            if source is None:
                yield self._none_of(sessions)
                continue
            yield from self._draft_batch(source, sessions)
            self._unbooked.append(partial(self.metrics.batch_sessions.observe, len(sessions)))

    def book(self) -> None:
        """Write into the metrics what was received and drafted since the last time."""
        self.metrics.verdicts.inc(self._verdicts)
        self._verdicts = 0
        unbooked, self._unbooked = self._unbooked, []
        for write in unbooked:
            write()

    def catch_up(self) -> None:
        """Let the sources take in the news of one session."""
        key, session = next(iter(self._behind.items()))
        del self._behind[key]
        own = self._sources.get(session.plan.method)
        for source in {*self._fed, *([own] if own else [])}:
            try:
                source.catch_up([session])
            except Exception:
                logger.exception("catch-up failed", extra={"session": session.session_id})
                self.check_devices()
                self._lose(session, "error")
                return

    def check_devices(self) -> None:
        """After a failure: note whether a device is the reason."""
        if self.device_lost or all(source.usable for source in self._sources.values()):
            return
        self.device_lost = True
        self.metrics.device_losses.inc()
        logger.critical("the device is lost")

    def _draft_batch(self, source: DraftSource, sessions: Sequence[Session]) -> Iterator[Answers]:
        started = self._now()
        waiting = {session.key: session for session in sessions}
        only_fed = all(fed is source for fed in self._fed)
        try:
            for drafted in source.drafts(sessions):
                for session, _ in drafted:
                    del waiting[session.key]
                    if only_fed:
                        self._behind.pop(session.key, None)
                if drafted:
                    yield self._answers(drafted, started)
        except Exception:
            # State half-way through a batch cannot be trusted: these sessions decode plainly.
            logger.exception("drafting failed", extra={"sessions": len(sessions)})
            self.check_devices()
            for session in sessions:
                self._lose(session, "error")
        if waiting:
            yield self._none_of(waiting.values())

    def _none_of(self, sessions: Iterable[Session]) -> Answers:
        """Say at once that nothing comes."""
        return self._answers([(session, NO_DRAFT) for session in sessions], self._now())

    def _answers(self, drafted: Drafted, started: float) -> Answers:
        seconds = self._now() - started
        by_connection: dict[int, list[Proposal]] = {}
        for session, draft in drafted:
            method = session.plan.method
            self._unbooked.append(partial(self._book_answer, method, len(draft.tree), seconds))
            proposal = Proposal(
                handle=session.key.handle,
                prefix_digest=session.digest,
                prefix_len=len(session.tokens),
                tree=draft.tree,
                law=draft.law,
            )
            by_connection.setdefault(session.key.connection, []).append(proposal)
        spent = int(seconds * 1e6)
        return [
            (connection, Proposals.of(proposals, draft_us=spent))
            for connection, proposals in by_connection.items()
        ]

    def _book_answer(self, method: DraftMethod, nodes: int, seconds: float) -> None:
        if nodes:
            self.metrics.proposal(method, nodes, seconds)
        else:
            self.metrics.no_proposal.labels(method).inc()

    def _start(self, connection: int, message: SessionStart) -> None:
        session = open_session(connection, message, self._limits)
        if isinstance(session, str):
            self._ignore(session, SessionKey(connection, message.handle))
            return
        for gone in self._table.add(session):
            self._forget(gone)

    def _verdict(self, key: SessionKey, verdict: Verdict) -> None:
        self._verdicts += 1
        session = self._find(key)
        if session is None or session.lost:
            return
        step = check_verdict(session, verdict, self._limits)
        if isinstance(step, str):
            self._lose(session, step)
            return
        apply_step(session, step)
        self._behind[key] = session
        if session.wants_draft and session.plan.speculative:
            self._wanting[key] = session
        else:
            self._wanting.pop(key, None)

    def _find(self, key: SessionKey) -> Session | None:
        session = self._table.get(key)
        if session is None:
            self._ignore("unknown_session", key)
        return session

    def _ignore(self, reason: str, key: SessionKey) -> None:
        logger.debug("message ignored", extra={"handle": key.handle, "reason": reason})
        self.metrics.ignored_messages.labels(reason).inc()

    def _lose(self, session: Session, reason: str) -> None:
        """Stop drafting a session that cannot be followed; it decodes plainly from here on."""
        logger.warning("session lost", extra={"session": session.session_id, "reason": reason})
        self.metrics.lost_sessions.labels(reason).inc()
        session.lost = reason
        self._forget(session)

    def _forget(self, session: Session | None) -> None:
        if session is None:
            return
        self._wanting.pop(session.key, None)
        self._behind.pop(session.key, None)
        session.pending.clear()
        for source in self._sources.values():
            source.release(session)
