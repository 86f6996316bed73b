"""Records statistics and events of finished rounds, and stores their features and prefixes. Used on
the engine thread only.

`RoundReporter` records statistics and events. `RoundStorage` stores features and prefix KV.
Drafters that attach later need the features. Sessions whose prompts begin with the same tokens
reuse the prefix KV. If possible, this work is done while the next round is in flight. Copying
features takes up to 2 ms in a round of 32 sessions. While drafts are awaited, the copy is deferred
until the next round is submitted, or until the stored features are read.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from outrider import timeline
from outrider.errors import MODEL_OUTPUT_INVALID, InternalError, InvalidRequestError
from outrider.wire.messages import FALLBACK, LOOK_AHEAD_HIT, LOOKED_AHEAD, PAUSED, TARGET_ONLY
from outrider_verifier.engine.core import EngineCore
from outrider_verifier.engine.failure_handler import FailureHandler
from outrider_verifier.engine.in_flight_round import InFlightRound
from outrider_verifier.model_runner.batch import VerifyRow
from outrider_verifier.model_runner.interface import DecodeOutput, RunnerOutput
from outrider_verifier.model_runner.results import CommittedRows, PlainRows, RowResult
from outrider_verifier.state.effects import EVENT_FIELDS, RoundReport
from outrider_verifier.state.session import Session, any_keeps_features
from outrider_verifier.state.session_phase import ENDED

logger = logging.getLogger(__name__)

_OWN: Final = object()


@dataclass(slots=True)
class _RoundSums:
    """Sums over the rows of a round, added to the counters once per round."""

    rounds: int = 0
    tokens: int = 0
    fallbacks: int = 0
    paused_rounds: int = 0
    accepted: int = 0
    proposed: int = 0
    used: int = 0
    """Number of proposals that were verified."""
    empty: int = 0
    """Number of proposals without a draft token."""

    def add_to_counters(self, counters: Counter[str]) -> None:
        """Add the sums to the counters; sums of 0 create no counter."""
        for name, count in (
            ("session_rounds", self.rounds),
            ("session_round_tokens", self.tokens),
            ("fallback_rounds", self.fallbacks),
            ("paused_rounds", self.paused_rounds),
            ("accepted_tokens", self.accepted),
            ("proposed_tokens", self.proposed),
            ("proposals_used", self.used),
            ("empty_proposal_rounds", self.empty),
        ):
            if count:
                counters[name] += count


class RoundReporter:
    """Updates the counters, emits the session events and posts the `RoundReport` of each finished
    round."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._reported_at = 0.0
        """Time when the last round was reported, on the clock of `time.perf_counter`."""

    def record_rows(self, rows: Sequence[RowResult]) -> int:
        """Count the results of sessions in a round, emit their events and free the sessions that
        have ended. Sessions with invalid model output or a failed grammar are ended with an error.
        Return the number of emitted tokens."""
        core, booked, emitted = self._core, _RoundSums(), 0
        for settled in rows:
            session, tokens = settled.session, settled.tokens
            if settled.result.invalid_output:
                self._fail_invalid(session)
                continue
            if session.constraint is not None and session.constraint.failure:
                core.fail_session(session, _structure_failed(session.constraint.failure))
                continue
            seen: tuple[int, ...]
            if settled.verify_row is None:
                # The event of a prompt's first token describes no round.
                seen = (0, 0, 0, session.cached_tokens or 0)
            else:
                seen = self._count(settled, settled.verify_row, booked)
            if tokens:
                core.emit_event(session, tokens, settled.reason, settled.result.logprobs, *seen)
            if settled.reason is not None:
                core.counters["finished"] += 1
                core.block_manager.lengths.observe(session.length - session.spec.prompt_len)
                core.free_session(session)
            emitted += len(tokens)
        booked.add_to_counters(core.counters)
        return emitted

    def _fail_invalid(self, session: Session) -> None:
        """Fail a session for which the model gave no finite logit."""
        core = self._core
        if not core.counters["invalid_outputs"]:
            # This is logged once, since with broken weights every request fails like this.
            logger.error(
                "model output invalid: no finite logit; further ones are only counted",
                extra={"session_id": session.session_id, "position": session.length},
            )
        core.counters["invalid_outputs"] += 1
        core.fail_session(session, _output_invalid(session.length))

    def record_plain_rows(self, rows: PlainRows) -> int:
        """Count the results of sessions that continue after a round and need no special treatment
        (see `PlainRows`), and emit their events. Return the number of emitted tokens."""
        if not rows.sessions:
            return 0
        events = np.zeros((EVENT_FIELDS, len(rows)), dtype=np.int64)
        tickets, rounds, counts, _, flags, drafted, accepted = events
        tickets[:] = [session.ticket for session in rows.sessions]
        rounds[:] = [session.round_id for session in rows.sessions]
        counts[:] = rows.counts
        flags[:] = self._flags(rows.sessions)
        if any(rows.draft_nodes):
            drafted[:] = rows.draft_nodes
            np.subtract(counts, 1, out=accepted, where=drafted > 0)
        self._core.outbox.pending_events().add_events(events, rows.tokens)
        _RoundSums(
            rounds=len(rows),
            tokens=len(rows.tokens),
            fallbacks=int(np.count_nonzero(flags & FALLBACK)),
            paused_rounds=int(np.count_nonzero(flags & PAUSED)),
            accepted=int(accepted.sum()),
            proposed=sum(rows.draft_nodes),
        ).add_to_counters(self._core.counters)
        return len(rows.tokens)

    def _flags(self, sessions: Sequence[Session]) -> list[int]:
        """Return the event flags of n sessions. Flags are computed once for consecutive sessions
        with equal state, since neighbours nearly always have the same flags."""
        core, flags, of_all = self._core, 0, list[int]()
        told_by: object = self
        paused, alone = False, False
        for session in sessions:
            speculation_state = session.speculation_state
            by: object = session.spec.drafter_id
            if speculation_state is not None:
                # A workload class has one drafter; all classes of in-process drafts share their
                # flags.
                by = _OWN if speculation_state.is_in_process else speculation_state.workload
            other = by is not told_by and by != told_by
            if (
                other
                or session.is_speculation_off is not paused
                or (session.link_id is None) is not alone
            ):
                told_by, paused, alone = by, session.is_speculation_off, session.link_id is None
                flags = core.policy.decision_flags(session) | core.drafters.attached_flag(session)
                if session.lacks_drafter and session.draft_limit > 0:
                    flags |= FALLBACK
            of_all.append(flags)
        return of_all

    def report_round(self, in_flight: InFlightRound, outcome: RunnerOutput, emitted: int) -> float:
        """Post the `RoundReport` of a round that emitted `emitted` tokens. Return the duration of
        the round in seconds, without the wait before it."""
        messages = {
            id(row.held.proposals): row.held.proposals for row in in_flight.verify if row.held
        }
        drafted_s = max((message.draft_us for message in messages.values()), default=0) / 1e6
        now = time.perf_counter()
        # A round that was submitted early began during the round before it. Its share of the time
        # begins with the report of that round.
        total_s = now - max(in_flight.began, self._reported_at)
        self._reported_at = now
        self._core.counters["rounds"] += 1
        self._core.counters["emitted_tokens"] += emitted
        prefill_tokens = sum(row.num_tokens for row in in_flight.prefill)
        self._core.counters["prefill_tokens"] += prefill_tokens
        self._core.outbox.post_effect(
            RoundReport(
                total_s=total_s,
                forward_s=outcome.forward_s,
                accept_s=outcome.accept_s,
                project_s=outcome.project_s,
                draft_s=outcome.draft_s,
                waited_s=in_flight.waited_s,
                drafted_s=min(drafted_s, in_flight.waited_s),
                rows=outcome.rows,
                verify_rows=len(in_flight.verify),
                prefill_tokens=prefill_tokens,
                emitted=emitted,
                hit_idle_s=in_flight.hit_idle_s,
            )
        )
        return total_s

    def _count(
        self, settled: RowResult, row: VerifyRow, booked: _RoundSums
    ) -> tuple[int, int, int]:
        """Count a verified row. Return the fields of its event: the flags, the number of verified
        nodes, and the number of accepted nodes that were emitted."""
        session, result, tokens = settled.session, settled.result, len(settled.tokens)
        booked.rounds += 1
        booked.tokens += tokens
        booked.paused_rounds += session.is_speculation_off
        flags = self._core.policy.decision_flags(session)
        if result.is_target_only:
            self._core.counters["target_only_rounds"] += 1
            flags |= TARGET_ONLY
        fallback = settled.missed_proposal or (row.in_process_depth > 0 and result.draft_nodes == 0)
        if fallback:
            booked.fallbacks += 1
            flags |= FALLBACK
            if row.in_process_depth:
                self._core.draft_recovery.record_undrafted_round(session)
        proposed = row.nodes if row.drafted else result.draft_nodes
        accepted = settled.accepted
        if proposed:
            booked.accepted += accepted
            booked.proposed += proposed
        booked.used += row.drafted
        # A part of a proposal may have no token that the session's grammar allows.
        booked.empty += row.held is not None and row.held.nodes == 0
        accepted = min(accepted, tokens)
        if (row.drafted or settled.missed_proposal) and session.looks_ahead:
            flags |= LOOKED_AHEAD
            kind = "fresh"
            if fallback:
                kind = "miss"
            if row.held is not None and row.held.is_hit:
                kind, flags = "hit", flags | LOOK_AHEAD_HIT
            self._count_ahead(kind, accepted)
        return flags, proposed, accepted

    def _count_ahead(self, kind: str, accepted: int) -> None:
        counters = self._core.counters
        counters["look_ahead_rounds"] += 1
        counters[f"{kind}_rounds"] += 1
        counters[f"{kind}_accepted_tokens"] += accepted
        timeline.mark_instant(kind)


