"""What a settled round is worth: statistics, events, features that are kept (engine thread only).

None of it is waited for: it is done while the next round is on its way, if there can be one.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from outrider import timeline
from outrider.errors import MODEL_OUTPUT_INVALID, InternalError, InvalidRequestError
from outrider.wire.messages import FALLBACK, HIT, LOOKED_AHEAD, PAUSED, TARGET_ONLY
from outrider_verifier.engine.core import Core
from outrider_verifier.engine.in_flight_round import InFlight
from outrider_verifier.model_runner.batch import VerifyRow
from outrider_verifier.model_runner.interface import Decoded, RoundOutcome
from outrider_verifier.model_runner.results import Alike, Committed, Settled
from outrider_verifier.state.effects import EVENT_FIELDS, RoundReport
from outrider_verifier.state.session import Session, keep_features

logger = logging.getLogger(__name__)

_OWN: Final = object()
_NO_ROUND: Final = (0, 0, 0)
"""What is told of a prompt's first token."""


@dataclass(slots=True)
class _Booked:
    """Sums over rows, entered into the counters once a round."""

    rounds: int = 0
    tokens: int = 0
    fallbacks: int = 0
    paused: int = 0
    accepted: int = 0
    proposed: int = 0
    used: int = 0
    """Proposals."""
    stood_in: int = 0
    stood_in_accepted: int = 0
    """Rounds in which the session's own text was looked up, and what of it stood."""

    def enter(self, counters: Counter[str]) -> None:
        """Add to the counters; what was never counted is not in them."""
        for name, count in (
            ("session_rounds", self.rounds),
            ("session_round_tokens", self.tokens),
            ("fallback_rounds", self.fallbacks),
            ("paused_rounds", self.paused),
            ("accepted_tokens", self.accepted),
            ("proposed_tokens", self.proposed),
            ("proposals_used", self.used),
            ("stand_in_rounds", self.stood_in),
            ("stand_in_accepted_tokens", self.stood_in_accepted),
        ):
            if count:
                counters[name] += count


