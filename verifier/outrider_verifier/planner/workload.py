"""Workload classes: sessions whose speculation goes alike, and what is measured about them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from outrider.ids import DrafterId
from outrider.spec.plan import DraftMethod
from outrider.spec.sampling import Rule
from outrider_verifier.planner.draft_length import (
    AcceptanceByDepth,
    ForwardTimes,
    choose_draft_length,
)
from outrider_verifier.planner.proposal_wait import ArrivalEstimate, ProposalWait
from outrider_verifier.planner.speculation_controller import (
    OFF,
    CandidateShape,
    RoundObservation,
    SpeculationController,
)
from outrider_verifier.state.session import NO_LIMIT, Session

MAX_WORKLOAD_CLASSES: Final = 256
"""Classes that are remembered; the oldest one without sessions is forgotten first."""
REVIEW_ROUNDS: Final = 48
"""Drafted rounds after which a class's draft length is chosen anew."""
RESUME_ROUNDS: Final = 3.0
"""Drafted rounds of a session that resumes which tell nothing about drafts: its drafter, and the
other sessions that resume, are out of step."""
CATCH_UP_WEIGHT: Final = 0.2
"""What a round without a draft counts of these."""


class WorkloadClass(NamedTuple):
    """Sessions with equal values here are expected to speculate alike, so they share statistics."""

    drafter_id: DrafterId | None
    method: DraftMethod
    draft_tokens: int
    top_k: int
    rule: Rule
    temperature: float
    """Rounded to tenths."""
    look_ahead: bool = False
    """Whether drafts may be made ahead of their verdicts."""
    fan_out: int = 0
    has_grammar: bool = False
    """Rounds of sessions with a grammar wait for the host, and other drafts are accepted."""

    @classmethod
    def of_session(cls, session: Session) -> WorkloadClass:
        """The class of a session with a speculative plan."""
        plan, sampling = session.plan, session.spec.sampling
        return cls(
            drafter_id=session.spec.drafter_id,
            method=plan.method,
            draft_tokens=plan.draft_tokens,
            top_k=plan.top_k,
            rule=sampling.rule,
            temperature=round(sampling.temperature, 1),
            look_ahead=plan.look_ahead > 0,
            fan_out=plan.fan_out,
            has_grammar=session.constraint is not None,
        )

    @property
    def shape(self) -> CandidateShape:
        """The shape of its drafts, made in lock-step."""
        return CandidateShape(self.draft_tokens, is_tree=self.top_k > 1)

    @property
    def shape_ahead(self) -> CandidateShape:
        """The same, made ahead of verdicts."""
        return self.shape._replace(is_ahead=True)

    def __str__(self) -> str:
        kind = "chain" if self.top_k == 1 else "tree"
        grammar = ", grammar" if self.has_grammar else ""
        sampling = f"{self.rule}, T {self.temperature}{grammar}"
        return f"{self.method} {kind} of {self.draft_tokens}, {sampling}"


@dataclass(slots=True)
class RowTally:
    """Sums over rows of one class and shape in one round; see `RoundObservation`."""

    rows: int = 0
    tokens: int = 0
    squares: int = 0
    seconds: float = 0.0

    def add_row(self, tokens: int, seconds: float) -> None:
        """Count a row."""
        self.rows += 1
        self.tokens += tokens
        self.squares += tokens * tokens
        self.seconds += seconds

    def take(self, sessions: int, *, is_settled: bool, weight: float) -> RoundObservation:
        """The sums, which begin anew."""
        seen = RoundObservation(
            self.rows, self.tokens, self.squares, self.seconds, sessions, is_settled, weight
        )
        self.rows = self.tokens = self.squares = 0
        self.seconds = 0.0
        return seen


