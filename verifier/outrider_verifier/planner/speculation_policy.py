"""Whether and how each session speculates: decided from what its rounds were seen to give (pure).

Sessions of one kind (drafter, draft method and shape, rule, temperature) share what is learnt:
whether drafts beat plain decoding at this load (`spec.contest`), whether drafting ahead of the
verdicts beats lock-step (`spec.look_ahead`), when proposals arrive, how deep drafts stand. A
session whose kind decodes plainly is *paused*: it waits for nothing, its drafter is told nothing
and catches up when it is tried again. Where a head in this process drafts, all its sessions share
one verdict (`spec.own_drafts`), because rounds of both modes together read the weights twice, and
a session that is paused stays so. What prompts add to rounds is left out: both modes meet them, by
chance sooner or later. Times are seconds of one clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from outrider.ids import DrafterId
from outrider.spec.decoding_mode import Mode, Reason
from outrider.speculation.cost_table import CostTable
from outrider.speculation.estimates import LEAST_ROUNDS, patience_s
from outrider.wire.messages import PAUSED
from outrider.wire.spec_stats_accumulator import REASON_FLAGS
from outrider_verifier.model_runner.results import NO_ROWS, Alike, Settled
from outrider_verifier.planner import feature_retention
from outrider_verifier.planner.draft_length import Lengths
from outrider_verifier.planner.in_process_planner import OwnVerdicts
from outrider_verifier.planner.load_burst_hold import hold, stays
from outrider_verifier.planner.load_stats import Loads, Times
from outrider_verifier.planner.round_observer import Judging
from outrider_verifier.planner.workload_registry import Kinds
from outrider_verifier.planner.workload_stats import Kind, Known, Pace, named_gain
from outrider_verifier.state.session import NO_LIMIT, Session

PLAIN_LOOKS: Final = 4
"""Rounds for which what is in force for sessions that decode plainly is not looked up anew, if
nothing has changed: a small model's rounds are short, and in each of them they would ask."""
IDLE_S: Final = 0.25
IDLE_ROUNDS: Final = 16
"""Time, and plain rounds, without any round after which what the load was before is over: whoever
comes then is not one of those who were left."""


