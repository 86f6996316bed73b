"""The state of all sessions and what commands do to it; engine thread only.

Knows nothing of threads, sockets or clocks: times come in as arguments, effects go out through
`post`. That makes it testable step by step.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import assert_never

from outrider.engine.kvcache import KVPool
from outrider.errors import (
    AlreadyExistsError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    OutriderError,
    ResourceExhaustedError,
    UnavailableError,
)
from outrider.ids import DrafterId, SessionId
from outrider.spec.plan import DraftMethod, Plan
from outrider.wire.messages import (
    FinishReason,
    PlanChange,
    SessionEnd,
    SessionEvent,
    SessionSpec,
    VerifierMessage,
)
from outrider_verifier.commands import (
    Attached,
    Close,
    Command,
    Detached,
    Link,
    Offered,
    Open,
    Refused,
    SetPlan,
    Stop,
)
from outrider_verifier.effects import Answer, Effect, Emit, Fail, Post, Tell
from outrider_verifier.engine import RoundRunner
from outrider_verifier.features import FeatureStore
from outrider_verifier.handover import FEATURE_FED, Handover
from outrider_verifier.inbox import Inbox, Offer
from outrider_verifier.policy import Policy
from outrider_verifier.sessions import Session, check_plan, check_spec

logger = logging.getLogger(__name__)

KEEPS_FEATURES = (*FEATURE_FED, DraftMethod.NONE)
"""Plans whose sessions keep features: NONE may become one of the others later."""
OWN_METHODS = (DraftMethod.EAGLE3,)
"""How a verifier with a head of its own drafts."""
_COUNTER_OF = {offer: f"proposals_{offer.value}" for offer in Offer}


class Core:
    """Sessions, inbox and announced drafters of one verifier."""

    def __init__(
        self,
        *,
        pool: KVPool,
        runner: RoundRunner,
        inbox: Inbox,
        handover: Handover,
        store: FeatureStore | None,
        vocab_size: int,
        max_context_len: int,
        max_tree_nodes: int,
        max_sessions: int,
        policy: Policy,
        post: Post,
    ) -> None:
        self._pool = pool
        self._runner = runner
        self.inbox = inbox
        self.handover = handover
        self.store = store
        self._vocab_size = vocab_size
        self._max_context_len = max_context_len
        self._max_tree_nodes = max_tree_nodes
        self._max_sessions = max_sessions
        self.policy = policy
        self._post = post
        self.sessions: dict[SessionId, Session] = {}
        """Sessions being served, in order of opening."""
        self._links: dict[DrafterId, Link] = {}
        self.counters: Counter[str] = Counter()
        """Monotonic counts for metrics; written here, read anywhere."""

    @property
    def num_sessions(self) -> int:
        """Sessions being served."""
        return len(self.sessions)

    @property
    def num_proposals(self) -> int:
        """Proposals in the inbox."""
        return len(self.inbox)

    def sessions_of(self, drafter_id: DrafterId) -> int:
        """Sessions that are announced to this drafter now."""
        link = self._links.get(drafter_id)
        if link is None:
            return 0
        return sum(s.link_id == link.link_id for s in list(self.sessions.values()))

    # ---- commands ------------------------------------------------------------------------------

    def handle(self, command: Command, now: float) -> None:
        """Apply one command. Errors of a command with an answer go there."""
        match command:
            case Offered():
                self._offer(command, now)
            case Refused():
                self._refuse(command)
            case Open() | SetPlan() | Close():
                self._answer(command, now)
            case Attached(link=link):
                self._attach(link)
            case Detached(link_id=link_id):
                self._detach(link_id)
            case Stop():
                self.fail_all(UnavailableError("the verifier is stopping", reason="STOPPING"))
            case _:
                assert_never(command)

    def _answer(self, command: Open | SetPlan | Close, now: float) -> None:
        error: OutriderError | None = None
        try:
            match command:
                case Open():
                    self._open(command.spec, command.ticket, now)
                case SetPlan():
                    self._set_plan(command.session_id, command.plan)
                case Close():
                    self._close(command)
        except OutriderError as refused:
            error = refused
        except Exception as bug:
            logger.exception("command failed", extra={"command": type(command).__name__})
            error = InternalError(f"{type(bug).__name__}: {bug}", reason="COMMAND_FAILED")
        if command.answer is not None:
            self._post(Answer(command.answer, error))

    def _open(self, spec: SessionSpec, ticket: int, now: float) -> None:
        check_spec(
            spec,
            vocab_size=self._vocab_size,
            max_context_len=self._max_context_len,
            max_tree_nodes=self._max_tree_nodes,
        )
        old = self.sessions.get(spec.session_id)
        if old is not None:
            if spec.epoch <= old.spec.epoch:
                raise AlreadyExistsError(
                    f"session {spec.session_id} is being served in epoch {old.spec.epoch}",
                    reason="SESSION_EXISTS",
                )
            self._cancel(old)
        if len(self.sessions) >= self._max_sessions:
            raise ResourceExhaustedError(
                f"{self._max_sessions} sessions are being served", reason="SESSIONS_EXHAUSTED"
            )
        keeps = (
            self.store is not None
            and spec.drafter_id is not None
            and spec.plan.method in KEEPS_FEATURES
        )
        slack = max(self._max_tree_nodes, self._runner.extra_slots)
        kv = self._pool.allocate(len(spec.token_ids) + spec.max_new_tokens + slack)
        try:
            session = Session.create(spec, ticket=ticket, kv=kv, now=now, keeps_features=keeps)
            session.own_draft = self._own_draft(spec, spec.plan)
            if keeps and self.store is not None:
                self.store.open(spec.session_id, session.max_len)
            self._runner.open(session)
        except Exception:
            if self.store is not None:
                self.store.close(spec.session_id)
            kv.release()
            raise
        self.sessions[spec.session_id] = session
        self.counters["sessions"] += 1
        self.policy.follow(session)
        self._announce(session)

    def _own_draft(self, spec: SessionSpec, plan: Plan) -> int:
        """Length of the drafts that this process makes for a session; 0: it makes none."""
        own = spec.drafter_id is None and plan.speculative and plan.method in OWN_METHODS
        return self._runner.drafts_itself if own else 0

    def _set_plan(self, session_id: SessionId, plan: Plan) -> None:
        session = self.sessions.get(session_id)
        if session is None:
            raise NotFoundError(f"no session {session_id}", reason="NO_SESSION")
        check_plan(plan, max_tree_nodes=self._max_tree_nodes)
        needs = plan.speculative and plan.method in FEATURE_FED
        if needs and session.spec.drafter_id is not None and not session.keeps_features:
            raise InvalidRequestError(
                f"session {session_id} was opened for another draft method and has no features",
                reason="NO_FEATURES",
            )
        same_method = plan.method is session.plan.method
        session.plan = plan
        session.own_draft = self._own_draft(session.spec, plan)
        session.suspect = False
        self.policy.follow(session)
        if session.paused:
            # Its drafter was told of the old plan and lags behind: it starts anew.
            session.paused = False
            self._withdraw(session)
        if session.link_id is None:
            self._announce(session)
        elif plan.speculative and same_method:
            self.tell(session, PlanChange(session_id=session_id, plan=plan))
        else:
            self._withdraw(session)
            self._announce(session)

    def _close(self, command: Close) -> None:
        session = self.sessions.get(command.session_id)
        if session is None:
            return
        if command.ticket is None:
            self._cancel(session)
        elif command.ticket == session.ticket:
            self.counters["cancelled"] += 1
            self.free(session)

    def _cancel(self, session: Session) -> None:
        self.counters["cancelled"] += 1
        self.emit(session, (), FinishReason.CANCELLED)
        self.free(session)

    def _offer(self, command: Offered, now: float) -> None:
        proposal = command.proposal
        session = self.sessions.get(proposal.session_id)
        if session is None:
            self.counters["proposals_unknown"] += 1
            return
        result = self.inbox.offer(proposal, digest=session.digest, prefix_len=session.length)
        self.counters[_COUNTER_OF[result]] += 1
        usable = proposal.prefix_digest == session.digest
        self.policy.arrived(session, prefix_len=proposal.prefix_len, usable=usable, now=now)
        if usable:
            session.proposal_at = now

    def _refuse(self, command: Refused) -> None:
        session = self.sessions.get(command.session_id)
        if session is not None:
            session.suspect = True

    def _attach(self, link: Link) -> None:
        self.counters["attached"] += 1
        self._links[link.drafter_id] = link
        self.policy.attached(link.drafter_id)
        for session in self.sessions.values():
            if session.spec.drafter_id == link.drafter_id:
                self.handover.forget(session)
                session.link_id = None
                self._announce(session)

    def _detach(self, link_id: int) -> None:
        for drafter_id, link in list(self._links.items()):
            if link.link_id == link_id:
                del self._links[drafter_id]
        for session in self.sessions.values():
            if session.link_id == link_id:
                session.link_id = None
                self.handover.forget(session)

    def _announce(self, session: Session) -> None:
        """Hand the session to its drafter if that is attached and can serve it."""
        drafter_id = session.spec.drafter_id
        link = self._links.get(drafter_id) if drafter_id is not None else None
        if link is None or not self.handover.can_announce(session, link):
            return
        session.link_id = link.link_id
        session.suspect = False
        for message in self.handover.announce(session, link):
            self.tell(session, message)

    def _withdraw(self, session: Session) -> None:
        if session.link_id is not None:
            self.tell(session, SessionEnd(session_id=session.session_id))
            session.link_id = None
        self.handover.forget(session)

    def pause(self, session: Session) -> None:
        """Have a session decode plainly; its drafter is told nothing until `resume`."""
        self.policy.turn(session, paused=True)
        self.counters["speculation_paused"] += 1

    def resume(self, session: Session, now: float) -> None:
        """Let a paused session speculate again; no round with it may be in flight."""
        self.policy.turn(session, paused=False)
        self.counters["speculation_resumed"] += 1
        if session.link_id is None:
            return
        if not self.handover.can_catch_up(session):
            self._withdraw(session)
            return
        # Its drafter hears of the root now, so the wait for it begins now.
        session.since = now
        for message in self.handover.catch_up(session):
            self.tell(session, message)

    # ---- what rounds and commands share --------------------------------------------------------

    def emit(
        self,
        session: Session,
        tokens: tuple[int, ...],
        finish_reason: FinishReason | None,
    ) -> None:
        """Yield an event from the session's stream."""
        event = SessionEvent(
            session_id=session.session_id,
            epoch=session.spec.epoch,
            round_id=session.round_id,
            tokens=tokens,
            finish_reason=finish_reason,
            stats=session.stats,
            drafter_attached=session.spec.drafter_id in self._links,
        )
        self.post(Emit(session.ticket, event))

    def tell(self, session: Session, message: VerifierMessage) -> None:
        """Send a message to the session's drafter."""
        assert session.link_id is not None, session.session_id
        self.post(Tell(session.link_id, message))

    def post(self, effect: Effect) -> None:
        """Hand an effect to the asyncio thread."""
        self._post(effect)

    def free(self, session: Session) -> None:
        """Forget a session and give back its blocks, proposals and features."""
        self._withdraw(session)
        self.policy.leave(session)
        self.sessions.pop(session.session_id, None)
        self.inbox.drop_session(session.session_id)
        if self.store is not None:
            self.store.close(session.session_id)
        session.kv.release()
        session.ended = True
        self._runner.close(session)

    def fail(self, session: Session, error: OutriderError) -> None:
        """End a session's stream by an error and free all it holds."""
        self.counters["failed"] += 1
        self.post(Fail(session.ticket, error))
        self.free(session)

    def fail_all(self, error: OutriderError) -> None:
        """Fail every session."""
        for session in list(self.sessions.values()):
            self.fail(session, error)
