"""Accounts for finished rounds, and stores what others may need of them; engine thread only.

`RoundReporter` records statistics and events, `RoundStorage` features and prefix KV. Features
serve drafters that attach later, prefixes serve sessions whose prompts begin alike. No round waits
for this: it is done while the next round is in flight, if there can be one. Copying features takes
up to 2 ms in a round of 32 sessions; while drafts are waited for, the copy is deferred until the
next round is submitted, or until the stored features are read.
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
_NO_ROUND: Final = (0, 0, 0)
"""What is told of a prompt's first token."""


@dataclass(slots=True)
class _RoundSums:
    """Sums over rows, entered into the counters once a round."""

    rounds: int = 0
    tokens: int = 0
    fallbacks: int = 0
    paused_rounds: int = 0
    accepted: int = 0
    proposed: int = 0
    used: int = 0
    """Proposals."""

    def add_to_counters(self, counters: Counter[str]) -> None:
        """Add to the counters; what was never counted is not in them."""
        for name, count in (
            ("session_rounds", self.rounds),
            ("session_round_tokens", self.tokens),
            ("fallback_rounds", self.fallbacks),
            ("paused_rounds", self.paused_rounds),
            ("accepted_tokens", self.accepted),
            ("proposed_tokens", self.proposed),
            ("proposals_used", self.used),
        ):
            if count:
                counters[name] += count


class RoundReporter:
    """Accounts for finished rounds: counters, session events, `RoundReport`s."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._reported_at = 0.0
        """When the last round was reported, on the clock of `time.perf_counter`."""

    def record_rows(self, rows: Sequence[RowResult]) -> int:
        """Count, emit; finish the sessions whose end that was. Returns the tokens emitted."""
        core, booked, emitted = self._core, _RoundSums(), 0
        for settled in rows:
            session, tokens = settled.session, settled.tokens
            if settled.result.invalid_output:
                self._fail_invalid(session)
                continue
            if session.constraint is not None and session.constraint.failure:
                core.fail_session(session, _structure_failed(session.constraint.failure))
                continue
            if settled.verify_row is None:
                seen = _NO_ROUND
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
        """End a session for which the model gave no finite logit."""
        core = self._core
        if not core.counters["invalid_outputs"]:
            # Once: with broken weights every request fails so.
            logger.error(
                "model output invalid: no finite logit; further ones are only counted",
                extra={"session_id": session.session_id, "position": session.length},
            )
        core.counters["invalid_outputs"] += 1
        core.fail_session(session, _output_invalid(session.length))

    def record_plain_rows(self, rows: PlainRows) -> int:
        """The same for rows that are alike."""
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
        """[n]: of their events. Neighbours have the same, nearly always."""
        core, flags, of_all = self._core, 0, list[int]()
        told_by: object = self
        paused, alone = False, False
        for session in sessions:
            speculation_state = session.speculation_state
            by: object = session.spec.drafter_id
            if speculation_state is not None:
                # A kind has one drafter; of in-process drafts of all kinds the same is said.
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
        """Post what the round took; returns its seconds, without waiting."""
        messages = {
            id(row.held.proposals): row.held.proposals for row in in_flight.verify if row.held
        }
        drafted_s = max((message.draft_us for message in messages.values()), default=0) / 1e6
        now = time.perf_counter()
        # A round that ran ahead began while the one before it was in flight: its share of the
        # time is what passed since that one was settled.
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
        """What is told of the row's round: flags of its event, nodes verified, accepted nodes
        and reached the stream."""
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
    """Stores features and prefixes of finished rounds, at once or deferred."""

    def __init__(self, core: EngineCore, failing: FailureHandler) -> None:
        self._core, self._failing = core, failing
        self._unkept: list[tuple[list[Session], Exception]] = []
        """Rounds of which something could not be kept."""

    def store_round(
        self,
        in_flight: InFlightRound,
        outcome: RunnerOutput,
        prompts: Sequence[RowResult],
        decoded: CommittedRows,
        *,
        later: bool,
    ) -> None:
        """Keep what there is of a settled round; `later`: something is waited for meanwhile."""
        work, store = partial(self._keep, in_flight, outcome, prompts, decoded), self._core.store
        if later and store is not None:
            store.defer(work)
        else:
            work()
            self.fail_unstored_rounds()

    def run_deferred(self) -> None:
        """Do what was left."""
        store = self._core.store
        if store is not None and store.deferred is not None:
            store.run_deferred()
        self.fail_unstored_rounds()

    def fail_unstored_rounds(self) -> None:
        """End the sessions of rounds of which something could not be kept."""
        while self._unkept:
            self._failing.fail_round(*self._unkept.pop())

    def _keep_features(
        self,
        in_flight: InFlightRound,
        decoded: DecodeOutput,
        prompts: Sequence[RowResult],
        rows: CommittedRows,
    ) -> None:
        """For drafters that must be caught up some day. `prompts`, `rows`: of the prompts and of
        `decoded`, whoever has ended left out or not."""
        store = self._core.store
        if store is None:
            return
        block = decoded.block
        # With a block the rows that decode have none of their own.
        for row in (*prompts, *(rows.special if block is None else ())):
            if row.result.features is not None and not row.ends and row.session.phase is not ENDED:
                store.append(row.session.handle, row.result.features)
        if block is not None:
            # A session that has ended has no handle.
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
        # Whoever looks at what is kept may have called this, in the middle of what they do with
        # sessions: nobody is ended here.
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