class Accounts:
    """Keeps the books of the rounds over a core's sessions."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._reported_at = 0.0
        """When the last round was reported, on the clock of `time.perf_counter`."""

    def follow_up(self, rows: Sequence[Settled]) -> int:
        """Count, emit; finish the sessions whose end that was. Returns the tokens emitted."""
        core, booked, emitted = self._core, _Booked(), 0
        for settled in rows:
            session, tokens = settled.session, settled.tokens
            if settled.result.invalid_output:
                self._fail_invalid(session)
                continue
            if session.constraint is not None and session.constraint.failed:
                core.fail(session, _structure_failed(session.constraint.failed))
                continue
            if settled.verified is None:
                seen = _NO_ROUND
            else:
                seen = self._count(settled, settled.verified, booked)
            if tokens:
                core.emit(session, tokens, settled.reason, settled.result.logprobs, *seen)
            if settled.reason is not None:
                core.counters["finished"] += 1
                core.room.lengths.observe(session.length - session.spec.prompt_len)
                core.free(session)
            emitted += len(tokens)
        booked.enter(core.counters)
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
        core.fail(session, _output_invalid(session.length))

    def follow_up_alike(self, rows: Alike) -> int:
        """The same for rows that are alike."""
        if not rows.sessions:
            return 0
        events = np.zeros((EVENT_FIELDS, len(rows)), dtype=np.int64)
        tickets, rounds, counts, _, flags, drafted, accepted = events
        tickets[:] = [session.ticket for session in rows.sessions]
        rounds[:] = [session.round_id for session in rows.sessions]
        counts[:] = rows.counts
        flags[:] = self._flags(rows.sessions)
        if any(rows.drafted):
            drafted[:] = rows.drafted
            np.subtract(counts, 1, out=accepted, where=drafted > 0)
        self._core.events().add_all(events, rows.tokens)
        _Booked(
            rounds=len(rows),
            tokens=len(rows.tokens),
            fallbacks=int(np.count_nonzero(flags & FALLBACK)),
            paused=int(np.count_nonzero(flags & PAUSED)),
            accepted=int(accepted.sum()),
            proposed=sum(rows.drafted),
        ).enter(self._core.counters)
        return len(rows.tokens)

    def _flags(self, sessions: Sequence[Session]) -> list[int]:
        """[n]: of their events. Neighbours have the same, nearly always."""
        core, flags, of_all = self._core, 0, list[int]()
        told_by: object = self
        paused, alone = False, False
        for session in sessions:
            pace = session.pace
            by: object = session.spec.drafter_id
            if pace is not None:
                # A kind has one drafter; of own drafts of all kinds the same is said.
                by = _OWN if pace.own else pace.known
            other = by is not told_by and by != told_by
            if other or session.paused is not paused or (session.link_id is None) is not alone:
                told_by, paused, alone = by, session.paused, session.link_id is None
                flags = core.policy.planned(session) | core.drafters.attached_flag(session)
                if session.lacks_drafter and session.draft_limit > 0:
                    flags |= FALLBACK
            of_all.append(flags)
        return of_all

    def keep_features(
        self, flying: InFlight, decoded: Decoded, prompts: Sequence[Settled], rows: Committed
    ) -> None:
        """For drafters that must be caught up some day. `prompts`, `rows`: of the prompts and of
        `decoded`, whoever has ended left out or not."""
        store = self._core.store
        if store is None:
            return
        block = decoded.block
        # With a block the rows that decode have none of their own.
        for row in (*prompts, *(rows.apart if block is None else ())):
            if row.result.features is not None and not row.ends and not row.session.ended:
                store.append(row.session.handle, row.result.features)
        if block is not None:
            # A session that has ended has no handle.
            store.append_each([row.session.handle for row in flying.verify], block)
        elif keep_features(rows.alike.sessions):
            features = decoded.features()
            for session, number in zip(rows.alike.sessions, rows.alike.numbers, strict=True):
                mine = features[number]
                if mine is not None and not session.ended:
                    store.append(session.handle, mine)

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

    def _count(self, settled: Settled, row: VerifyRow, booked: _Booked) -> tuple[int, int, int]:
        """What is told of the row's round: flags of its event, nodes verified, nodes that stand
        and reached the stream."""
        session, result, tokens = settled.session, settled.result, len(settled.tokens)
        booked.rounds += 1
        booked.tokens += tokens
        booked.paused += session.paused
        flags = self._core.policy.planned(session)
        if result.target_only:
            self._core.counters["target_only_rounds"] += 1
            flags |= TARGET_ONLY
        fallback = settled.missed or (row.own_depth > 0 and result.drafted == 0)
        if fallback:
            booked.fallbacks += 1
            flags |= FALLBACK
        proposed = row.nodes if row.drafted else result.drafted
        accepted = settled.accepted
        if proposed:
            booked.accepted += accepted
            booked.proposed += proposed
        if row.drafted:
            booked.used += not row.stand_in
            booked.stood_in += row.stand_in
            booked.stood_in_accepted += accepted * row.stand_in
        accepted = min(accepted, tokens)
        if (row.drafted or settled.missed) and session.looks_ahead and not row.stand_in:
            flags |= LOOKED_AHEAD
            kind = "fresh"
            if fallback:
                kind = "miss"
            if row.held is not None and row.held.ahead:
                kind, flags = "hit", flags | HIT
            self._count_ahead(kind, accepted)
        return flags, proposed, accepted

    def _count_ahead(self, kind: str, accepted: int) -> None:
        counters = self._core.counters
        counters["look_ahead_rounds"] += 1
        counters[f"{kind}_rounds"] += 1
        counters[f"{kind}_accepted_tokens"] += accepted
        timeline.instant(kind)


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
