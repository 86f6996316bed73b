"""What a settled round is worth: statistics, events, features that are kept (engine thread only).

None of it is waited for: it is done while the next round is on its way, if there can be one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from outrider import trace
from outrider.errors import InvalidRequestError
from outrider.wire.accounting import add_round
from outrider_verifier.core import Core
from outrider_verifier.effects import RoundReport
from outrider_verifier.flying import InFlight
from outrider_verifier.packing import VerifyRow
from outrider_verifier.runner import RoundOutcome
from outrider_verifier.settled import Settled


class Accounts:
    """Keeps the books of the rounds over a core's sessions."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._reported_at = 0.0
        """When the last round was reported, on the clock of `time.perf_counter`."""

    def follow_up(self, settled: Settled) -> int:
        """Count, emit; finish the session if that was its end. Returns the tokens emitted."""
        session, tokens = settled.session, settled.tokens
        if session.constraint is not None and session.constraint.failed:
            self._core.fail(session, _structure_failed(session.constraint.failed))
            return 0
        if settled.verified is not None:
            self._count(settled, settled.verified)
        if tokens:
            self._core.emit(session, tokens, settled.reason, settled.result.logprobs)
        if settled.reason is not None:
            self._core.counters["finished"] += 1
            self._core.room.lengths.observe(session.length - session.spec.prompt_len)
            self._core.free(session)
        return len(tokens)

    def keep_features(self, settled: Sequence[Settled]) -> None:
        """For drafters that must be caught up some day."""
        store = self._core.store
        if store is None:
            return
        for row in settled:
            if row.reason is None and not row.session.ended and row.result.features is not None:
                store.append(row.session.session_id, row.result.features)

    def report(self, flying: InFlight, outcome: RoundOutcome, emitted: int) -> float:
        """Post what the round took; returns its seconds, without waiting."""
        messages = {id(row.held.proposals): row.held.proposals for row in flying.verify if row.held}
        drafted_s = max((message.draft_us for message in messages.values()), default=0) / 1e6
        now = time.perf_counter()
        # A round that ran ahead began while the one before it was in flight: its share of the
        # time is what passed since that one was settled.
        total_s = now - max(flying.began, self._reported_at)
        self._reported_at = now
        self._core.counters["rounds"] += 1
        self._core.counters["emitted_tokens"] += emitted
        prefill_tokens = sum(row.num_tokens for row in flying.prefill)
        self._core.counters["prefill_tokens"] += prefill_tokens
        self._core.post(
            RoundReport(
                total_s=total_s,
                forward_s=outcome.forward_s,
                accept_s=outcome.accept_s,
                project_s=outcome.project_s,
                draft_s=outcome.draft_s,
                waited_s=flying.waited_s,
                drafted_s=min(drafted_s, flying.waited_s),
                rows=outcome.rows,
                verify_rows=len(flying.verify),
                prefill_tokens=prefill_tokens,
                emitted=emitted,
                hit_idle_s=flying.hit_idle_s,
            )
        )
        return total_s

    def _count(self, settled: Settled, row: VerifyRow) -> None:
        session, result, acceptance = settled.session, settled.result, settled.result.acceptance
        assert acceptance is not None
        proposed = row.nodes if row.drafted else result.drafted
        accepted_len = len(acceptance.accepted_nodes)
        fallback = settled.missed or (row.own_depth > 0 and result.drafted == 0)
        looked_ahead = session.looks_ahead and (row.drafted or settled.missed)
        hit = looked_ahead and row.held is not None and row.held.ahead
        counters = self._core.counters
        counters["session_rounds"] += 1
        counters["session_round_tokens"] += len(settled.tokens)
        counters["target_only_rounds"] += int(acceptance.used_target_only_fallback)
        if fallback:
            counters["fallback_rounds"] += 1
        if session.paused:
            counters["paused_rounds"] += 1
        if proposed:
            counters["accepted_tokens"] += accepted_len
            counters["proposed_tokens"] += proposed
        if row.drafted:
            counters["proposals_used"] += 1
        accepted_len = min(accepted_len, len(settled.tokens))
        if looked_ahead:
            counters["look_ahead_rounds"] += 1
            kind = "hit" if hit else "miss" if fallback else "fresh"
            counters[f"{kind}_rounds"] += 1
            trace.instant(kind)
            counters[f"{kind}_accepted_tokens"] += accepted_len
        session.stats = add_round(
            session.stats,
            proposed=proposed,
            accepted_len=accepted_len,
            emitted=len(settled.tokens),
            fallback=fallback,
            target_only=acceptance.used_target_only_fallback,
            planned=self._core.policy.planned(session),
            looked_ahead=looked_ahead,
            hit=hit,
        )


def _structure_failed(why: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"the structured output cannot go on: {why}", reason="STRUCTURE_FAILED"
    )
