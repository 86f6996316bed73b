"""Whether and how each session speculates: decided from what its rounds were seen to give (pure).

Sessions of one kind (drafter, draft method and shape, rule, temperature) share what is learnt:
whether drafts beat plain decoding at this load (`spec.contest`), when proposals arrive, how deep
drafts stand. A session whose kind decodes plainly is *paused*: it waits for nothing, its drafter is
told nothing and catches up when it is tried again. Where a head in this process drafts, all its
sessions share one verdict (`spec.own_drafts`), because rounds of both modes together read the
weights twice, and a session that is paused stays so. What prompts add to rounds is left out: both
modes meet them, by chance sooner or later. Times are seconds of one clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from outrider.ids import DrafterId
from outrider.spec.contest import Contest, Mode, Reason, Seen
from outrider.spec.costs import GAIN, CostTable
from outrider.spec.draft_length import choose_length
from outrider.spec.estimates import ArrivalEstimate, patience_s
from outrider.wire.accounting import REASON_FLAGS
from outrider.wire.messages import PAUSED
from outrider_verifier.known import Kind, Known, Pace, Tally, begun_contest
from outrider_verifier.loads import Loads, Times
from outrider_verifier.own_verdicts import MAX_KINDS, OwnVerdicts
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
MOST_ALONE: Final = 0.5
"""Share of a row's time that rounds of nothing but prompts may have taken for it to count."""
STARVED_ROUNDS: Final = 16
"""Rounds in a row that did not count after which such ones do: both modes meet prompts."""