class Policy:
    """Decides for all sessions of a verifier; engine thread only, `summary` by any."""

    def __init__(
        self,
        *,
        automatic: bool,
        ceiling_s: float,
        times: Times = lambda rows, *, own, pieces=0, featured=False: None,
        verify_s: Callable[[int, int], float | None] = lambda rows, nodes: None,
        piece_tokens: int = 1,
        shares_cores: bool = False,
    ) -> None:
        """`automatic`: False carries plans out as they are. `ceiling_s`: see `patience_s`.
        `verify_s`: seconds of a forward over so many rows, of so many nodes each; None where that
        was not measured. `piece_tokens`: prompt tokens of a piece, as `times` counts them.
        `shares_cores`: whether
        the target computes where a drafter of this host does, so that what is drafted ahead is
        likely to cost more than it hides."""
        self._automatic = automatic
        self._ceiling_s = ceiling_s
        self.costs = CostTable()
        """Forwards by the shape of their round."""
        self._kinds = Kinds(automatic=automatic, begins_ahead=not shares_cores)
        self._loads = Loads(times, self.costs, piece_tokens=piece_tokens)
        self._own = OwnVerdicts(self._loads)
        self._judging = Judging(
            self._loads,
            self._kinds,
            self._own,
            Lengths(self.costs, verify_s),
            self.costs,
            automatic=automatic,
            piece_tokens=piece_tokens,
        )
        self._round = 0
        self._looked_at = 0
        """The round in which it was last looked around; see `PLAIN_LOOKS`."""
        self._settled = False
        """Whether the load had lasted when the last round was planned."""
        self._round_s = 0.0
        """A plain round at this load; 0: not known."""
        self._now = 0.0
        self._ended_at = math.inf
        """Clock time of the end of the last round; infinite before there was one."""
        self.changed = False
        """Whether `pauses`, `limit` or `looks_ahead` may answer differently than before; for the
        caller to reset."""

    # ---- sessions ------------------------------------------------------------------------------

    def opened(self, session: Session) -> None:
        """A session begins. No round has it yet, so what is in force for its kind holds for it at
        once."""
        self._now = max(self._now, session.since)
        self._rest(1)
        pace = self._join(session)
        if pace is None:
            return
        if pace.known.sessions == 1 and not pace.own:
            # The only one of its kind may have changed what is in force.
            self.changed = self._automatic
            return
        session.draft_limit = self.limit(session)
        held = self._automatic and not pace.own and self._fresh(pace.known).begins_plainly
        if not session.paused and (held or self.pauses(session)):
            self.turn(session, paused=True)
        if self.lets_go(session):
            self.let_go(session)

    def follow(self, session: Session) -> None:
        """The plan of a session, or its drafter, has changed."""
        if self._join(session) is not None:
            self.changed = self._automatic

    def _join(self, session: Session) -> Pace | None:
        """Count a session to its kind; None: its plan has no choice."""
        self.leave(session)
        session.draft_limit, session.ahead = NO_LIMIT, False
        if not session.plan.speculative:
            return None
        known = self._kinds.of(Kind.of(session))
        known.sessions += 1
        own = session.own_draft > 0
        session.pace = pace = Pace(known, own, feature_retention.never_drafts(session))
        known.lean += pace.lean
        if known.look is not None:
            known.look.begins(known.sessions)
        session.ahead = self.looks_ahead(session)
        if own:
            self._own.follow(known.kind)
            if self.pauses(session):
                self.turn(session, paused=True)
        elif known.sessions == 1 and known.contests:
            self._kinds.contest(known, self._loads).begin_text()
        return pace

    def leave(self, session: Session) -> None:
        """A session ends, or its plan is about to change; idempotent."""
        if session.pace is not None:
            known = session.pace.known
            known.sessions -= 1
            known.lean -= session.pace.lean
            if session.pace.own:
                self._own.leave(known.kind)
            session.pace = None

    def begin_round(self, sessions: int, now: float) -> None:
        """A round is about to be planned while so many sessions are being served."""
        self._round += 1
        self._now = now
        self._rest(sessions)
        if self._loads.begin_round(sessions):
            self.changed = self._automatic
            self._round_s = self._loads.round_s
        if self._settled is not self._loads.settled:
            self._settled = self._loads.settled
            self.changed = self._automatic
        if self.changed or self._round - self._looked_at >= PLAIN_LOOKS:
            self._looked_at = self._round
            self._judging.look_around()

    def _rest(self, sessions: int) -> None:
        """Begin anew with so many sessions if nothing has run for a while."""
        if self._now - self._ended_at > max(IDLE_S, IDLE_ROUNDS * self._round_s):
            self._ended_at = self._now
            self._loads.rest(sessions)
            self._round_s = self._loads.round_s
            self.changed = self._automatic

    def pauses(self, session: Session) -> bool:
        """Whether the session should decode plainly now, whatever its plan wishes for."""
        pace = session.pace
        if not self._automatic or pace is None:
            return False
        if pace.own:
            return session.paused or self._own.plain(self._now)
        known = self._fresh(pace.known)
        return pace.lean or known.plain or stays(known, session)

    def lets_go(self, session: Session) -> bool:
        """Whether a paused session should keep no features any more: see `lean`."""
        pace = session.pace
        if pace is None or not (session.paused and session.keeps_features and self._automatic):
            return False
        return self._fresh(pace.known).lets_go

    def let_go(self, session: Session) -> None:
        """The session is kept no features of any more, and so paused to its end."""
        session.lean, session.keeps_features = True, False
        if session.pace is not None:
            session.pace.lean = True
            session.pace.known.lean += 1

    def looks_ahead(self, session: Session) -> bool:
        """Whether the session is to be drafted for ahead of its verdicts, if its plan allows it."""
        pace = session.pace
        if pace is None or pace.own or not session.plan.look_ahead:
            return False
        look = pace.known.look
        return not self._automatic or (look is not None and look.ahead(self._loads.load))

    def limit(self, session: Session) -> int:
        """Draft levels of the session that are worth verifying.

        What is drafted ahead is for outcomes of whole drafts: of one that was cut, those that end
        at the cut are none of them, so every cut would be a miss.
        """
        pace = session.pace
        if pace is None or self.looks_ahead(session):
            return NO_LIMIT
        return pace.known.limit(self._loads.load)

    def turn(self, session: Session, *, paused: bool) -> None:
        """The session pauses or resumes speculation with its next round."""
        session.paused = paused
        if session.pace is not None:
            session.pace.turned(self._now, paused=paused)
            if paused and session.pace.own:
                # The head's K/V ends here: its drafts cannot be had again.
                session.own_draft = 0

    def turn_ahead(self, session: Session, *, ahead: bool) -> None:
        """The session's drafter is about to be told to look ahead, or not to."""
        session.ahead = ahead
        if session.pace is not None:
            session.pace.turned_ahead()

    def attached(self, drafter_id: DrafterId) -> None:
        """A drafter has connected: what was found of its predecessor's speed is void."""
        self.changed = self._automatic
        self._kinds.attached(drafter_id)

    def answer_s(self) -> float:
        """See `Kinds.answer_s`."""
        return self._kinds.answer_s()

    def answer_s_of(self, drafter_id: DrafterId) -> float:
        """See `Kinds.answer_s_of`; any thread may ask."""
        return self._kinds.answer_s_of(drafter_id)

    # ---- waiting -------------------------------------------------------------------------------

    def patience(self, session: Session) -> float:
        """How long the session's next round waits for a proposal; the plan's bound holds."""
        bound_s = session.plan.patience_ms / 1000.0
        pace = session.pace
        if not self._automatic or pace is None:
            return bound_s
        if pace.holding:
            # A drafter that has to catch up first takes longer than it usually does.
            return min(bound_s, max(self._ceiling_s, LEAST_ROUNDS * self._round_s))
        return min(bound_s, self._fresh(pace.known).patience_s)

    def arrived(self, session: Session, *, prefix_len: int, usable: bool, now: float) -> None:
        """A proposal arrived; `usable`: it is for the session's present prefix."""
        session.suspect = False
        if session.pace is not None and not session.paused:
            session.pace.arrived(session, prefix_len=prefix_len, usable=usable, now=now)

    def missed(self, session: Session) -> None:
        """A patience ran out: the session's rounds do not wait until its drafter is heard of, or
        for a number of rounds."""
        session.suspect = True
        if session.pace is not None:
            session.pace.missed(session)

    # ---- what rounds were seen to give ---------------------------------------------------------

    def observe_round(
        self,
        rows: Sequence[Settled],
        alike: Alike = NO_ROWS,
        *,
        seconds: float,
        forward_s: float,
        prompts: Sequence[int],
        now: float,
    ) -> None:
        """A round ended that took `seconds` without waiting, `forward_s` of them for the target's
        forward: `rows` and those that were `alike`. `prompts`: the tokens of each one in it."""
        self._ended_at = now
        judging = self._judging
        judging.observe_round(rows, alike, seconds, forward_s, prompts, now, self._round_s)
        self.changed = self.changed or (self._automatic and judging.turned)
        if judging.plain:
            self._round_s = self._loads.round_s

    # ---- reports -------------------------------------------------------------------------------

    def planned(self, session: Session) -> int:
        """Flags of the mode in force for the session and why; 0 without a choice."""
        pace = session.pace
        if pace is None or not self._automatic:
            return 0
        why = REASON_FLAGS[Reason.FASTER] if pace.own else self._fresh(pace.known).why
        return why | PAUSED if session.paused else why

    def summary(self) -> str:
        """For each kind of session being served: its mode, why, and what drafts gain; ASCII."""
        return "; ".join(self._summaries())

    def _summaries(self) -> Iterator[str]:
        for name, mode, gain in self._own.summaries(self._now):
            yield f"{name}: {mode}{named_gain(gain)}"
        for known in list(self._kinds.values()):
            yield from known.summaries(self._loads.load)

    @property
    def automatic(self) -> bool:
        """Whether anything is decided here."""
        return self._automatic

    def _fresh(self, known: Known) -> Known:
        """`known` with what rows ask of it looked up for this round."""
        if known.fresh_at < (self._looked_at if known.plain else self._round):
            known.fresh_at = self._round
            known.ahead = known.look is not None and known.look.ahead(self._loads.load)
            known.patience_s = patience_s(
                known.arrival, self._round_s, bound_s=math.inf, ceiling_s=self._ceiling_s
            )
            contest = self._kinds.contest(known, self._loads)
            known.plain = contest.mode is Mode.PLAIN
            if contest.in_force is Mode.PLAIN:
                contest.ready_s = feature_retention.ready_s(known, self._loads)
            hold(known, contest, self._loads)
            lets_go = feature_retention.lets_go(known, contest, self._loads)
            if lets_go and not known.lets_go:
                # Whoever is paused already was not asked about it.
                self.changed = self._automatic
            known.lets_go = lets_go
            known.why = REASON_FLAGS[contest.reason]
        return known
