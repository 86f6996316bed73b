"""Whether and how each session speculates: decided from what its rounds were seen to give (pure).

Sessions of one kind (drafter, draft method and shape, rule, temperature) share what is learnt:
whether drafts beat plain decoding at this load (`spec.contest`), when proposals arrive, how deep
drafts stand. A session whose kind decodes plainly is *paused*: it waits for nothing, its drafter is
told nothing and catches up when it is tried again. Times are seconds of one clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from outrider.ids import DrafterId
from outrider.spec.contest import Contest, Mode
from outrider.spec.costs import CostTable
from outrider.spec.draft_length import choose_length
from outrider.spec.estimates import AcceptanceEstimate, ArrivalEstimate, patience_s
from outrider.spec.plan import DraftMethod
from outrider.spec.sampling import Rule
from outrider_verifier.sessions import NO_LIMIT, Session

REVIEW_ROUNDS: Final = 48
"""Speculative rounds after which a session's draft length is chosen anew."""
HOLD_ROUNDS: Final = 16
"""Rounds without a wait after which a suspect drafter is waited for once more; doubles each time
that this is in vain."""
MAX_HOLD_ROUNDS: Final = 256
MISS_ROUNDS: Final = 4.0
"""Plain rounds that a miss counts as at most when drafts are judged."""
MAX_KINDS: Final = 256
"""Kinds that are remembered; the oldest one is forgotten."""


class Kind(NamedTuple):
    """What sessions share whose speculation goes alike."""

    drafter_id: DrafterId | None
    method: DraftMethod
    draft_tokens: int
    top_k: int
    rule: Rule
    temperature: float
    """Rounded to tenths."""


class Verified(NamedTuple):
    """What a round did for one session."""

    session: Session
    emitted: int
    nodes: int
    depth: int
    """Levels of the draft that was verified; 0 without one."""
    accepted_len: int
    missed: bool = False
    """Whether a proposal was wanted and none was there."""


@dataclass(slots=True)
class Known:
    """What is known of a kind."""

    acceptance: AcceptanceEstimate = field(default_factory=AcceptanceEstimate)
    arrival: ArrivalEstimate = field(default_factory=ArrivalEstimate)
    contests: dict[int, Contest] = field(default_factory=dict)
    """By load, in powers of two."""
    latest: Contest | None = None
    sessions: int = 0


@dataclass(slots=True)
class Pace:
    """What the policy keeps of one session."""

    known: Known
    acceptance: AcceptanceEstimate
    last_at: float
    """When its last round ended."""
    settled: bool = False
    """Whether its last round was in the mode of its present one."""
    holding: bool = True
    """Whether its drafter is thought to be catching up, and given more time for that."""
    missed_len: int = -1
    """Length of the prefix whose proposal did not come in time, and since when it was awaited."""
    missed_at: float = 0.0
    unheard: int = 0
    """Rounds that did not wait since the drafter became suspect."""
    hold_after: int = HOLD_ROUNDS
    review: int = REVIEW_ROUNDS
    """Speculative rounds until its draft length is chosen anew."""


@dataclass(slots=True)
class _Sum:
    """What sessions of one kind and mode got in a round."""

    pace: Pace
    """Of one of them."""
    tokens: int = 0
    seconds: float = 0.0
    rows: int = 0


