"""Whether and how each session speculates: decided from what its rounds were seen to give (pure).

Sessions of one kind (drafter, draft method and shape, rule, temperature) share what is learnt:
whether drafts beat plain decoding at this load (`spec.contest`), when proposals arrive, how deep
drafts stand. A session whose kind decodes plainly is *paused*: it waits for nothing, its drafter is
told nothing and catches up when it is tried again. Where a head in this process drafts, all its
sessions share one verdict (`spec.own_drafts`), because rounds of both modes together read the
weights twice, and a session that is paused stays so. Times are seconds of one clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

import numpy as np

from outrider.ids import DrafterId
from outrider.spec.contest import Contest, Mode, Reason
from outrider.spec.costs import GAIN, CostTable
from outrider.spec.draft_length import choose_length
from outrider.spec.estimates import ArrivalEstimate, patience_s
from outrider.spec.own_drafts import OwnDrafts
from outrider.wire.accounting import REASON_FLAGS
from outrider.wire.messages import PAUSED
from outrider_verifier.known import Kind, Known, Pace, Tally
from outrider_verifier.sessions import NO_LIMIT, Session
from outrider_verifier.settled import Settled

REVIEW_ROUNDS: Final = 48
"""Rounds after which a kind's draft length is chosen anew."""
HOLD_ROUNDS: Final = 16
"""Rounds without a wait after which a suspect drafter is waited for once more; doubles each time
that this is in vain."""
MAX_HOLD_ROUNDS: Final = 256
MISS_ROUNDS: Final = 4.0
"""Plain rounds that a miss counts as at most when drafts are judged."""
STARVED_ROUNDS: Final = 64
"""Rounds with prompts in a row after which such rounds are judged too: both modes meet them."""
MAX_KINDS: Final = 256
"""Kinds that are remembered; the oldest one without sessions is forgotten."""


class Times(Protocol):
    """What the device takes for a round of so many sessions, with or without own drafts; None: not
    known."""

    def __call__(self, rows: int, *, own: bool) -> float | None: ...