class RoundStorage:
    """Stores the features and prefix KV of finished rounds, either immediately or after the next
    round was submitted."""

    def __init__(self, core: EngineCore, failing: FailureHandler) -> None:
        self._core, self._failing = core, failing
        self._unkept: list[tuple[list[Session], Exception]] = []
        """Sessions and errors of rounds whose features or prefixes could not be stored."""

    def store_round(
        self,
        in_flight: InFlightRound,
        outcome: RunnerOutput,
        prompts: Sequence[RowResult],
        decoded: CommittedRows,
        *,
        later: bool,
    ) -> None:
        """Store the features and prefixes of a finished round. If `later` is true, this is deferred
        until the next round is submitted or the stored features are read."""
        work, store = partial(self._keep, in_flight, outcome, prompts, decoded), self._core.store
        if later and store is not None:
            store.defer(work)
        else:
            work()
            self.fail_unstored_rounds()

    def run_deferred(self) -> None:
        """Store the rounds whose storage was deferred. Fail the sessions of rounds that could not
        be stored."""
        store = self._core.store
        if store is not None and store.deferred is not None:
            store.run_deferred()
        self.fail_unstored_rounds()

    def fail_unstored_rounds(self) -> None:
        """Fail the sessions of rounds whose features or prefixes could not be stored."""
        while self._unkept:
            self._failing.fail_round(*self._unkept.pop())

    def _keep_features(
        self,
        in_flight: InFlightRound,
        decoded: DecodeOutput,
        prompts: Sequence[RowResult],
        rows: CommittedRows,
    ) -> None:
        """Store features for drafters that attach later. `prompts` are the prompt rows, `rows` the
        committed rows of `decoded`; both may contain sessions that have ended."""
        store = self._core.store
        if store is None:
            return
        block = decoded.block
        # If there is a block, the decode rows have no features of their own.
        for row in (*prompts, *(rows.special if block is None else ())):
            if row.result.features is not None and not row.ends and row.session.phase is not ENDED:
                store.append(row.session.handle, row.result.features)
        if block is not None:
            # Sessions that have ended have no handle and are skipped.
            store.append_each([row.session.handle for row in in_flight.verify], block)
        elif any_keeps_features(rows.plain.sessions):
            features = decoded.features()
            for session, number in zip(rows.plain.sessions, rows.plain.numbers, strict=True):
                mine = features[number]
                if mine is not None and session.phase is not ENDED:
                    store.append(session.handle, mine)

    def _keep(
        self,
        in_flight: InFlightRound,
        outcome: RunnerOutput,
        prompts: Sequence[RowResult],
        decoded: CommittedRows,
    ) -> None:
        # This may be called by a reader of the stored features while it works on sessions, so no
        # session may be ended here.
        began = timeline.now()
        try:
            self._keep_features(in_flight, outcome.decoded, prompts, decoded)
            for row in prompts:
                if row.session.is_prefilled and row.session.phase is not ENDED:
                    self._core.block_manager.store_prefix(row.session)
        except Exception as bug:
            self._unkept.append((in_flight.sessions, bug))
        timeline.mark_span("keep", began, len(in_flight.verify))


def _output_invalid(position: int) -> InternalError:
    return InternalError(
        f"the model gave no finite logit for the token at position {position}: its weights are "
        "damaged, or a number overflowed",
        reason=MODEL_OUTPUT_INVALID,
    )


def _structure_failed(why: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"the structured output cannot go on: {why}", reason="STRUCTURE_FAILED"
    )