class Policy:
    """Decides for all sessions of a verifier; engine thread only, `summary` by any."""

    def __init__(self, *, automatic: bool, ceiling_s: float) -> None:
        """`automatic`: False carries plans out as they are. `ceiling_s`: see `patience_s`."""
        self._automatic = automatic
        self._ceiling_s = ceiling_s
        self.costs = CostTable()
        """Rounds by shape, without waiting; a warm-up may fill it before the first session."""
        self._kinds: dict[Kind, Known] = {}
        self._load = 0
        self._round_s = 0.0
        self.changed = False
        """Whether `pauses` may answer differently than before; for the caller to reset."""

    # ---- sessions ------------------------------------------------------------------------------

    def follow(self, session: Session) -> None:
        """A session begins, or its plan has changed."""
        self.leave(session)
        session.draft_limit = NO_LIMIT
        if not session.plan.speculative:
            return
        known = self._known(_kind_of(session))
        known.sessions += 1
        estimate = AcceptanceEstimate(prior=known.acceptance)
        self.changed = self._automatic
        session.pace = Pace(known=known, acceptance=estimate, last_at=session.since)

    def leave(self, session: Session) -> None:
        """A session ends, or its plan is about to change; idempotent."""
        if session.pace is not None:
            session.pace.acceptance.share()
            session.pace.known.sessions -= 1
            session.pace = None

    def set_load(self, sessions: int) -> None:
        """How many sessions are being served now."""
        load = sessions.bit_length()
        if load != self._load:
            self._load, self.changed = load, self._automatic
            estimate = self.costs.estimate(max(1, sessions), 0)
            self._round_s = estimate if estimate > 0.0 else 0.0

    def pauses(self, session: Session) -> bool:
        """Whether the session should decode plainly now, whatever its plan wishes for."""
        if not self._automatic or session.pace is None:
            return False
        return self._contest(session.pace).mode is Mode.PLAIN

    def turn(self, session: Session, *, paused: bool) -> None:
        """The session pauses or resumes speculation with its next round."""
        session.paused = paused
        if session.pace is not None:
            session.pace.settled = False
            session.pace.holding = not paused

    def attached(self, drafter_id: DrafterId) -> None:
        """A drafter has connected: what was found of its predecessor's speed is void."""
        self.changed = self._automatic
        for kind, known in self._kinds.items():
            if kind.drafter_id == drafter_id:
                known.contests.clear()
                known.latest, known.arrival = None, ArrivalEstimate()

    # ---- waiting -------------------------------------------------------------------------------

    def patience(self, session: Session) -> float:
        """How long the session's next round waits for a proposal; the plan's bound holds."""
        bound_s = session.plan.patience_ms / 1000.0
        pace = session.pace
        if not self._automatic or pace is None:
            return bound_s
        # A drafter that has to catch up first takes longer than it usually does.
        arrival = _UNKNOWN if pace.holding else pace.known.arrival
        return patience_s(arrival, self._round_s, bound_s=bound_s, ceiling_s=self._ceiling_s)

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
        self, rows: Sequence[Verified], *, seconds: float, nodes: int, prompts: bool, now: float
    ) -> None:
        """A round ended that took `seconds` without waiting, with `nodes` draft nodes in all.

        Rounds with `prompts` in them say nothing of what drafts cost.
        """
        if not rows:
            return
        if not prompts:
            self.costs.observe(len(rows), nodes, seconds)
            if not nodes:
                self._round_s += 0.125 * (seconds - self._round_s) if self._round_s else seconds
        sums: dict[tuple[int, bool, bool], _Sum] = {}
        judges = self._automatic and not prompts
        for row in rows:
            session, pace = row.session, row.session.pace
            if pace is None or session.ended:
                continue
            spent_s, pace.last_at = now - pace.last_at, now
            absent = row.missed and pace.unheard > 0
            if row.missed and self._round_s:
                # One drafter that stops is no reason to leave speculation; misses for ever are.
                spent_s = min(spent_s, MISS_ROUNDS * self._round_s)
            self._learn(row, pace)
            # Without a drafter there was no choice, so nothing is learnt about it.
            if not judges or absent or (session.link_id is None and not session.own_draft):
                continue
            key = id(pace.known), session.paused, pace.settled
            total = sums.get(key)
            if total is None:
                total = sums[key] = _Sum(pace)
            total.tokens += row.emitted
            total.seconds += spent_s
            total.rows += 1
            pace.settled = True
        for (_, paused, settled), total in sums.items():
            self._judge(total, Mode.PLAIN if paused else Mode.SPECULATE, settled)

    def _judge(self, total: _Sum, mode: Mode, settled: bool) -> None:
        """Let the contest of a kind see what the kind's sessions got."""
        contest = self._contest(total.pace)
        share, before = 1.0 / max(1, total.pace.known.sessions), contest.mode
        contest.observe(
            mode, total.tokens * share, total.seconds * share, total.rows * share, settled=settled
        )
        self.changed = self.changed or contest.mode is not before

    def _learn(self, row: Verified, pace: Pace) -> None:
        session = row.session
        if session.suspect:
            pace.unheard += 1
            if pace.unheard >= pace.hold_after:
                # Told of every round, a drafter that is well again needs no more than usual.
                session.suspect, pace.holding, pace.unheard = False, False, 0
                pace.hold_after = min(2 * pace.hold_after, MAX_HOLD_ROUNDS)
        if row.depth < 1:
            return
        pace.acceptance.observe(row.depth, row.accepted_len)
        pace.review -= 1
        if self._automatic and pace.review <= 0 and session.plan.top_k == 1:
            pace.review = REVIEW_ROUNDS
            session.draft_limit = self._length(session, pace)

    def _length(self, session: Session, pace: Pace) -> int:
        """The length of a chain; at least 1, for whether to draft at all is for the contest."""
        rows = max(1, 1 << (self._load - 1))
        longest = session.own_draft or session.plan.draft_tokens
        arrival = pace.known.arrival
        length = choose_length(
            pace.acceptance.reached(longest),
            lambda lengths: self.costs.estimates(rows, lengths * np.float64(rows)),
            extra_s=0.0 if session.own_draft else arrival.mean_s,
            present=min(session.draft_limit, longest),
        )
        return NO_LIMIT if length >= longest else max(1, length)

    # ---- reports -------------------------------------------------------------------------------

    def decision(self, session: Session) -> str:
        """The mode in force for the session and why: "speculate/faster"; "" without a choice."""
        if not self._automatic or session.pace is None:
            return ""
        contest = self._contest(session.pace)
        return f"{Mode.PLAIN if session.paused else Mode.SPECULATE}/{contest.reason}"

    def summary(self) -> str:
        """For each kind of session being served: its mode, why, and what drafts gain; ASCII."""
        return "; ".join(self._summaries())

    def _summaries(self) -> Iterator[str]:
        for kind, known in list(self._kinds.items()):
            contest = known.contests.get(self._load)
            if not known.sessions or contest is None:
                continue
            gain = "" if math.isnan(contest.gain) else f", {contest.gain:.2f}x of plain"
            shape = (
                f"chain of {kind.draft_tokens}"
                if kind.top_k == 1
                else (f"tree of {kind.draft_tokens}")
            )
            yield (
                f"{kind.method} {shape}, {kind.rule}, T {kind.temperature}: "
                f"{contest.mode} ({contest.reason}{gain})"
            )

    @property
    def automatic(self) -> bool:
        """Whether anything is decided here."""
        return self._automatic

    def _known(self, kind: Kind) -> Known:
        known = self._kinds.get(kind)
        if known is None:
            while len(self._kinds) >= MAX_KINDS:
                del self._kinds[next(iter(self._kinds))]
            known = self._kinds[kind] = Known()
        return known

    def _contest(self, pace: Pace) -> Contest:
        known = pace.known
        contest = known.contests.get(self._load)
        if contest is None:
            begin_with = None if known.latest is None else known.latest.settled_mode
            contest = known.contests[self._load] = Contest(
                self._round_s or float("nan"), begin_with
            )
        known.latest = contest
        return contest


_UNKNOWN: Final = ArrivalEstimate()


def _kind_of(session: Session) -> Kind:
    plan, sampling = session.plan, session.spec.sampling
    return Kind(
        drafter_id=session.spec.drafter_id,
        method=plan.method,
        draft_tokens=session.own_draft or plan.draft_tokens,
        top_k=1 if session.own_draft else plan.top_k,
        rule=sampling.rule,
        temperature=round(sampling.temperature, 1),
    )