class Policy:
    """Decides for all sessions of a verifier; engine thread only, `summary` by any."""

    def __init__(
        self,
        *,
        automatic: bool,
        ceiling_s: float,
        times: Times = lambda rows, *, own: None,
    ) -> None:
        """`automatic`: False carries plans out as they are. `ceiling_s`: see `patience_s`."""
        self._automatic = automatic
        self._ceiling_s = ceiling_s
        self._times = times
        self.costs = CostTable()
        """Forwards by the shape of their round."""
        self._kinds: dict[Kind, Known] = {}
        self._own: dict[int, OwnDrafts] = {}
        """By load, as `Known.contests`."""
        self._load = 0
        self._round = 0
        self._round_s = 0.0
        """A plain round at this load; 0: not known."""
        self._host_s = 0.0
        """What rounds with drafts take outside the target's forward."""
        self._starved = 0
        self._now = 0.0
        self.changed = False
        """Whether `pauses` or `limit` may answer differently than before; for the caller to
        reset."""

    # ---- sessions ------------------------------------------------------------------------------

    def follow(self, session: Session) -> None:
        """A session begins, or its plan has changed."""
        self.leave(session)
        session.draft_limit = NO_LIMIT
        if not session.plan.speculative:
            return
        known = self._known(Kind.of(session))
        known.sessions += 1
        own = session.own_draft > 0
        session.pace = Pace(known, own, last_at=session.since, hold_after=HOLD_ROUNDS)
        if own and self.pauses(session):
            self.turn(session, paused=True)
        self.changed = self._automatic

    def leave(self, session: Session) -> None:
        """A session ends, or its plan is about to change; idempotent."""
        if session.pace is not None:
            session.pace.known.sessions -= 1
            session.pace = None

    def begin_round(self, sessions: int, now: float) -> None:
        """A round is about to be planned while so many sessions are being served."""
        self._round += 1
        self._now = now
        load = sessions.bit_length()
        if load != self._load:
            self._load, self.changed = load, self._automatic
            estimate = self.costs.estimate(max(1, sessions), 0)
            self._round_s = estimate if estimate > 0.0 else 0.0

    def pauses(self, session: Session) -> bool:
        """Whether the session should decode plainly now, whatever its plan wishes for."""
        pace = session.pace
        if not self._automatic or pace is None:
            return False
        if pace.own:
            return session.paused or self._own_drafts().mode(self._now) is Mode.PLAIN
        return self._contest(pace.known).mode is Mode.PLAIN

    def limit(self, session: Session) -> int:
        """Draft levels of the session that are worth verifying."""
        return NO_LIMIT if session.pace is None else session.pace.known.limit

    def turn(self, session: Session, *, paused: bool) -> None:
        """The session pauses or resumes speculation with its next round."""
        session.paused = paused
        if session.pace is not None:
            session.pace.settled = False
            session.pace.holding = not paused
            if paused and session.pace.own:
                # The head's K/V ends here: its drafts cannot be had again.
                session.own_draft = 0

    def attached(self, drafter_id: DrafterId) -> None:
        """A drafter has connected: what was found of its predecessor's speed is void."""
        self.changed = self._automatic
        for kind, known in self._kinds.items():
            if kind.drafter_id == drafter_id:
                known.contests.clear()
                known.arrival = ArrivalEstimate()

    def answer_s(self) -> float:
        """From a round's end to its proposals, of the slowest drafts in use; 0 while unknown."""
        served = (known.arrival.mean_s for known in self._kinds.values() if known.sessions)
        return max(served, default=0.0)

    # ---- waiting -------------------------------------------------------------------------------

    def patience(self, session: Session) -> float:
        """How long the session's next round waits for a proposal; the plan's bound holds."""
        bound_s = session.plan.patience_ms / 1000.0
        pace = session.pace
        if not self._automatic or pace is None:
            return bound_s
        if pace.holding:
            # A drafter that has to catch up first takes longer than it usually does.
            return min(bound_s, max(self._ceiling_s, 4.0 * self._round_s))
        return min(bound_s, self._fresh(pace.known).patience_s)

    def arrived(self, session: Session, *, prefix_len: int, usable: bool, now: float) -> None:
        """A proposal arrived; `usable`: it is for the session's present prefix."""
        pace = session.pace
        session.suspect = False
        if pace is None or session.paused:
            return
        if usable:
            # The first one after a pause or a miss shows what catching up takes, not drafting.
            if not pace.holding:
                pace.known.arrival.observe(now - session.since)
            pace.holding, pace.hold_after = False, HOLD_ROUNDS
        elif prefix_len == pace.missed_len:
            pace.known.arrival.observe(now - pace.missed_at)
            # It was late: wait for it once, so that plain rounds do not outrun it for good.
            pace.holding = True

    def missed(self, session: Session) -> None:
        """A patience ran out: the session's rounds do not wait until its drafter is heard of, or
        for a number of rounds."""
        session.suspect = True
        pace = session.pace
        if pace is not None:
            pace.missed_len, pace.missed_at = session.length, session.since
            pace.unheard, pace.holding = 0, True

    # ---- what rounds were seen to give ---------------------------------------------------------

    def observe_round(
        self,
        rows: Sequence[Settled],
        *,
        seconds: float,
        forward_s: float,
        prompts: bool,
        now: float,
    ) -> None:
        """A round ended that took `seconds` without waiting, `forward_s` of them for the target's
        forward. Rounds with `prompts` in them say
        nothing of what drafts cost, unless there are no others."""
        self._starved = self._starved + 1 if prompts else 0
        touched: list[Tally] = []
        nodes = decoded = own_rows = own_tokens = 0
        for row in rows:
            session, verified = row.session, row.verified
            if verified is None:
                continue
            decoded += 1
            if verified.drafted:
                nodes += verified.nodes
            elif row.result.drafted:
                own_rows += 1
                own_tokens += len(row.tokens)
            pace = session.pace
            if pace is None:
                continue
            known = pace.known
            spent_s, pace.last_at = now - pace.last_at, now
            if pace.own or session.link_id is None:
                # Without a drafter there was no choice, so nothing is learnt about it.
                continue
            if verified.drafted:
                assert row.result.acceptance is not None
                key = verified.nodes, len(row.result.acceptance.accepted_nodes)
                known.judged[key] = known.judged.get(key, 0) + 1
            elif session.suspect or row.missed:
                absent = row.missed and pace.unheard > 0
                if self._round_s:
                    # One drafter that stops is no reason to leave speculation; misses for ever are.
                    spent_s = min(spent_s, MISS_ROUNDS * self._round_s)
                self._unheard(session, pace)
                if absent:
                    continue
            tally = known.tallies[2 * session.paused + pace.settled]
            if not tally.rows:
                touched.append(tally)
            tally.tokens += len(row.tokens)
            tally.seconds += spent_s
            tally.rows += 1
            pace.settled = True
        if own_rows:
            clean_s = seconds if own_rows == decoded and not prompts else None
            self._judge_own(own_tokens, own_rows, clean_s, now)
        elif decoded and not prompts:
            self._note_costs(decoded, nodes, seconds, forward_s)
        judges = self._automatic and (not prompts or self._starved > STARVED_ROUNDS)
        for tally in touched:
            if judges:
                self._judge(tally)
            tally.clear()

    def _note_costs(self, rows: int, nodes: int, seconds: float, forward_s: float) -> None:
        # Plain rounds tell no drafter: the host's share is no matter of nodes.
        self.costs.observe(rows, nodes, forward_s)
        if nodes:
            self._host_s += GAIN * (max(0.0, seconds - forward_s) - self._host_s)
        else:
            self._round_s += GAIN * (seconds - self._round_s) if self._round_s else seconds

    def _judge(self, tally: Tally) -> None:
        """Let the contest of a kind see what the kind's sessions got."""
        known = tally.known
        contest, share = self._contest(known), 1.0 / max(1, known.sessions)
        before = contest.mode
        contest.observe(
            tally.mode,
            tally.tokens * share,
            tally.seconds * share,
            tally.rows * share,
            settled=tally.settled,
        )
        self.changed = self.changed or contest.mode is not before
        known.review += 1
        if known.review >= REVIEW_ROUNDS and known.kind.top_k == 1:
            known.review = 0
            known.share()
            limit = self._length(known)
            self.changed = self.changed or limit != known.limit
            known.limit = limit

    def _judge_own(self, tokens: int, rows: int, seconds: float | None, now: float) -> None:
        """Let the verdict over own drafts see a round; `seconds`: None if others took part."""
        drafts = self._own_drafts()
        drafts.observe(
            tokens,
            rows,
            seconds,
            plain_s=self._times(rows, own=False),
            own_s=self._times(rows, own=True),
            now=now,
        )
        self.changed = self.changed or (self._automatic and drafts.mode(now) is Mode.PLAIN)

    @staticmethod
    def _unheard(session: Session, pace: Pace) -> None:
        """A round went by that did not wait for a suspect drafter."""
        if not session.suspect:
            return
        pace.unheard += 1
        if pace.unheard >= pace.hold_after:
            # Told of every round, a drafter that is well again needs no more than usual.
            session.suspect, pace.holding, pace.unheard = False, False, 0
            pace.hold_after = min(2 * pace.hold_after, MAX_HOLD_ROUNDS)

    def _length(self, known: Known) -> int:
        """The length of a chain; at least 1, for whether to draft at all is for the contest."""
        rows, longest = max(1, 1 << (self._load - 1)), known.kind.draft_tokens
        length = choose_length(
            known.acceptance.reached(longest),
            lambda lengths: self.costs.estimates(rows, lengths * np.float64(rows)),
            extra_s=known.arrival.mean_s + self._host_s,
            present=min(known.limit, longest),
        )
        return NO_LIMIT if length >= longest else max(1, length)

    # ---- reports -------------------------------------------------------------------------------

    def planned(self, session: Session) -> int:
        """Flags of the mode in force for the session and why; 0 without a choice."""
        if not self._automatic or session.pace is None:
            return 0
        if session.pace.own:
            why = REASON_FLAGS[Reason.FASTER]
        else:
            why = self._fresh(session.pace.known).why
        return why | PAUSED if session.paused else why

    def summary(self) -> str:
        """For each kind of session being served: its mode, why, and what drafts gain; ASCII."""
        return "; ".join(self._summaries())

    def _summaries(self) -> Iterator[str]:
        own = self._own.get(self._load)
        if own is not None:
            yield f"own drafts: {own.mode(self._now)}{_gain(own.gain)}"
        for kind, known in list(self._kinds.items()):
            contest = known.contests.get(self._load)
            if known.sessions and contest is not None:
                yield f"{kind}: {contest.mode} ({contest.reason}{_gain(contest.gain)})"

    @property
    def automatic(self) -> bool:
        """Whether anything is decided here."""
        return self._automatic

    def _fresh(self, known: Known) -> Known:
        """`known` with what rows ask of it looked up for this round."""
        if known.fresh_at != self._round:
            known.fresh_at = self._round
            known.patience_s = patience_s(
                known.arrival, self._round_s, bound_s=math.inf, ceiling_s=self._ceiling_s
            )
            known.why = REASON_FLAGS[self._contest(known).reason]
        return known

    def _known(self, kind: Kind) -> Known:
        known = self._kinds.get(kind)
        if known is None:
            idle = (old for old, kept in self._kinds.items() if not kept.sessions)
            while len(self._kinds) >= MAX_KINDS and (oldest := next(idle, None)) is not None:
                del self._kinds[oldest]
                idle = (old for old, kept in self._kinds.items() if not kept.sessions)
            known = self._kinds[kind] = Known(kind)
        return known

    def _contest(self, known: Known) -> Contest:
        contest = known.contests.get(self._load)
        if contest is None:
            sure = any(other.wins for other in known.contests.values())
            contest = known.contests[self._load] = Contest(sure=sure)
        return contest

    def _own_drafts(self) -> OwnDrafts:
        own = self._own.get(self._load)
        if own is None:
            own = self._own[self._load] = OwnDrafts()
        return own


def _gain(gain: float) -> str:
    return "" if math.isnan(gain) else f", {gain:.2f}x of plain"