class Policy:
    """Decides for all sessions of a verifier; engine thread only, `summary` by any."""

    def __init__(
        self,
        *,
        automatic: bool,
        ceiling_s: float,
        times: Times = lambda rows, *, own, pieces=0: None,
        piece_tokens: int = 1,
    ) -> None:
        """`automatic`: False carries plans out as they are. `ceiling_s`: see `patience_s`.
        `piece_tokens`: prompt tokens of a piece, as `times` counts them."""
        self._automatic = automatic
        self._ceiling_s = ceiling_s
        self._times = times
        self.costs = CostTable()
        """Forwards by the shape of their round."""
        self._kinds: dict[Kind, Known] = {}
        self._loads = Loads(times, self.costs)
        self._own = OwnVerdicts(self._loads)
        self._piece_tokens = piece_tokens
        self._round = 0
        self._round_s = 0.0
        """A plain round at this load; 0: not known."""
        self._host_s = 0.0
        """What rounds with drafts take outside the target's forward."""
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
        session.pace = Pace(known, own, hold_after=HOLD_ROUNDS)
        if own:
            self._own.follow(known.kind)
            if self.pauses(session):
                self.turn(session, paused=True)
        elif known.sessions == 1 and known.contests:
            self._contest(known).forgive()
        self.changed = self._automatic

    def leave(self, session: Session) -> None:
        """A session ends, or its plan is about to change; idempotent."""
        if session.pace is not None:
            known = session.pace.known
            known.sessions -= 1
            if session.pace.own:
                self._own.leave(known.kind)
            session.pace = None

    def begin_round(self, sessions: int, now: float) -> None:
        """A round is about to be planned while so many sessions are being served."""
        self._round += 1
        self._now = now
        if self._loads.begin_round(sessions):
            self.changed = self._automatic
            self._round_s = self._loads.round_s

    def pauses(self, session: Session) -> bool:
        """Whether the session should decode plainly now, whatever its plan wishes for."""
        pace = session.pace
        if not self._automatic or pace is None:
            return False
        if pace.own:
            return session.paused or self._own.plain(self._now)
        return self._fresh(pace.known).plain

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

    def answer_s_of(self, drafter_id: DrafterId) -> float:
        """The same of one drafter, as it was last if none are in use; any thread may ask."""
        kinds = [
            known for known in list(self._kinds.values()) if known.kind.drafter_id == drafter_id
        ]
        used = [known for known in kinds if known.sessions]
        return max((known.arrival.mean_s for known in used or kinds), default=0.0)

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
        prompts: Sequence[int],
        now: float,
    ) -> None:
        """A round ended that took `seconds` without waiting, `forward_s` of them for the target's
        forward. `prompts`: the tokens of each prompt that it took."""
        decoded = [row for row in rows if row.verified is not None]
        nodes = sum(_nodes(row) for row in decoded)
        own = [row for row in decoded if row.result.drafted and not _nodes(row)]
        pieces = sum(-(-tokens // self._piece_tokens) for tokens in prompts)
        left_s = self._loads.observe(
            len(decoded), nodes, pieces, self._piece_tokens, seconds, own=bool(own)
        )
        touched: list[Tally] = []
        for row in decoded:
            self._observe_row(row, now, touched)
        if own:
            self._own.observe(own, seconds if len(own) == len(decoded) else None, pieces, now)
            self.changed = self.changed or (self._automatic and self._own.plain(now))
        elif decoded:
            self._note_costs(len(decoded), nodes, left_s, forward_s - (seconds - left_s))
        for tally in touched:
            if self._automatic:
                self._judge(tally)
            tally.clear()

    def _observe_row(self, row: Settled, now: float, touched: list[Tally]) -> None:
        """Add what a session got to what its kind did."""
        session, pace = row.session, row.session.pace
        if pace is None or pace.own:
            return
        loads, last_at = self._loads, pace.last_at
        spent_s = now - last_at - (loads.prompts_s - pace.prompts_s)
        alone_s = loads.alone_s - pace.alone_s
        pace.last_at, pace.prompts_s, pace.alone_s = now, loads.prompts_s, loads.alone_s
        if session.link_id is None:
            # Without a drafter there was no choice, so nothing is learnt about it.
            return
        known, nodes = pace.known, _nodes(row)
        if nodes:
            assert row.result.acceptance is not None
            key = nodes, len(row.result.acceptance.accepted_nodes)
            known.judged[key] = known.judged.get(key, 0) + 1
        elif session.suspect or row.missed:
            absent = row.missed and pace.unheard > 0
            if self._round_s:
                # One drafter that stops is no reason to leave speculation; misses for ever are.
                spent_s = min(spent_s, MISS_ROUNDS * self._round_s)
            self._unheard(session, pace)
            if absent:
                return
        if math.isnan(last_at):
            # Its first round: the drafter had the prompt to read, as it will not again.
            pace.settled = True
            return
        tally = known.tallies[2 * session.paused + pace.settled]
        if not tally.rows:
            touched.append(tally)
        count = len(row.tokens)
        tally.rows += 1
        tally.tokens += count
        tally.squares += count * count
        tally.seconds += max(0.0, spent_s)
        tally.alone_s += alone_s
        pace.settled = True

    def _note_costs(self, rows: int, nodes: int, seconds: float, forward_s: float) -> None:
        # Plain rounds tell no drafter: the host's share is no matter of nodes.
        self.costs.observe(rows, nodes, forward_s)
        if nodes:
            self._host_s += GAIN * (max(0.0, seconds - forward_s) - self._host_s)
        else:
            self._round_s = self._loads.round_s

    def _judge(self, tally: Tally) -> None:
        """Let the contest of a kind see what the kind's sessions got."""
        known = tally.known
        contest = self._contest(known)
        contest.expected_s = self._loads.plain_s
        timed = tally.alone_s <= MOST_ALONE * tally.seconds
        known.starved = 0 if timed else known.starved + 1
        before = contest.mode
        contest.observe(
            tally.mode,
            Seen(
                rows=tally.rows,
                tokens=tally.tokens,
                squares=tally.squares,
                seconds=tally.seconds,
                sessions=known.sessions,
                settled=tally.settled,
                timed=timed or known.starved > STARVED_ROUNDS,
            ),
        )
        self.changed = self.changed or contest.mode is not before
        known.review += 1
        if known.review >= REVIEW_ROUNDS and known.kind.top_k == 1:
            known.review = 0
            known.share()
            limit = self._length(known)
            self.changed = self.changed or limit != known.limit
            known.limit = limit

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
        rows, longest = 1 << self._loads.load, known.kind.draft_tokens
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
        for name, mode, gain in self._own.summaries(self._now):
            yield f"{name}: {mode}{_gain(gain)}"
        load = self._loads.load
        for kind, known in list(self._kinds.items()):
            contest = known.contests.get(load)
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
            contest = self._contest(known)
            known.plain = contest.mode is Mode.PLAIN
            known.why = REASON_FLAGS[contest.reason]
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
        load = self._loads.load
        contest = known.contests.get(load)
        if contest is None or not contest.decided:
            contest = begun_contest(known, self._kinds.values(), load)
            contest.expected_s = self._loads.plain_s
            known.contests[load] = contest
        return contest


def _nodes(row: Settled) -> int:
    """Nodes of the draft from outside that the row verified."""
    return 0 if row.verified is None else row.verified.nodes


def _gain(gain: float) -> str:
    return "" if math.isnan(gain) else f", {gain:.2f}x of plain"