@dataclass(slots=True, eq=False)
class WorkloadStats:
    """What was measured about a class whose drafts come by messages."""

    workload_class: WorkloadClass
    controller: SpeculationController
    shapes: tuple[CandidateShape, ...]
    """Draft shapes that its sessions may have, `OFF` included, the first one first."""
    acceptance: AcceptanceByDepth
    arrivals: tuple[ArrivalEstimate, ArrivalEstimate] = field(
        default_factory=lambda: (ArrivalEstimate(), ArrivalEstimate())
    )
    """Of proposals that were waited for, in lock-step and with look-ahead, where the drafter may be
    busy with drafting ahead."""
    sessions: int = 0
    """Sessions that this class has now."""
    decoding: int = 0
    """Of these, sessions that have been in a round; those that wait or prefill are not."""
    shape: CandidateShape = OFF
    """What its sessions should have in the next round."""
    limits: dict[int, int] = field(default_factory=dict)
    """Draft tokens that are worth verifying, by load; absent: all."""
    forwards: dict[int, ForwardTimes] = field(default_factory=dict)
    """By load."""
    tallies: dict[tuple[CandidateShape, bool], RowTally] = field(default_factory=dict)
    """Of the round that is being observed, by shape and whether its rows are settled."""
    _rounds_since_review: int = 0
    _step_s: float = 0.0
    """Mean time from one drafted round of a session to the next."""

    @property
    def is_plain(self) -> bool:
        """Whether its sessions should decode plainly."""
        return not self.shape.nodes

    @property
    def arrival(self) -> ArrivalEstimate:
        """When proposals arrive with the shape in force."""
        return self.arrivals[self.shape.is_ahead]

    def tally(self, shape: CandidateShape, is_settled: bool) -> RowTally:
        """Where a row with drafts of a shape counts."""
        tally = self.tallies.get((shape, is_settled))
        if tally is None:
            tally = self.tallies[shape, is_settled] = RowTally()
        return tally

    def shape_of(self, session: Session) -> CandidateShape:
        """The shape that a session has now."""
        if session.is_speculation_off:
            return OFF
        mine = self.workload_class
        return mine.shape_ahead if session.is_look_ahead_on else mine.shape

    def reset_drafter(self) -> None:
        """Another drafter drafts: what was measured of its predecessor is void."""
        self.controller = SpeculationController()
        self.arrivals = ArrivalEstimate(), ArrivalEstimate()
        self.acceptance = AcceptanceByDepth(self.workload_class.draft_tokens)
        self.limits.clear()
        self._rounds_since_review, self._step_s = 0, 0.0

    def draft_limit(self, load: int) -> int:
        """Draft tokens that are worth verifying at a load."""
        return self.limits.get(load, NO_LIMIT)

    def observe_forward(self, load: int, nodes: int, seconds: float) -> None:
        """A forward took `seconds`, whose rows had so many draft nodes in the mean."""
        self.forwards.setdefault(load, ForwardTimes()).observe_forward(nodes, seconds)

    def review_draft_length(self, load: int, step_s: float) -> bool:
        """A drafted round ended; choose the length of chains, if that is due. `step_s`: time from
        one of a session's rounds to the next. Returns whether the length has changed."""
        self._step_s += (step_s - self._step_s) / 8.0 if self._step_s else step_s
        self._rounds_since_review += 1
        if self._rounds_since_review < REVIEW_ROUNDS or self.workload_class.top_k != 1:
            return False
        self._rounds_since_review = 0
        longest, before = self.workload_class.draft_tokens, self.draft_limit(load)
        forwards, present = self.forwards.get(load), min(before, longest)
        if forwards is None or self.shape.is_ahead:
            return False
        forward_s = forwards.estimate(present)
        length = choose_draft_length(
            self.acceptance.reach(),
            forwards.estimates,
            extra_s=max(0.0, self._step_s - forward_s) if forward_s > 0.0 else 0.0,
            present=present,
        )
        self.limits[load] = limit = NO_LIMIT if length >= longest else length
        return limit != before


@dataclass(slots=True, eq=False)
class SpeculationState:
    """What the policy keeps of one session whose plan speculates."""

    workload: WorkloadStats | None
    """None: its drafts are made in this process or on another device, or nobody can draft for
    it."""
    in_process_class: WorkloadClass | None = None
    """The class of a session with in-process drafts; None: it has none."""
    wait: ProposalWait = field(default_factory=ProposalWait)
    last_round_s: float = math.nan
    """End of its last round, on a clock that what prompts add to rounds does not move; nan before
    the first one."""
    unsettled_rounds: float = 1.0
    """Rounds to come that tell of a change and not of the shape."""

    @property
    def is_in_process(self) -> bool:
        """Whether its drafts are in-process drafts, or were until they were dropped."""
        return self.in_process_class is not None

    @property
    def lacks_features(self) -> bool:
        """Whether nobody can draft for it: its plan needs features that are kept no more."""
        return self.workload is None and self.in_process_class is None

    def record_mode_change(self, *, paused: bool) -> None:
        """Speculation of the session goes off or on."""
        self.unsettled_rounds = max(self.unsettled_rounds, 1.0 if paused else RESUME_ROUNDS)
        self.wait.is_catching_up = not paused

    def record_look_ahead_change(self) -> None:
        """The session goes over to look-ahead or to lock-step: the drafts of two rounds may be of
        the old kind."""
        self.unsettled_rounds = max(self.unsettled_rounds, 2.0)

    def record_resume(self) -> None:
        """Its KV was computed once more: the time since its last round tells nothing."""
        if self.workload is not None and not math.isnan(self.last_round_s):
            self.workload.decoding -= 1
        self.last_round_s = math.nan

    def record_round_end(self, clock_s: float) -> float:
        """A round of it ended at this time; returns the time since the one before, nan if it is the
        first."""
        last_s, self.last_round_s = self.last_round_s, clock_s
        if self.workload is not None and last_s != last_s:
            self.workload.decoding += 1
        return max(0.0, clock_s - last_s) if last_s == last_s else math.nan

    def record_round(self, *, is_drafted: bool, is_off: bool, missed: bool) -> None:
        """A round of it went by. `missed`: it had waited for a draft in vain."""
        counts = is_drafted or is_off or missed
        self.unsettled_rounds -= 1.0 if counts else CATCH_UP_WEIGHT
