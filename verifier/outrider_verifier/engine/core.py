"""EngineCore holds the state of all sessions and applies commands to it.

It is used on the engine thread only. It has no threads, sockets or clocks: callers pass the time as
an argument, and effects are posted to an `Outbox`. So tests can run it step by step.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import assert_never

from outrider.engine.kv_cache import KVPool
from outrider.engine.logprobs import PathLogprobs
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
from outrider.spec.plan import FEATURE_METHODS, DraftMethod, SpeculationPlan
from outrider.wire.messages import (
    REASON_CODES,
    AttachedDrafter,
    FinishReason,
    SessionSpec,
)
from outrider_verifier.engine.draft_recovery import DraftRecovery
from outrider_verifier.engine.drafter_reassignment import move_session
from outrider_verifier.engine.outbox import Outbox
from outrider_verifier.engine.proposal_intake import ProposalIntake
from outrider_verifier.exchange.drafter_health import DrafterHealth
from outrider_verifier.exchange.feature_store import FeatureStore
from outrider_verifier.exchange.proposal_inbox import ProposalInbox
from outrider_verifier.exchange.session_announcer import SessionAnnouncer
from outrider_verifier.exchange.verdict_builder import VerdictBuilder, may_need_features
from outrider_verifier.kv.block_manager import BlockManager
from outrider_verifier.model_runner.grammar_preparation import start_session_constraint
from outrider_verifier.model_runner.interface import ModelRunner
from outrider_verifier.planner.speculation_policy import SpeculationPolicy
from outrider_verifier.state.commands import (
    CloseSession,
    Command,
    DrafterAttached,
    DrafterDetached,
    ExchangeLink,
    MalformedMessage,
    OpenSession,
    ProposalsReceived,
    ReplicaAnswered,
    SessionsLostByDrafter,
    SetDrafter,
    SetPlan,
    StopEngine,
)
from outrider_verifier.state.effects import (
    CompleteCommand,
    DrafterChanged,
    FailSession,
)
from outrider_verifier.state.session import Session, SessionHandles, check_plan, check_spec
from outrider_verifier.state.session_phase import ENDED

logger = logging.getLogger(__name__)

IN_PROCESS_METHODS = (DraftMethod.EAGLE3,)
"""Draft methods that a verifier with an in-process draft head can run."""


class EngineCore:
    """State of one verifier: its sessions, proposal inbox and announced drafters."""

    def __init__(
        self,
        *,
        pool: KVPool,
        runner: ModelRunner,
        inbox: ProposalInbox,
        verdict_builder: VerdictBuilder,
        store: FeatureStore | None,
        vocab_size: int,
        max_context_len: int,
        max_tree_nodes: int,
        max_sessions: int,
        policy: SpeculationPolicy,
        block_manager: BlockManager,
        counters: Counter[str],
        outbox: Outbox,
        remote_draft_length: Callable[[SessionSpec], int] = lambda _: 0,
    ) -> None:
        """Create a core without sessions.

        `max_sessions` bounds the running and waiting sessions together. `counters` are the metrics
        counts of this verifier. `remote_draft_length` returns the draft length, in tokens, that a
        session would get from a drafter by device exchange, or 0 (see `DeviceExchange`).
        """
        self._pool = pool
        self.runner = runner
        self.inbox = inbox
        self.verdict_builder = verdict_builder
        self.store = store
        self._vocab_size = vocab_size
        self._max_context_len = max_context_len
        self._max_tree_nodes = max_tree_nodes
        self.policy = policy
        self.block_manager = block_manager
        self.outbox = outbox
        """Effects that were posted and not yet passed on."""
        self.remote_draft_length = remote_draft_length
        """Returns the draft length, in tokens, that a session would get by device exchange now; 0
        means that it gets no such drafts."""
        self.sessions: dict[SessionId, Session] = {}
        """Sessions being served, in order of opening."""
        self._handles = SessionHandles(max_sessions)
        self.touched = 0
        """Counter that grows whenever sessions may have changed for a reason other than a round's
        outcome."""
        self.counters = counters
        """Monotonic counts for metrics. Only the engine thread writes them; any thread may read
        them."""
        self.drafters = SessionAnnouncer(
            verdict_builder,
            post=outbox.post_effect,
            sessions=lambda: self.sessions.values(),
            counters=counters,
        )
        self.draft_recovery = DraftRecovery(
            runner,
            block_manager,
            has_remote_drafts=self._has_remote_drafts,
            begin_drafts=self._begin_remote_drafts,
            counters=counters,
        )
        self.incoming = ProposalIntake(
            inbox=inbox,
            verdict_builder=verdict_builder,
            drafters=self.drafters,
            policy=policy,
            of_handle=self._handles.get_owner,
            counters=self.counters,
            post=outbox.post_effect,
        )

    @property
    def num_sessions(self) -> int:
        """Number of sessions being served, including waiting ones."""
        return len(self.sessions)

    @property
    def num_proposals(self) -> int:
        """Number of proposals in the inbox."""
        return len(self.inbox)

    def sessions_of_drafter(self, drafter_id: DrafterId) -> int:
        """Return the number of sessions that this drafter drafts for now, by messages or by device
        exchange."""
        link = self.drafters.link_of(drafter_id)
        if link is None:
            return 0
        return sum(
            s.link_id == link.link_id
            # These drafts come by device exchange.
            or (s.in_process_draft_length > 0 and s.spec.drafter_id == drafter_id)
            for s in list(self.sessions.values())
        )

    def describe_drafter(self, link: ExchangeLink, now: float) -> AttachedDrafter:
        """Return the description of a drafter for routers. Any thread may call this."""
        drafter_health = self.drafters.health_of_drafter(link.drafter_id) or DrafterHealth()
        return AttachedDrafter(
            drafter_id=link.drafter_id,
            incarnation=link.incarnation,
            methods=link.methods,
            sessions=self.sessions_of_drafter(link.drafter_id),
            answer_ms=1000.0 * self.policy.drafter_response_s(link.drafter_id),
            same_host=link.same_host,
            answers=drafter_health.answers,
            proposal_timeouts=drafter_health.missed,
            invalid=drafter_health.invalid,
            silent_ms=1000.0 * drafter_health.silent_s(now),
        )

    # ---- commands ------------------------------------------------------------------------------

    def handle_command(self, command: Command, now: float) -> None:
        """Apply one command. Errors of OpenSession, SetPlan and CloseSession are not raised but
        reported in the command's answer, if the sender awaits one."""
        self.touched += not isinstance(command, ProposalsReceived | MalformedMessage)
        match command:
            case ProposalsReceived():
                self.incoming.take_proposals(command, now)
            case MalformedMessage():
                self.incoming.record_malformed(command, now)
            case SessionsLostByDrafter():
                self.incoming.reannounce_sessions(command, now)
            case OpenSession() | SetPlan() | CloseSession():
                self._answer(command, now)
            case SetDrafter():
                self._set_drafter(command)
            case DrafterAttached(link=link):
                self.policy.reset_drafter(link.drafter_id)
                self.drafters.attach(link)
            case DrafterDetached(link_id=link_id):
                self.drafters.detach(link_id)
            case ReplicaAnswered():
                # The engine loop has already passed this command to the device exchange.
                pass
            case StopEngine():
                self.fail_all_sessions(
                    UnavailableError("the verifier is stopping", reason="STOPPING")
                )
            case _:
                assert_never(command)

    def _answer(self, command: OpenSession | SetPlan | CloseSession, now: float) -> None:
        error: OutriderError | None = None
        try:
            match command:
                case OpenSession():
                    self._open(command, now)
                case SetPlan():
                    self._set_plan(command.session_id, command.plan)
                case CloseSession():
                    self._close(command)
        except OutriderError as refused:
            error = refused
        except Exception as bug:
            logger.exception("command failed", extra={"command": type(command).__name__})
            error = InternalError(f"{type(bug).__name__}: {bug}", reason="COMMAND_FAILED")
        if command.answer is not None:
            self.outbox.post_effect(CompleteCommand(command.answer, error))

    def _open(self, command: OpenSession, now: float) -> None:
        spec = command.spec
        check_spec(
            spec,
            vocab_size=self._vocab_size,
            max_context_len=self._max_context_len,
            max_tree_nodes=self._max_tree_nodes,
        )
        old = self.sessions.get(spec.session_id)
        if old is not None and spec.epoch <= old.spec.epoch:
            raise AlreadyExistsError(
                f"session {spec.session_id} is being served in epoch {old.spec.epoch}",
                reason="SESSION_EXISTS",
            )
        self._check_capacity(old)
        constraint = start_session_constraint(
            spec, command.form, vocab_size=self._vocab_size, token_bytes=command.token_bytes
        )
        if old is not None:
            self._cancel(old)
        in_process_draft = self._in_process_draft(spec, spec.plan)
        keeps = self.store is not None and may_need_features(spec, in_process_draft)
        kv = self._pool.new_sequence()
        session = Session.create(
            spec,
            ticket=command.ticket,
            kv=kv,
            now=now,
            keeps_features=keeps,
            max_blocks=self.block_manager.max_blocks(len(spec.token_ids) + spec.max_new_tokens),
            in_process_draft_length=in_process_draft,
            constraint=constraint,
        )
        self.sessions[spec.session_id] = session
        try:
            self.block_manager.add_session(session)
            self._handles.assign(session)
            self.verdict_builder.follow_session(session)
            self.policy.add_session(session)
            if session.keeps_features and self.store is not None:
                self.store.open(session.handle)
            self.counters["speculation_paused"] += session.is_speculation_off
            if in_process_draft and spec.drafter_id is not None:
                session.has_dropped_features = True
            self.drafters.announce(session)
        except Exception:
            # The session exists from here on, so it has to be freed, its device slot included.
            self.free_session(session, failed=True)
            raise
        self.counters["sessions"] += 1

    def _check_capacity(self, old: Session | None) -> None:
        """Raise ResourceExhaustedError if `max_sessions` sessions, not counting `old`, are being
        served. `old` is the session that the new one replaces, if any; it continues if this
        raises."""
        if len(self.sessions) - int(old is not None) >= self._handles.count:
            raise ResourceExhaustedError(
                f"{self._handles.count} sessions are being served, those that wait included",
                reason="SESSIONS_EXHAUSTED",
            )

    def _in_process_draft(self, spec: SessionSpec, plan: SpeculationPlan) -> int:
        """Return the length, in tokens, of a session's in-process or device-exchange drafts; 0 if
        it gets none."""
        if not plan.is_speculative or plan.method not in IN_PROCESS_METHODS:
            return 0
        if spec.drafter_id is None:
            return self.runner.in_process_draft_length
        return self.remote_draft_length(spec)

    def _draft_length_of(self, session: Session, plan: SpeculationPlan) -> int:
        """Return the length, in tokens, of an open session's in-process or device-exchange drafts
        under `plan`; 0 if it gets none. A session whose in-process drafts were dropped never gets
        them again."""
        dropped = session.drafter_record.has_dropped_drafts
        return 0 if dropped else self._in_process_draft(session.spec, plan)

    def _has_remote_drafts(self, session: Session) -> bool:
        """Return whether the session's drafter can draft for it by device exchange now."""
        drafted = session.spec.drafter_id is not None
        return drafted and self._draft_length_of(session, session.plan) > 0

    def _begin_remote_drafts(self, session: Session) -> None:
        """Switch a session from drafts by messages to drafts by device exchange, unless the planner
        turns speculation off at once."""
        self.touched += 1
        self.drafters.withdraw(session)
        self.inbox.drop_session(session.handle)
        if session.keeps_features:
            self.drop_features(session)
        session.set_in_process_drafts(self._draft_length_of(session, session.plan))
        session.has_stalled_drafter = session.is_speculation_off = False
        self.policy.update_session(session)

    def drop_features(self, session: Session) -> None:
        """Drop the session's stored features, which are needed only by drafters that exchange
        messages. The session must not be announced to a drafter."""
        session.has_dropped_features, session.keeps_features = True, False
        if self.store is not None:
            self.store.close(session.handle)

    def open_remote_drafts(self) -> None:
        """Record that a drafter with device exchange was attached. Its draft KV is empty, so all
        sessions are queued for draft recovery."""
        self.block_manager.forget_draft_kv()
        for session in self.sessions.values():
            self.draft_recovery.add_session(session)

    def forget_remote_drafts(self) -> None:
        """Record that the drafter with device exchange is gone. Its sessions decode plainly until
        another such drafter is attached. They cannot use drafts by messages, because their features
        exist on the GPU only."""
        self.touched += 1
        self.draft_recovery.clear()
        for session in self.sessions.values():
            if session.in_process_draft_length and session.spec.drafter_id is not None:
                session.set_in_process_drafts(0)
                self.policy.update_session(session)

    def _set_drafter(self, command: SetDrafter) -> None:
        session = self.sessions.get(command.session_id)
        if session is None or session.ticket != command.ticket:
            return
        done = move_session(session, command.drafter_id, self.drafters, self.policy)
        session.recheck_blocks()
        self.draft_recovery.add_session(session)
        self.counters["sessions_moved" if done else "moves_refused"] += 1
        self.outbox.post_effect(DrafterChanged(session.ticket, session.spec.drafter_id))

    def _set_plan(self, session_id: SessionId, plan: SpeculationPlan) -> None:
        session = self.sessions.get(session_id)
        if session is None:
            raise NotFoundError(f"no session {session_id}", reason="NO_SESSION")
        check_plan(plan, max_tree_nodes=self._max_tree_nodes)
        needs = plan.is_speculative and plan.method in FEATURE_METHODS
        drafted = session.spec.drafter_id is not None
        if needs and drafted and not (session.keeps_features or session.has_dropped_features):
            raise InvalidRequestError(
                f"session {session_id} was opened for another draft method and has no features",
                reason="NO_FEATURES",
            )
        same_method = plan.method is session.plan.method
        session.change_plan(plan, self._draft_length_of(session, plan))
        session.has_stalled_drafter = False
        lags, session.is_speculation_off = session.is_speculation_off, False
        self.policy.update_session(session)
        self.draft_recovery.add_session(session)
        if lags:
            # The drafter knows only the old plan and missed the rounds without speculation.
            self.drafters.withdraw(session)
            self.drafters.advance_without_speculation(session)
        if session.link_id is None:
            self.drafters.announce(session)
        elif plan.is_speculative and same_method:
            self.drafters.send_plan(session)
        else:
            self.drafters.withdraw(session)
            self.drafters.announce(session)

    def _close(self, command: CloseSession) -> None:
        session = self.sessions.get(command.session_id)
        if session is None:
            return
        if command.ticket is None:
            self._cancel(session)
        elif command.ticket == session.ticket:
            self.counters["cancelled"] += 1
            if session.emitted:
                # Clients usually close a stream because the answer is complete, for example at a
                # stop string.
                self.block_manager.lengths.observe(session.length - session.spec.prompt_len)
            self.free_session(session)

    def _cancel(self, session: Session) -> None:
        self.counters["cancelled"] += 1
        self.emit_event(session, (), FinishReason.CANCELLED)
        self.free_session(session)

    # ---- what rounds and commands share --------------------------------------------------------

    def emit_event(
        self,
        session: Session,
        tokens: tuple[int, ...],
        finish_reason: FinishReason | None,
        logprobs: PathLogprobs | None = None,
        flags: int = 0,
        proposed: int = 0,
        accepted: int = 0,
        cached_tokens: int = 0,
    ) -> None:
        """Add an event of the session to the batch of events that is sent next. `flags`, `proposed`
        and `accepted` describe the round (see `SessionEvents`). `logprobs` may cover more positions
        than `tokens`. `cached_tokens` is 0 unless this is the session's first event."""
        reason = 0 if finish_reason is None else REASON_CODES[finish_reason]
        # In the order of a `SessionEventRow`.
        fields = (
            session.ticket,
            session.round_id,
            len(tokens),
            reason,
            flags | self.drafters.attached_flag(session),
            proposed,
            accepted,
        )
        self.outbox.pending_events().add_event(fields, tokens, logprobs, cached_tokens)

    def free_session(self, session: Session, *, failed: bool = False) -> None:
        """End a session and free its blocks, proposals and features. Unless the session failed, its
        KV is stored in the prefix cache."""
        if not failed:
            self.block_manager.store_prefix(session)
        self.drafters.withdraw(session)
        self.policy.remove_session(session)
        self.sessions.pop(session.session_id, None)
        if session.handle >= 0:
            if self.store is not None:
                self.store.close(session.handle)
            self.inbox.drop_session(session.handle)
            self._handles.release(session)
        session.mark_ended()
        self.touched += 1
        self.block_manager.remove_session(session)

    def fail_session(self, session: Session, error: OutriderError) -> None:
        """End a session's stream with an error and free its resources."""
        self.counters["failed"] += 1
        self.outbox.post_effect(FailSession(session.ticket, error))
        self.free_session(session, failed=True)

    def fail_all_sessions(self, error: OutriderError) -> None:
        """End the streams of all sessions with an error and free their resources."""
        for session in list(self.sessions.values()):
            self.fail_session(session, error)

    def drop_all_sessions(self) -> None:
        """Forget all sessions without freeing their resources. Call this if `fail_all_sessions`
        raised an exception."""
        for session in self.sessions.values():
            if session.phase is not ENDED:
                session.mark_ended()
        self._handles.clear()
        self.touched += 1
        for held in (self.sessions, self.block_manager.running, self.block_manager.waiting):
            held.clear()
